"""Interface of optimizers that allocate their own states, such as those with states on NVMe."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["StateAllocator"]


@runtime_checkable
class StateAllocator(Protocol):
    """Optimizer that allocates its own states; called by a checkpoint before it reads or replaces them."""

    def prepare_states(self) -> None:
        """Allocate the states of all parameters, so that failures happen before any state is replaced.

        Raises:
            ConfigError: There is not enough space.
        """
        ...

    def allocate_state(self, parameter: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return the memory of a state that is about to be filled, or None for ordinary memory.

        Args:
            parameter: Parameter of `param_groups`.
            key: Name of the state.
            shape: Shape of the state.
            dtype: Dtype of the stored state.
        """
        ...

    @property
    def may_fail_locally(self) -> bool:
        """Whether a step may fail on one rank alone, as a disk access does."""
        ...

    def check_states(self) -> None:
        """Raise `CheckpointError` unless the states are complete and readable."""
        ...
