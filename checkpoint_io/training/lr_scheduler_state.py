"""What is kept of an LR scheduler: its class and its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from booster.errors import CheckpointError

__all__ = ["scheduler_document", "scheduler_state"]


def scheduler_document(lr_scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's class and state."""
    return {"scheduler": type(lr_scheduler).__name__, "state": lr_scheduler.state_dict()}


def scheduler_state(document: Any, lr_scheduler: Any, path: Path) -> dict[str, Any]:
    """Return the state in what `scheduler_document` gave.

    Raises:
        CheckpointError: It is something else, or of another class of scheduler.
        ConfigError: The scheduler sees that it is of one with other settings.
    """
    state = document.get("state") if isinstance(document, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no scheduler's state: give a file that save_lr_scheduler wrote")
    name = type(lr_scheduler).__name__
    if document.get("scheduler") != name:
        raise CheckpointError(
            f"{path} holds the state of a {document.get('scheduler')!s:.80}, not of a {name}: build the scheduler"
            " that was saved"
        )
    check = getattr(lr_scheduler, "check_state_dict", None)
    if check is not None:  # now, as models and optimizers may be filled before it is loaded
        check(state)
    return state
