"""An error that one rank alone can see becomes the same error on every rank, so that nobody waits for it for ever."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from booster.comm.collectives import all_gather_equal, all_reduce_numbers, group_rank, group_size
from booster.comm.exchange import gather_distinct
from booster.comm.imagined import are_others_imagined
from booster.errors import BoosterError, DesyncError, RankFailedError

__all__ = ["raise_on_all_ranks", "require_same_on_all_ranks"]


def raise_on_all_ranks(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raises on every rank of the group if any rank brought an error; returns if none did.

    A rank that brought an error raises that error; the others raise an error of the same class (of this library's, else
    `RankFailedError`) with the failing rank's number and text.

    Collective: every rank of the group must call it, with None where all is well. One small all-reduce when nobody
    failed.
    """
    size = group_size(group)
    if size == 1 or are_others_imagined():
        if error is not None:
            raise error
        return
    failures = int(all_reduce_numbers([float(error is not None)], group)[0])
    if failures == 0:
        return
    reports = _from_all_ranks(None if error is None else (type(error).__name__, str(error)), group)
    if error is not None:
        raise error
    failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
    rank, (name, text) = failed[0]
    others = f" (and on {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    raise _error_class(name)(f"rank {rank} failed{others}, so rank {group_rank(group)} stops too: {text}")


def _error_class(name: str) -> type[BoosterError]:
    classes = {cls.__name__: cls for cls in BoosterError.__subclasses__()}
    return classes.get(name, RankFailedError)


def require_same_on_all_ranks(what: str, facts: Sequence[str], group: dist.ProcessGroup | None = None) -> None:
    """Raises `DesyncError` on every rank if the ranks' facts differ; names the first rank and fact that do.

    Args:
        what: What is compared, for the message.
        facts: Lines of text that must be the same everywhere, in the same order.
        group: The ranks that must agree.

    Collective: every rank of the group must call it. One all-gather of 32 bytes when they agree.
    """
    if group_size(group) == 1 or are_others_imagined():
        return
    digest = hashlib.sha256("\n".join(facts).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    digests = all_gather_equal(mine, group).view(-1, len(digest))
    if bool((digests == digests[0]).all()):
        return
    difference = _first_difference(_from_all_ranks(list(facts), group))
    raise DesyncError(f"the ranks differ in {what}: {difference}. Start every rank from the same script")


def _from_all_ranks(mine: object, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns what every rank gave, by rank; it must survive JSON."""
    payloads, owners = gather_distinct(json.dumps(mine).encode(), group)
    return [json.loads(payloads[owner]) for owner in owners]


def _first_difference(everyone: Sequence[Sequence[str]]) -> str:
    reference = everyone[0]
    for rank, facts in enumerate(everyone):
        for index in range(max(len(facts), len(reference))):
            ours = reference[index] if index < len(reference) else "nothing"
            theirs = facts[index] if index < len(facts) else "nothing"
            if ours != theirs:
                return f"rank 0 has {ours}, rank {rank} has {theirs}"
    raise AssertionError("called without a difference")
