"""Random numbers of a rank's own where activations are split, and the same on all ranks elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from booster.comm import are_others_imagined
from booster.device import current_device

__all__ = ["SplitStream"]

# Note [Random streams]
# Ranks that share a model's layers draw the same numbers where activations are replicated, as their default generators
# are in the same state. In a region where activations are split, as between a column-parallel and a row-parallel layer,
# equal numbers would give each rank's heads the same dropout mask. So a region is entered by seeding the default
# generators with a hash of their states and the rank. It is left by putting the states back; if the region has drawn
# something, one number is drawn after that, so that the next region does not begin in the same state.
# All of this is a function of the default generators' state alone: activation checkpointing, which puts that state
# back, draws the same masks again; and a model without dropout sees the numbers that one process would see.
# A forward that is computed again may end within a region, when all that backward needs has been computed, and another
# one may follow. So whether a region is open is not noted anywhere but in the generator: the first bits of the seed
# it was last given, which is part of its state, are those of the axis.

_NUM_HASH_BITS = 48
_NUM_MARK_BITS = 15  # together one less than a seed has, which may be signed


@dataclass(frozen=True, slots=True)
class _Region:
    seed: int
    before: tuple[torch.Tensor, ...]
    seeded: tuple[torch.Tensor, ...]


class SplitStream:
    """The random numbers that one rank draws in regions where activations are split; see Note [Random streams].

    Args:
        rank: This rank among those that the activations are split over.
        axis: Over which they are split; regions of one axis may lie within those of another.
    """

    def __init__(self, rank: int, axis: str = "sequence") -> None:
        self._rank = rank
        self._axis = axis
        self._mark = _hash(_NUM_MARK_BITS, axis.encode())
        self._region: _Region | None = None

    @property
    def is_entered(self) -> bool:
        """Whether a region of this axis is open, and no other one within it."""
        return torch.default_generator.initial_seed() >> _NUM_HASH_BITS == self._mark

    def enter(self, *, anew: bool = False) -> None:
        """Begins a region, unless one is open. No communication.

        Args:
            anew: Begins one in any case, and forgets which is open: for a caller that knows that none can be.
        """
        if are_others_imagined() or (self.is_entered and not anew):
            return  # where ranks are imagined, tensors have no values
        before = _states()
        seed = self._mark << _NUM_HASH_BITS | self._hash_of(before)
        _seed_generators(seed)
        self._region = _Region(seed, before, _states())

    def leave(self) -> None:
        """Ends the region that is open; nothing to do without one. No communication."""
        region, self._region = self._region, None
        if region is None or region.seed != torch.default_generator.initial_seed():
            return
        has_drawn = [not torch.equal(seeded, now) for seeded, now in zip(region.seeded, _states(), strict=True)]
        for device, before, needs_step in zip(_devices(), region.before, has_drawn, strict=True):
            _set_state(device, before)
            if needs_step:
                torch.rand(1, device=device)

    def reset(self) -> None:
        """Ends a region that nobody left."""
        self.leave()

    def _hash_of(self, states: tuple[torch.Tensor, ...]) -> int:
        rank = self._rank.to_bytes(8, "little")
        return _hash(_NUM_HASH_BITS, self._axis.encode(), rank, *(state.cpu().numpy().tobytes() for state in states))


def _devices() -> tuple[torch.device, ...]:
    """Returns where this process draws: its CPU, and its accelerator where it uses one."""
    own = current_device()
    is_used = own.type != "cpu" and getattr(torch.get_device_module(own.type), "is_initialized", bool)()
    return (torch.device("cpu"), own) if is_used else (torch.device("cpu"),)


def _states() -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device.type).get_rng_state(device)
        for device in _devices()
    )


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state, device)


def _seed_generators(seed: int) -> None:
    for device in _devices():
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.get_device_module(device.type).manual_seed(seed)


def _hash(num_bits: int, *parts: bytes) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> (64 - num_bits)
