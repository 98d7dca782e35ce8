"""Ranks that are only imagined: what one rank of many would do, found out on that rank alone, without communication."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level

from booster.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["ImaginedMemory", "are_others_imagined", "imagine_others", "imagined_world"]

# Note [Imagined ranks]
# How much memory a rank needs can be found by letting it do its part on tensors without values. What it would get from
# others has no values either, so nothing has to travel: while others are imagined, collectives of CPU tensors end at
# once and leave their outputs as they are, and what ranks have to agree on they agree on, as all are like this one.
# Sizes and counts of what would have been sent are recorded as ever. Where no world was launched, `imagined_world`
# makes one of any size, with torch's own backend that only pretends; where one was, its groups are used.
_is_imagining = False


def are_others_imagined() -> bool:
    """Returns whether nothing is communicated now. See Note [Imagined ranks]."""
    return _is_imagining


@contextmanager
def imagine_others() -> Iterator[None]:
    """Lets collectives of this process end without a communication within the block."""
    global _is_imagining
    before, _is_imagining = _is_imagining, True
    try:
        yield
    finally:
        _is_imagining = before


@contextmanager
def imagined_world(num_ranks: int) -> Iterator[None]:
    """Makes this process the first of a world of so many ranks, the others of which there are not, within the block.

    Raises:
        ConfigError: There is a world already.
    """
    if dist.is_initialized():
        raise ConfigError(
            f"a world of {num_ranks} ranks can't be imagined where one of {dist.get_world_size()} was launched: ask"
            " about a plugin object that was made in it, or ask before the launch"
        )
    # Registers the backend "fake", which is in torch itself.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # which torch changes, to name the rank
    level = get_debug_level()
    set_debug_level(DebugLevel.OFF)  # TORCH_DISTRIBUTED_DEBUG=DETAIL would have real ranks meet at the store
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        with imagine_others():
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        set_debug_level(level)
        sys.excepthook = hook


class ImaginedMemory:
    """Stands in for memory that ranks share: its collectives move nothing."""

    def all_gather(self, output: torch.Tensor, payload: torch.Tensor, number: int) -> None:
        """Leaves the output as it is, as do the others."""

    def all_reduce(self, tensor: torch.Tensor, operator: str, number: int) -> None:
        """See `all_gather`."""

    def all_to_all(self, output: torch.Tensor, payload: torch.Tensor, number: int) -> None:
        """See `all_gather`."""

    def broadcast(self, tensor: torch.Tensor, source: int, number: int) -> None:
        """See `all_gather`."""

    def reduce_scatter(self, payload: torch.Tensor, output: torch.Tensor, number: int, **options: Any) -> None:
        """See `all_gather`."""

    def abort(self) -> None:
        """Does nothing, as nobody waits."""
