"""Check of the loss of backward()."""

from __future__ import annotations

from typing import Any

import torch

from booster.errors import ConfigError

__all__ = ["check_scalar_loss"]


def check_scalar_loss(loss: Any) -> None:
    """Raise `ConfigError` unless the loss is a tensor with one element that requires a gradient."""
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"the loss is a {type(loss).__name__}, not a tensor: pass the tensor that the criterion returned"
        )
    if loss.numel() != 1:
        raise ConfigError(
            f"the loss has shape {tuple(loss.shape)}, and backward() needs one number: reduce it, for example with"
            " loss.mean()"
        )
    if not loss.requires_grad:
        raise ConfigError(
            "the loss does not depend on any parameter that requires a gradient: compute it outside of torch.no_grad()"
            " and without detach(), and check requires_grad of the parameters"
        )
