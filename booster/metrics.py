"""Exact metrics: what all ranks computed, each sample once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from booster.comm import all_gather_equal, group_size
from booster.data import active_loader
from booster.errors import ConfigError
from booster.tensor_tree import map_tensors

__all__ = ["gather_for_metrics"]


def gather_for_metrics(data: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Returns the tensors of all ranks joined along dimension 0; see `Booster.gather_for_metrics`. Collective.

    Args:
        data: Tensors, and any nesting of them.
        group: The ranks that read the parts of the data, each one part; None: the world.
    """
    loader = active_loader()
    samples = 0 if loader is None else loader.current_batch_samples
    repeated = 0 if loader is None else loader.num_repeated_in_batch

    gathered = 0

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal gathered
        gathered += 1
        joined = all_gather_equal(tensor, group)
        is_per_sample = tensor.dim() > 0 and tensor.shape[0] == samples
        # The loader puts the samples that fill up its last batch at the very end of the last ranks' parts.
        return joined[: samples * group_size(group) - repeated] if is_per_sample and repeated else joined

    result = map_tensors(gather, data)
    if not gathered:
        raise ConfigError(
            f"gather_for_metrics() was given a {type(data).__name__} without any tensor: other ranks' values can't be"
            " joined to it. Put numbers into a tensor, for example torch.tensor(value)"
        )
    return result
