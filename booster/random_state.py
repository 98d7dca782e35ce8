"""One seed for every source of random numbers of this process."""

from __future__ import annotations

import random

import numpy as np
import torch

from booster.errors import ConfigError

__all__ = ["check_seed", "set_seed"]

_NUM_SEEDS = 2**32  # numpy's limit, the narrowest of the three


def check_seed(seed: int) -> int:
    """Returns the seed if every source of random numbers takes it.

    Raises:
        ConfigError: It is no whole number in 0 .. 2**32 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _NUM_SEEDS:
        raise ConfigError(
            f"seed={seed!r} does not fit numpy's generator: choose a whole number in 0 .. {_NUM_SEEDS - 1}"
        )
    return seed


def set_seed(seed: int) -> None:
    """Seeds Python's `random`, numpy, and torch on the CPU and on every device, all with the same number.

    The same on all ranks, so that a model built after it has the same weights everywhere.

    Args:
        seed: 0 .. 2**32 - 1.

    Raises:
        ConfigError: The seed is no whole number of that range; nothing is seeded then.
    """
    check_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # reaches the generators of all devices too
