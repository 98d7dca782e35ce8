"""Mixed precision strategies of `Booster(mixed_precision=...)`."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from booster.errors import ConfigError
from booster.interface import MixedPrecision, Plugin

from .apex import FP16ApexMixedPrecision
from .autocast import BF16MixedPrecision, FP16TorchMixedPrecision
from .fp8 import FP8MixedPrecision
from .fp16 import FP16NaiveMixedPrecision

__all__ = [
    "BF16MixedPrecision",
    "BF16_MixedPrecision",
    "FP8MixedPrecision",
    "FP8_MixedPrecision",
    "FP16ApexMixedPrecision",
    "FP16NaiveMixedPrecision",
    "FP16TorchMixedPrecision",
    "FP16_Apex_MixedPrecision",
    "FP16_Naive_MixedPrecision",
    "FP16_Torch_MixedPrecision",
    "MixedPrecision",
    "mixed_precision_factory",
    "mixed_precision_from_name",
    "mixed_precision_names",
    "resolve_mixed_precision",
]
# ColossalAI's other names.
BF16_MixedPrecision = BF16MixedPrecision
FP8_MixedPrecision = FP8MixedPrecision
FP16_Apex_MixedPrecision = FP16ApexMixedPrecision
FP16_Naive_MixedPrecision = FP16NaiveMixedPrecision
FP16_Torch_MixedPrecision = FP16TorchMixedPrecision


_BY_NAME: dict[str, Callable[[], MixedPrecision]] = {
    "fp16": FP16TorchMixedPrecision,
    "bf16": BF16MixedPrecision,
    "fp16_naive": FP16NaiveMixedPrecision,
    "fp16_apex": FP16ApexMixedPrecision,
    "fp8": FP8MixedPrecision,
}


def mixed_precision_names() -> list[str]:
    """Return the names accepted by `mixed_precision_from_name`."""
    return list(_BY_NAME)


def mixed_precision_from_name(name: str) -> MixedPrecision:
    """Create a mixed precision strategy with default arguments.

    Args:
        name: 'fp16', 'bf16', 'fp16_naive', 'fp16_apex' or 'fp8'.

    Raises:
        ConfigError: The name is unknown.
    """
    if isinstance(name, str) and name in _BY_NAME:
        return _BY_NAME[name]()
    near = difflib.get_close_matches(str(name).lower(), _BY_NAME, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"mixed_precision={name!r} is not known.{hint} Known names: {', '.join(_BY_NAME)}; None keeps the model's dtype"
    )


def resolve_mixed_precision(given: str | MixedPrecision | None, plugin: Plugin) -> MixedPrecision | None:
    """Return the mixed precision of a Booster; None where the plugin casts the weights, or nothing does.

    Args:
        given: The argument `mixed_precision` of the Booster.
        plugin: Its plugin.

    Raises:
        ConfigError: It is not a mixed precision, or another than the plugin's.
    """
    if given is None or (plugin.control_precision() and isinstance(given, str) and given == plugin.precision):
        return None
    if plugin.control_precision():
        own = "one of its own" if plugin.precision is None else f"precision={plugin.precision!r}"
        raise ConfigError(
            f"mixed_precision={given!r} was given with a {type(plugin).__name__} that has {own}: choose the precision"
            " where the plugin is created, or give both by their names, such as Booster(plugin='gemini',"
            " mixed_precision='bf16')"
        )
    if given == "fp32":
        return None
    if isinstance(given, MixedPrecision):
        return given
    if not isinstance(given, str):
        raise ConfigError(
            f"mixed_precision={given!r} is a {type(given).__name__}: pass a name such as 'bf16', or a"
            " MixedPrecision object such as BF16MixedPrecision()"
        )
    resolved = mixed_precision_from_name(given)
    if given not in plugin.supported_precisions():
        raise ConfigError(
            f"mixed_precision={given!r} does not run with {type(plugin).__name__}: choose one of"
            f" {', '.join(plugin.supported_precisions())}"
        )
    return resolved


mixed_precision_factory = mixed_precision_from_name  # ColossalAI's name
