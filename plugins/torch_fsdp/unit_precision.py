"""FSDP's own mixed precision, as the rest of the package sees it."""

from __future__ import annotations

import torch

from booster.interface import MixedPrecision
from booster.plugins.torch_fsdp.formats import UnitFormats

__all__ = ["UnitPrecision"]


class UnitPrecision(MixedPrecision):
    """Shards keep their format, and are gathered in another one, to which FSDP2 casts what goes into the units.

    Args:
        formats: Which ones.
    """

    def __init__(self, formats: UnitFormats) -> None:
        self._formats = formats

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self._formats.param_dtype

    def describe(self) -> str:
        return f"weights gathered as {str(self._formats.param_dtype).removeprefix('torch.')}"
