"""RNG states of tensor-parallel regions: distinct per rank where activations are sharded, equal elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from booster.comm import is_fake_world
from booster.device import current_device

_NUM_HASH_BITS = 48
_NUM_TAG_BITS = 15  # 63 bits in total, as seeds may be signed


@dataclass(slots=True)
class _Region:
    seed: int
    outer_states: tuple[torch.Tensor, ...]
    seeded_states: tuple[torch.Tensor, ...]
    has_drawn: list[bool]

    def note_draws(self) -> None:
        pairs = zip(self.seeded_states, generator_states(), strict=True)
        self.has_drawn = [known or not torch.equal(*pair) for known, pair in zip(self.has_drawn, pairs, strict=True)]


class TensorParallelRNG:
    """RNG states of one rank in regions with sharded activations.

    The default generators of tensor-parallel ranks are in the same state, which keeps replicated activations equal. In
    a region with sharded activations, such as between a column-parallel and a row-parallel layer, equal random numbers
    would give all ranks' heads the same dropout mask. Entering a region seeds the default generators with a hash of
    their states and the rank. Leaving it restores the states; if the region has drawn numbers, one number is drawn
    after that, so that the next region does not start in the same state.

    In a region, ranks may share the stream for a while, such as for numbers that hold for all tokens of an example.
    What follows is again a stream of the rank, but another one, as ranks may have drawn other amounts before.

    The streams are a function of the default generators' states alone. Activation checkpointing, which restores these,
    repeats the same masks, and a model without dropout draws the numbers of a single process. A recomputed forward may
    stop inside of a region, as soon as backward has all it needs, and another forward may follow. Therefore the open
    region is only recorded in the generator's state: the top bits of its seed identify the axis and whether ranks share
    the stream; the others are a number that all ranks know, combined with the rank unless they share it.

    Args:
        rank: This rank in the group over which the activations are sharded.
        axis: Name of that group; regions of one axis may be nested in those of another.
    """

    def __init__(self, rank: int, axis: str = "sequence") -> None:
        self._axis = axis
        self._rank_bits = _hash(_NUM_HASH_BITS, axis.encode(), rank.to_bytes(8, "little"))
        self._tag = _hash(_NUM_TAG_BITS, axis.encode())
        self._shared_tag = _hash(_NUM_TAG_BITS, axis.encode(), b"shared")
        self._region: _Region | None = None

    @property
    def is_entered(self) -> bool:
        """Whether the innermost open region is one of this axis, with a stream of the rank."""
        return torch.default_generator.initial_seed() >> _NUM_HASH_BITS == self._tag

    @property
    def is_shared(self) -> bool:
        """Whether the innermost open region is one of this axis, whose stream the ranks share; see `share`."""
        return torch.default_generator.initial_seed() >> _NUM_HASH_BITS == self._shared_tag

    def enter(self, *, force: bool = False) -> None:
        """Enter a region, unless one is open, or end `share`. Collective: no.

        Args:
            force: If True, always enter a new region and drop an open one, for callers that start a new forward.
        """
        if is_fake_world() or (self.is_entered and not force):
            return  # in a fake process group tensors have no values
        if self.is_shared and not force:
            self._reseed(self._tag << _NUM_HASH_BITS | self._next_number(_number_of_seed()) ^ self._rank_bits)
            return
        outer_states = generator_states()
        number = _hash(_NUM_HASH_BITS, self._axis.encode(), *(state.cpu().numpy().tobytes() for state in outer_states))
        seed = self._tag << _NUM_HASH_BITS | number ^ self._rank_bits
        _seed(seed)
        self._region = _Region(seed, outer_states, generator_states(), [False] * len(outer_states))

    def share(self) -> None:
        """Draw numbers in the open region, if any, from a stream that is the same on all ranks, until `enter`.

        Collective: no.
        """
        if self.is_entered:
            self._reseed(self._shared_tag << _NUM_HASH_BITS | self._next_number(_number_of_seed() ^ self._rank_bits))

    @contextmanager
    def shared(self, *key: int) -> Iterator[None]:
        """Draw, in the open region, the same numbers as the other ranks with the same key; nothing without a region.

        Args:
            key: What tells the draws of a region, and the ranks that share one, apart.

        Collective: no.
        """
        if not self.is_entered:
            yield
            return
        own_states = generator_states()
        parts = (number.to_bytes(8, "little") for number in (_number_of_seed() ^ self._rank_bits, *key))
        _seed(self._tag << _NUM_HASH_BITS | _hash(_NUM_HASH_BITS, b"shared", *parts))
        try:
            yield
        finally:
            for device, state in zip(_devices(), own_states, strict=True):
                _restore(device, state)
                torch.rand(1, device=device)  # the region has drawn, see `leave`

    def leave(self) -> None:
        """Leave the open region, if any. Collective: no."""
        region, self._region = self._region, None
        if region is None or region.seed != torch.default_generator.initial_seed():
            return
        region.note_draws()
        for device, outer_state, needs_step in zip(_devices(), region.outer_states, region.has_drawn, strict=True):
            _restore(device, outer_state)
            if needs_step:
                torch.rand(1, device=device)

    def _reseed(self, seed: int) -> None:
        region = self._region  # in a recomputation, which restores the state itself, another one or none
        if region is not None and region.seed != torch.default_generator.initial_seed():
            region = None
        if region is not None:
            region.note_draws()
        _seed(seed)
        if region is not None:
            region.seed, region.seeded_states = seed, generator_states()

    def _next_number(self, number: int) -> int:
        return _hash(_NUM_HASH_BITS, self._axis.encode(), number.to_bytes(8, "little"))


def _number_of_seed() -> int:
    return torch.default_generator.initial_seed() & ((1 << _NUM_HASH_BITS) - 1)


def _seed(seed: int) -> None:
    for device in _devices():
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.get_device_module(device.type).manual_seed(seed)


def _devices() -> tuple[torch.device, ...]:
    """Return the devices whose generators are seeded: the CPU, and the accelerator if it is initialized."""
    accelerator = current_device()
    is_used = accelerator.type != "cpu" and getattr(torch.get_device_module(accelerator.type), "is_initialized", bool)()
    return (torch.device("cpu"), accelerator) if is_used else (torch.device("cpu"),)


def generator_states() -> tuple[torch.Tensor, ...]:
    """Return the states of the default generators, of the CPU and of an accelerator that is in use."""
    return tuple(
        torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device.type).get_rng_state(device)
        for device in _devices()
    )


def _restore(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state, device)


def _hash(num_bits: int, *parts: bytes) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> (64 - num_bits)
