"""Mixed precision strategies of `Booster(mixed_precision=...)`."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from booster.errors import ConfigError
from booster.interface.mixed_precision import MixedPrecision

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


mixed_precision_factory = mixed_precision_from_name  # ColossalAI's name
