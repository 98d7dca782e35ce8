"""What backward() asks of a loss."""

from __future__ import annotations

from typing import Any

import torch

from booster.errors import ConfigError

__all__ = ["require_scalar_loss"]


def require_scalar_loss(loss: Any) -> None:
    """Returns if a loss can be differentiated.

    Raises:
        ConfigError: It is no tensor of one number, or depends on nothing that needs a gradient.
    """
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
            "the loss does not depend on any parameter that needs a gradient: compute it outside of torch.no_grad()"
            " and without detach(), and check requires_grad of the parameters"
        )
