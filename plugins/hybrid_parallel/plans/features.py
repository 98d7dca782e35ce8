"""Feature sizes of linear layers, and the dimension of their weights that a style shards."""

from __future__ import annotations

from torch import nn

from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_transposed

__all__ = ["COLUMN_STYLES", "ROW_STYLES", "feature_sizes", "split_dim"]

COLUMN_STYLES = frozenset({"colwise", "colwise_gather_output", "packed_colwise"})
ROW_STYLES = frozenset({"rowwise", "rowwise_split_input", "packed_rowwise"})


def feature_sizes(module: nn.Module) -> tuple[int, int]:
    """Return a linear layer's number of input and of output features."""
    weight = module.get_parameter("weight")
    first, second = weight.shape
    return (first, second) if is_transposed(module) else (second, first)


def split_dim(module: nn.Module, style: str) -> int:
    """Return the dimension of a linear layer's or an embedding's weight that a style shards."""
    if style.startswith("embedding_colwise"):
        return 1
    is_by_rows = style in ROW_STYLES
    return int(is_by_rows != is_transposed(module))
