"""Which modules are linear layers or embeddings, and which dimension of their weights a style splits."""

from __future__ import annotations

from torch import nn

__all__ = ["COLUMN_STYLES", "ROW_STYLES", "feature_sizes", "is_linear", "is_transposed", "split_dim"]

COLUMN_STYLES = frozenset({"colwise", "colwise_gather_output", "packed_colwise"})
ROW_STYLES = frozenset({"rowwise", "rowwise_split_input", "packed_rowwise"})


def is_transposed(module: nn.Module) -> bool:
    """Returns whether a module is transformers' Conv1D: a linear layer with a weight of (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and not isinstance(module, nn.Conv1d)


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def feature_sizes(module: nn.Module) -> tuple[int, int]:
    """Returns a linear layer's number of input and of output features."""
    weight = module.get_parameter("weight")
    first, second = weight.shape
    return (first, second) if is_transposed(module) else (second, first)


def split_dim(module: nn.Module, style: str) -> int:
    """Returns the dimension of a linear layer's or an embedding's weight that a style splits."""
    if style.startswith("embedding_colwise"):
        return 1
    is_by_rows = style in ROW_STYLES
    return int(is_by_rows != is_transposed(module))
