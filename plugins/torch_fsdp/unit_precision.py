"""FSDP2's mixed precision behind the `MixedPrecision` interface."""

from __future__ import annotations

import torch

from booster.interface import MixedPrecision
from booster.plugins.torch_fsdp.formats import PrecisionDtypes

__all__ = ["FSDPPrecision"]


class FSDPPrecision(MixedPrecision):
    """Shards keep their dtype; weights are gathered, and inputs cast, in the dtype of FSDP2's policy.

    Args:
        formats: Dtypes of the policy.
    """

    def __init__(self, policy: PrecisionDtypes) -> None:
        self._policy = policy

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self._policy.param_dtype

    def describe(self) -> str:
        return f"weights gathered as {str(self._policy.param_dtype).removeprefix('torch.')}"
