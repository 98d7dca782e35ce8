"""Brings states through torch's `load_state_dict` without their being rounded to the parameters' format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Untouched", "hold_untouched"]

# Note [Loaded states]
# torch converts every floating-point state to its parameter's dtype, so that fp32 moments of bf16 parameters would be
# rounded. What it does not know it leaves alone: tensors pass through in a wrapping, and come out in __setstate__.


@dataclass(frozen=True, slots=True, eq=False)
class Untouched:
    """A tensor that torch does not see."""

    tensor: Tensor


def hold_untouched(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a state_dict whose states are wrapped; a pre-hook of `load_state_dict`."""
    wrapped = {
        number: {key: Untouched(value) if isinstance(value, Tensor) else value for key, value in values.items()}
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": wrapped}
