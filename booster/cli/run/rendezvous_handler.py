"""torch's elastic rendezvous for several nodes, with a common node order, restart count and store address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

BACKEND = "booster-c10d"

# torch's c10d rendezvous numbers nodes by the text of their addresses; a node counts only the restarts that its own
# ranks caused; and the ranks' store is served by the node that came first in the first round. Ranks with different
# restart counts never find each other (Note [Restarts] in booster/launch/rendezvous.py), and a store whose node left is
# lost. So after each round the nodes exchange these through the rendezvous store: they are ordered by --node-rank if
# given, the restart count is the number of earlier rounds, and ranks use the rendezvous's own store.


@dataclass(slots=True)
class RestartCount:
    """Restart count of the whole job; None before the first start."""

    value: int | None = None


def register() -> None:
    """Register the rendezvous handler with torch's launcher as `BACKEND`."""
    rendezvous_handler_registry.register(BACKEND, _create)


def _create(params: RendezvousParameters) -> RendezvousHandler:
    backend, store = create_backend(params)
    return cast(RendezvousHandler, _RendezvousHandler(create_handler(store, backend, params), store, params))


class _RendezvousHandler:
    """torch's handler, which is asked for all that is not defined here."""

    def __init__(self, inner: RendezvousHandler, store: Store, params: RendezvousParameters) -> None:
        self._inner = inner
        self._job_store = PrefixStore(f"booster/{params.run_id}", store)
        self._requested_rank: int | None = params.get("wanted_rank")
        self._restart_count: RestartCount = params.get("attempt")
        self._store_info = RendezvousStoreInfo(*parse_rendezvous_endpoint(params.endpoint, default_port=-1))

    def next_rendezvous(self) -> RendezvousInfo:
        round_info = self._inner.next_rendezvous()
        try:
            rank = self._exchange(round_info)
        except DistError as error:
            raise RendezvousConnectionError("a node left while the nodes exchanged their order") from error
        return RendezvousInfo(round_info.store, rank, round_info.world_size, self._store_info)

    def _exchange(self, round_info: RendezvousInfo) -> int:
        # `round_info.store` belongs to this round alone.
        if round_info.rank == 0:
            round_info.store.set("booster/attempt", str(self._job_store.add("rounds", 1) - 1))
        requested = round_info.world_size if self._requested_rank is None else self._requested_rank
        round_info.store.set(f"booster/wanted/{round_info.rank}", str(requested))
        all_requested = [int(round_info.store.get(f"booster/wanted/{rank}")) for rank in range(round_info.world_size)]
        self._restart_count.value = int(round_info.store.get("booster/attempt"))
        return sorted(range(round_info.world_size), key=lambda rank: (all_requested[rank], rank)).index(round_info.rank)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # an object that is being copied has no `_inner` yet
            raise AttributeError(name)
        return getattr(self._inner, name)
