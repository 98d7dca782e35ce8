"""RNG states of tensor-parallel regions: distinct per rank where activations are sharded, equal elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from booster.comm import is_fake_world
from booster.device import current_device

_NUM_HASH_BITS = 48
_NUM_TAG_BITS = 15  # 63 bits in total, as seeds may be signed


@dataclass(frozen=True, slots=True)
class _Region:
    seed: int
    outer_states: tuple[torch.Tensor, ...]
    seeded_states: tuple[torch.Tensor, ...]


class TensorParallelRNG:
    """RNG states of one rank in regions with sharded activations.

    The default generators of tensor-parallel ranks are in the same state, which keeps replicated activations equal. In
    a region with sharded activations, such as between a column-parallel and a row-parallel layer, equal random numbers
    would give all ranks' heads the same dropout mask. Entering a region seeds the default generators with a hash of
    their states and the rank. Leaving it restores the states; if the region has drawn numbers, one number is drawn
    after that, so that the next region does not start in the same state.

    The streams are a function of the default generators' states alone. Activation checkpointing, which restores these,
    repeats the same masks, and a model without dropout draws the numbers of a single process. A recomputed forward may
    stop inside of a region, as soon as backward has all it needs, and another forward may follow. Therefore the open
    region is only recorded in the generator's state: the top bits of its seed identify the axis.

    Args:
        rank: This rank in the group over which the activations are sharded.
        axis: Name of that group; regions of one axis may be nested in those of another.
    """

    def __init__(self, rank: int, axis: str = "sequence") -> None:
        self._rank = rank
        self._axis = axis
        self._tag = _hash(_NUM_TAG_BITS, axis.encode())
        self._region: _Region | None = None

    @property
    def is_entered(self) -> bool:
        """Whether the innermost open region is one of this axis."""
        return torch.default_generator.initial_seed() >> _NUM_HASH_BITS == self._tag

    def enter(self, *, force: bool = False) -> None:
        """Enter a region, unless one is open. Collective: no.

        Args:
            force: If True, always enter a new region and drop an open one, for callers that start a new forward.
        """
        if is_fake_world() or (self.is_entered and not force):
            return  # in a fake process group tensors have no values
        outer_states = _states()
        state_bytes = (state.cpu().numpy().tobytes() for state in outer_states)
        state_hash = _hash(_NUM_HASH_BITS, self._axis.encode(), self._rank.to_bytes(8, "little"), *state_bytes)
        seed = self._tag << _NUM_HASH_BITS | state_hash
        for device in _devices():
            if device.type == "cpu":
                torch.default_generator.manual_seed(seed)
            else:
                torch.get_device_module(device.type).manual_seed(seed)
        self._region = _Region(seed, outer_states, _states())

    def leave(self) -> None:
        """Leave the open region, if any. Collective: no."""
        region, self._region = self._region, None
        if region is None or region.seed != torch.default_generator.initial_seed():
            return
        has_drawn = [
            not torch.equal(seeded, current) for seeded, current in zip(region.seeded_states, _states(), strict=True)
        ]
        for device, outer_state, needs_step in zip(_devices(), region.outer_states, has_drawn, strict=True):
            if device.type == "cpu":
                torch.set_rng_state(outer_state)
            else:
                torch.get_device_module(device.type).set_rng_state(outer_state, device)
            if needs_step:
                torch.rand(1, device=device)


def _devices() -> tuple[torch.device, ...]:
    """Return the devices whose generators are seeded: the CPU, and the accelerator if it is initialized."""
    accelerator = current_device()
    is_used = accelerator.type != "cpu" and getattr(torch.get_device_module(accelerator.type), "is_initialized", bool)()
    return (torch.device("cpu"), accelerator) if is_used else (torch.device("cpu"),)


def _states() -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device.type).get_rng_state(device)
        for device in _devices()
    )


def _hash(num_bits: int, *parts: bytes) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> (64 - num_bits)
