"""State of an LR scheduler: class and state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from booster.errors import CheckpointError

__all__ = ["scheduler_document", "scheduler_state"]


def scheduler_document(lr_scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's class name and state dict."""
    return {"scheduler": type(lr_scheduler).__name__, "state": lr_scheduler.state_dict()}


def scheduler_state(document: Any, lr_scheduler: Any, path: Path) -> dict[str, Any]:
    """Return the state dict in the output of `scheduler_document`.

    Raises:
        CheckpointError: Malformed, or of another scheduler class.
        ConfigError: The scheduler rejects the state because it was built with other settings.
    """
    state = document.get("state") if isinstance(document, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no scheduler state: give a file that save_lr_scheduler wrote")
    name = type(lr_scheduler).__name__
    if document.get("scheduler") != name:
        raise CheckpointError(
            f"{path} holds the state of a {document.get('scheduler')!s:.80}, not of a {name}: build the scheduler"
            " that was saved"
        )
    check = getattr(lr_scheduler, "check_state_dict", None)
    if check is not None:  # before models and optimizers are filled
        check(state)
    return state
