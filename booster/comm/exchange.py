"""All-gather of byte strings of any length; equal ones are sent once."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from booster.comm.collectives import all_gather_equal, broadcast, collective_device, group_size

__all__ = ["all_gather_bytes"]

_MAX_BROADCASTS = 8  # beyond it, one padded all-gather costs less than that many messages


def all_gather_bytes(payload: bytes, group: dist.ProcessGroup | None = None) -> tuple[list[bytes], list[int]]:
    """Return the different payloads of all ranks, and for every rank the index of its payload.

    Equal payloads are sent once: a replicated model's description travels once for any number of ranks.

    Args:
        payload: This rank's bytes, of any length.
        group: Process group, optional; defaults to the world.

    Collective: every rank of the group must call it.
    """
    size = group_size(group)
    if size == 1:
        return [payload], [0]
    digest = hashlib.sha256(payload).digest() + len(payload).to_bytes(8, "little")
    digests = _rows(all_gather_equal(_tensor(digest), group), len(digest))
    senders: dict[bytes, int] = {}
    for rank, other in enumerate(digests):
        senders.setdefault(other, rank)
    lengths = [int.from_bytes(other[-8:], "little") for other in senders]
    sender_of_ours = senders[digest]
    if len(senders) <= _MAX_BROADCASTS:
        payloads = [
            _broadcast_bytes(payload if sender == sender_of_ours else bytes(length), sender, group)
            for sender, length in zip(senders.values(), lengths, strict=True)
        ]
    else:
        padded = _tensor(payload + bytes(max(lengths) - len(payload)))
        rows = all_gather_equal(padded, group).view(size, -1)
        payloads = [
            bytes(rows[sender, :length].numpy()) for sender, length in zip(senders.values(), lengths, strict=True)
        ]
    order = {other: index for index, other in enumerate(senders)}
    return payloads, [order[other] for other in digests]


def _tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def _rows(joined: torch.Tensor, length: int) -> list[bytes]:
    return [bytes(row.numpy()) for row in joined.view(-1, length)]


def _broadcast_bytes(raw: bytes, sender: int, group: dist.ProcessGroup | None) -> bytes:
    buffer = _tensor(raw).to(collective_device(group))
    broadcast([buffer], group, source=sender)
    return bytes(buffer.cpu().numpy())
