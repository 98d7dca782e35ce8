"""What the Adam optimizers refuse, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from booster.errors import ConfigError
from booster.optim.update import MOMENTS, refuse_variants

__all__ = ["check_hyperparameters", "check_stored_state", "require_bool"]

_AMOUNTS = ("lr", "eps", "weight_decay")


def require_bool(name: str, value: object) -> None:
    """Returns if an argument is True or False.

    Raises:
        ConfigError: It is not: in torch's order of arguments another one stands in its place.
    """
    if not isinstance(value, bool):
        raise ConfigError(
            f"{name}={value!r} is neither True nor False: give arguments after lr by keyword, as their order is not"
            " that of torch.optim.AdamW"
        )


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Returns if a param group, defaults included, can be computed with.

    Raises:
        ConfigError: A value can't work, or it asks for a variant that there is not.
    """
    refuse_variants(group)
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(f"lr is a tensor of shape {tuple(lr.shape)}: give one with one element, or a number")
    for name in _AMOUNTS:
        value = group[name]
        if not _is_number(value) or not (float(value) >= 0 and math.isfinite(float(value))):
            raise ConfigError(f"{name}={value!r} is no amount to compute with: give a finite number from 0 on")
    _check_betas(group["betas"])


def _check_betas(betas: object) -> None:
    is_pair = isinstance(betas, Sequence) and not isinstance(betas, str) and len(betas) == 2
    if not is_pair or not all(_is_number(beta) and 0.0 <= float(beta) < 1.0 for beta in betas):  # type: ignore[attr-defined]
        raise ConfigError(
            f"betas={betas!r} are no decay rates, which keep a part of what was: give two numbers from 0 on and less"
            " than 1, such as (0.9, 0.999)"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (int, float)) and not isinstance(value, bool))


def check_stored_state(stored: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Returns if a `state_dict` is of an Adam over parameters of these shapes; torch checks the numbers of both.

    Args:
        stored: What `state_dict` of some optimizer returned.
        groups: The param groups that it is for.

    Raises:
        ConfigError: It is another optimizer's, or another model's.
    """
    for saved, group in zip(stored["param_groups"], groups, strict=False):
        missing = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in saved]
        if missing:
            raise ConfigError(
                f"the state_dict has no {missing[0]!r} in a param group, so it is of an optimizer other than Adam: load"
                " the state of torch.optim.Adam, AdamW or one of this package"
            )
        for number, parameter in zip(saved["params"], group["params"], strict=False):
            _check_moments(stored["state"].get(number, {}), parameter)


def _check_moments(state: Mapping[str, Any], parameter: Tensor) -> None:
    for key in MOMENTS if state else ():
        moment = state.get(key)
        if not isinstance(moment, Tensor):
            raise ConfigError(
                f"the state_dict has {', '.join(map(repr, state))} for a parameter of shape {tuple(parameter.shape)},"
                f" and no {key!r}: load the state of torch.optim.Adam, AdamW or one of this package"
            )
        if moment.shape != parameter.shape:
            raise ConfigError(
                f"the state_dict has {key!r} of shape {tuple(moment.shape)} for a parameter of shape"
                f" {tuple(parameter.shape)}: load it into an optimizer over the model that it was saved from, with its"
                " parameters in the same order"
            )
