"""The optimizer that says itself where its states lie, as one that keeps them on a disk."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["AllocatesStates"]


@runtime_checkable
class AllocatesStates(Protocol):
    """What a checkpoint asks of such an optimizer before it reads or replaces the states."""

    def prepare_states(self) -> None:
        """Makes room for the states of all parameters, so that what can fail does before any state is replaced.

        Raises:
            ConfigError: There is no room.
        """
        ...

    def allocate_state(self, parameter: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Returns the memory for a state that is about to be filled; None: any memory in the usual format will do.

        Args:
            parameter: One of `param_groups`.
            key: The state's name.
            shape: Of the state.
            dtype: In which it is stored.
        """
        ...

    @property
    def can_fail_alone(self) -> bool:
        """True where a step may fail on this rank and on no other, as a disk does."""
        ...

    def check_states(self) -> None:
        """Returns if the states are whole and can be read now.

        Raises:
            CheckpointError: They are not.
        """
        ...
