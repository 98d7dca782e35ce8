"""Exact metrics: what all ranks computed, each sample once."""

from __future__ import annotations

from typing import Any

import torch

from booster.comm import all_gather_equal, group_size
from booster.data import active_loader
from booster.tensor_tree import map_tensors

__all__ = ["gather_for_metrics"]


def gather_for_metrics(data: Any) -> Any:
    """Returns the tensors of all ranks joined along dimension 0; see `Booster.gather_for_metrics`. Collective."""
    loader = active_loader()
    samples = 0 if loader is None else loader.current_batch_samples
    repeated = 0 if loader is None else loader.num_repeated_in_batch

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        joined = all_gather_equal(tensor)
        is_per_sample = tensor.dim() > 0 and tensor.shape[0] == samples
        # The loader puts the samples that fill up its last batch at the very end of the last ranks' parts.
        return joined[: samples * group_size() - repeated] if is_per_sample and repeated else joined

    return map_tensors(gather, data)
