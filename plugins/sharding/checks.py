"""What is checked, and said, alike by all strategies that give each rank parts of parameters to update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from booster.argument_checks import check_flag
from booster.errors import ConfigError

__all__ = [
    "UNEVEN_CALLS",
    "check_clipping",
    "check_flag",
    "check_memory_is_apart",
    "check_replicas",
    "error_of",
    "is_non_nan_number",
]

# What to tell where ranks wait for each other in different forwards and backwards.
UNEVEN_CALLS = (
    "every rank must call the model and backward() equally often and in the same order, whatever parts of the model"
    " each uses. Where one rank evaluates alone, as under `if rank == 0`, evaluate on every rank, or inside of"
    " `with model.gathered():`"
)


def error_of(check: Callable[[], object]) -> Exception | None:
    """Returns what a check raises, for all ranks to hear of; None: nothing."""
    try:
        check()
    except Exception as error:
        return error
    return None


def check_memory_is_apart(model: nn.Module, trained: list[nn.Parameter]) -> None:
    """Returns if no two of the parameters share memory.

    Raises:
        ConfigError: Two of them do.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: dict[int, str] = {}
    for parameter in trained:
        if parameter.numel() == 0 or parameter.is_meta:
            continue
        with torch._C.DisableTorchFunction():  # one that was built lazily has an address, and says so to nobody else
            address = parameter.data_ptr()
        other = seen.setdefault(address, names[id(parameter)])
        if other != names[id(parameter)]:
            raise ConfigError(
                f"{other!r} and {names[id(parameter)]!r} are two parameters in the same memory, which would come apart:"
                " tie them by making them one nn.Parameter, as in head.weight = embedding.weight"
            )


def is_non_nan_number(value: Any) -> bool:
    """Returns whether an argument is a number, and not nan."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def check_clipping(max_norm: Any, norm_type: Any) -> None:
    """Returns if gradients can be clipped so.

    Raises:
        ConfigError: They can't.
    """
    if not is_non_nan_number(max_norm) or max_norm < 0:
        raise ConfigError(
            f"max_norm={max_norm!r} is no norm that gradients could be clipped to: give a positive number, or 0 for no"
            " clipping"
        )
    if not is_non_nan_number(norm_type) or norm_type <= 0:
        raise ConfigError(f"norm_type={norm_type!r} is no order of a norm: give a positive number, or float('inf')")


def check_replicas(extra_dp_size: Any, world_size: int) -> None:
    """Returns if the ranks can be divided into so many groups that each hold all shards.

    Raises:
        ConfigError: They can't.
    """
    is_count = isinstance(extra_dp_size, int) and not isinstance(extra_dp_size, bool) and extra_dp_size >= 1
    if not is_count or world_size % extra_dp_size:
        raise ConfigError(
            f"extra_dp_size={extra_dp_size!r} does not divide the {world_size} ranks into equal groups that each hold"
            " all shards: give a divisor of the world size, or 1"
        )
