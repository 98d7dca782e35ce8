"""Consistency checks between ranks: equal values everywhere, and an error of one rank raised on all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from booster.errors import BoosterError, DesyncError, RankFailedError, format_ranks

from .collectives import all_gather_bytes, all_gather_equal, all_reduce_numbers, global_rank_of, group_rank, group_size
from .fake import is_fake_world

# Note [Digest exchange]
# Ranks with different programs are at different calls: one makes a plugin while another is in boost(), and a third has
# found a wrong argument. A backend cannot detect this: messages of different lengths make gloo abort the process, and
# messages of equal length for two purposes are confused. So every comparison during set-up starts with one record of
# fixed length: a digest of the call and of all values that must be equal, and whether this rank has an error. If the
# records are equal nothing else is sent. Otherwise all ranks derive the next message from the same records: the errors,
# or the texts behind the digests.
_NO_ERROR, _ERROR = b"\0", b"\1"

_SAME_SCRIPT = "Start every rank from the same script"
_MAX_VALUES = 6  # different values in a message


def check_same_across_ranks(
    call: str,
    fingerprint: Sequence[str],
    group: dist.ProcessGroup | None = None,
    error: Exception | None = None,
    instead: str = _SAME_SCRIPT,
) -> None:
    """Raise on all ranks if they are at different calls, have different fingerprints, or one of them has an error.

    Args:
        call: Current call of this rank, for the message, such as "boost()".
        fingerprint: Lines of text that must be equal on all ranks, in the same order; ignored on a rank with an error.
        group: Process group, optional; defaults to the world.
        error: Error of this rank, optional.
        instead: What the message asks for if the fingerprints differ.

    Raises:
        DesyncError: The ranks differ; the message names all ranks that do, and the first difference.
        Exception: Error of a rank: the error itself there, elsewhere as in `raise_on_all_ranks`.

    Collective: every rank of the group must call it. One all-gather of 33 bytes if all is equal.
    """
    fingerprints = all_gather_text(call, fingerprint, group, error)
    if any(other != fingerprints[0] for other in fingerprints):
        raise DesyncError(_mismatch_message([[call, *other] for other in fingerprints], group, instead))


def all_gather_text(
    call: str, lines: Sequence[str], group: dist.ProcessGroup | None = None, error: Exception | None = None
) -> list[list[str]]:
    """Return the lines of all ranks, by rank, which may differ; otherwise as `check_same_across_ranks`.

    Collective: every rank of the group must call it. Lines that differ are gathered by a few more messages.
    """
    if group_size(group) == 1 or is_fake_world():
        if error is not None:
            raise error
        return [list(lines)] * group_size(group)
    digest = hashlib.sha256(json.dumps([call, *lines]).encode()).digest()
    record = digest + (_NO_ERROR if error is None else _ERROR)
    local = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    records = all_gather_equal(local, group).view(-1, len(record))
    if bool(records[:, -1].any()):
        _raise_failure(error, group)
    if bool((records == records[0]).all()):
        return [list(lines)] * len(records)
    texts = _all_gather_json([call, *lines], group)
    if any(other[0] != call for other in texts):
        raise DesyncError(_mismatch_message(texts, group))
    return [other[1:] for other in texts]


def raise_on_all_ranks(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank of the group if any rank passes an error.

    A rank that passes an error raises that error. The others raise an error of the same class of this library, or else
    `RankFailedError`, with the failing rank and its text, which then starts with the name of the foreign class.

    Collective: every rank of the group must call it, with None if it has no error. One small all-reduce without errors,
    which takes fewer messages than the all-gather of `check_same_across_ranks`: for use in every step.
    """
    if group_size(group) == 1 or is_fake_world():
        if error is not None:
            raise error
        return
    if int(all_reduce_numbers([float(error is not None)], group)[0]) > 0:
        _raise_failure(error, group)


def _raise_failure(error: Exception | None, group: dist.ProcessGroup | None) -> None:
    reports = _all_gather_json(None if error is None else serialize_error(error), group)
    if error is not None:
        raise error
    failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
    rank, (name, text) = failed[0]
    others = f" (and on {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    here, there = global_rank_of(group_rank(group), group), global_rank_of(rank, group)
    raise error_class(name)(f"rank {there} failed{others}, so rank {here} stops too: {text}")


def serialize_error(error: Exception, max_text: int | None = None) -> tuple[str, str]:
    """Return class name and text of an error.

    The class is this library's base class, or else the error's own, which the text then starts with.
    """
    classes = {cls for cls in BoosterError.__subclasses__() if cls.__module__ == BoosterError.__module__}
    known = next((cls for cls in type(error).__mro__ if cls in classes), None)
    text = str(error)[:max_text]
    return (known.__name__, text) if known else (type(error).__name__, f"{type(error).__name__}: {text}")


def error_class(name: str) -> type[BoosterError]:
    """Return this library's class of that name, or else `RankFailedError`."""
    classes = (cls for cls in BoosterError.__subclasses__() if cls.__module__ == BoosterError.__module__)
    return next((cls for cls in classes if cls.__name__ == name), RankFailedError)


def _all_gather_json(local: object, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the JSON-compatible values of all ranks, by rank."""
    payloads, owners = all_gather_bytes(json.dumps(local).encode(), group)
    return [json.loads(payloads[owner]) for owner in owners]


def _mismatch_message(
    texts: Sequence[Sequence[str]], group: dist.ProcessGroup | None, instead: str = _SAME_SCRIPT
) -> str:
    """Return the message about lists of text that differ; each starts with the rank's current call."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, lines in enumerate(texts):
        alike.setdefault(tuple(lines), []).append(rank)
    # The largest group of ranks with equal texts, at a tie the one with the lowest rank.
    majority = max(alike.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    differing = [rank for rank in range(len(texts)) if rank not in majority]
    calls = _values(texts, 0, majority)
    verb = "differs" if len(differing) == 1 else "differ"
    mismatch = f"{_format_ranks(differing, group)} {verb} from {_format_ranks(majority, group)}"
    if len(calls) > 1:
        positions = _join(
            f"{_format_ranks(ranks, group)} {'is' if len(ranks) == 1 else 'are'} at {what}" for what, ranks in calls
        )
        return (
            f"the ranks make different calls: {positions}; {mismatch}. All must make the same calls in the same order:"
            " start every rank from the same script"
        )
    # The texts of different ranks may have different numbers of lines, which `_values` shows as "nothing".
    columns = list(zip_longest(*texts))
    index = next(index for index, column in enumerate(columns) if len(set(column)) > 1)
    different = _join(
        f"{_format_ranks(ranks, group)} {'has' if len(ranks) == 1 else 'have'} {value}"
        for value, ranks in _values(texts, index, majority)
    )
    return f"the ranks differ in {calls[0][0]}: {different}; {mismatch}. {instead}"


def _values(texts: Sequence[Sequence[str]], index: int, majority: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Return the different texts at an index with their ranks, the majority's first."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(range(len(texts)), key=lambda rank: (rank not in majority, rank)):
        lines = texts[rank]
        ranks_of.setdefault(lines[index] if index < len(lines) else "nothing", []).append(rank)
    return [(text, sorted(ranks)) for text, ranks in ranks_of.items()]


def _join(texts: Iterable[str]) -> str:
    listed = list(texts)
    more = f" and {len(listed) - _MAX_VALUES} others" if len(listed) > _MAX_VALUES else ""
    return ", ".join(listed[:_MAX_VALUES]) + more


def _format_ranks(ranks: Sequence[int], group: dist.ProcessGroup | None) -> str:
    return format_ranks([global_rank_of(rank, group) for rank in ranks])
