"""Rounds fp32 to bf16 up or down by chance, so that it is right on average, with numbers that can be told again.

A weight in bf16 has 8 bits: steps below a 256th of it would all be lost by rounding to the nearest. Rounded up with the
probability of what is cut off, the weight moves as far as it should in the mean.

The numbers are a hash of a seed, the tensor's number and the element's index, so they depend neither on the number of
threads nor on the order of evaluation; csrc/adam_vector.cpp has the same one, Note [Random numbers].
"""

from __future__ import annotations

import torch

__all__ = ["round_stochastically"]

_MASK_32 = 2**32 - 1
_MASK_64 = 2**64 - 1
_CUT_BITS = 16  # of fp32, which bf16 has not
_QUIET_NAN = 0x400000


def round_stochastically(values: torch.Tensor, seed: int, tensor_number: int = 0, begin: int = 0) -> torch.Tensor:
    """Returns bf16 numbers: one of the two neighbours of each value, with probabilities that keep the mean.

    Numbers that bf16 has stay as they are, inf and nan among them. Values above the largest finite number become inf
    with a probability too.

    Args:
        values: fp32, contiguous, one dimension; its range of indices crosses no multiple of 2**32.
        seed: Any integer.
        tensor_number: Which of several tensors with one seed this is.
        begin: Index of the first value within its tensor.
    """
    bits = values.view(torch.int32).to(torch.int64) & _MASK_32
    random = _random_numbers(values.numel(), seed, tensor_number, begin)
    rounded = torch.where(values.isnan(), bits | _QUIET_NAN, bits + (random >> _CUT_BITS))
    return (rounded >> _CUT_BITS).to(torch.int16).view(torch.bfloat16)


def _random_numbers(count: int, seed: int, tensor_number: int, begin: int) -> torch.Tensor:
    """Returns 32 random bits for each index, as int64."""
    key = _mixed(_mixed(seed + tensor_number * 0xD1342543DE82EF95) + (begin >> 32))
    first = begin & _MASK_32
    x = torch.arange(first, first + count, dtype=torch.int64) ^ (key & _MASK_32)
    x = _product(x ^ (x >> 16), 0x7FEB352D)
    x = x ^ (key >> 32)
    x = _product(x ^ (x >> 15), 0x846CA68B)
    return x ^ (x >> 16)


def _product(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Returns the lower 32 bits; that the upper ones overflow does not change them."""
    return (x * factor) & _MASK_32


def _mixed(x: int) -> int:
    """The hash "splitmix64"."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)
