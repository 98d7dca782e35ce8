"""Linear layers of which each rank has a part: of the output features, or of the input features.

The layer's class is exchanged for one derived from it, so that everything that asks for its kind still works. Its
weight and bias are this rank's parts already when the functions of this file are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.chunks import runs_in_chunks
from booster.plugins.hybrid_parallel.tensor_parallel.derived_classes import become, class_before
from booster.plugins.hybrid_parallel.tensor_parallel.later_gradients import deferrable_product, later_gradient
from booster.plugins.hybrid_parallel.tensor_parallel.overlap import OverlappedInput, can_overlap, cast_between
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks
from booster.plugins.hybrid_parallel.tensor_parallel.regions import (
    gather_features,
    scatter_sum,
    shared_copy_to_ranks,
    sizes_of_all,
    split_features,
    sum_over_ranks,
)
from booster.plugins.hybrid_parallel.tensor_parallel.ring_row import scattered_product

__all__ = [
    "is_linear",
    "is_plain_linear",
    "is_transposed",
    "make_column_parallel",
    "make_row_parallel",
    "product",
    "require_linear",
]

# Note [Column and row]
# A column-parallel layer has some of the output features: it reads an input that is the same on all ranks, whose
# gradient is a sum over them. A row-parallel layer has some of the input features: its output is a sum over the ranks,
# and its bias, which all ranks hold, is added once, after that. A pair of them with element-wise operations between
# needs one sum forward and one backward (Megatron-LM, arXiv:1909.08053).


@dataclass(frozen=True, slots=True)
class ColumnSplit:
    """How a column-parallel layer goes about.

    Attributes:
        ranks: Who have the other features.
        sizes: Output features of each rank.
        gathers_output: Whether it returns the features of all ranks.
        is_input_gathered: Whether its input is made for the ranks to compute with already.
        siblings: The layers that read the same input.
    """

    ranks: TensorParallelRanks
    sizes: tuple[int, ...]
    gathers_output: bool
    is_input_gathered: bool
    siblings: tuple[nn.Module, ...]

    def enter_region(self, training: bool) -> None:
        """Begins a region, unless the layer's output or the tokens around it are the same on all ranks, or others."""
        ranks = self.ranks
        if training and not self.gathers_output and not ranks.splits_sequence and ranks.size > 1:
            ranks.streams.enter()

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what the layer's own part is multiplied with."""
        return x if self.is_input_gathered else shared_copy_to_ranks(x, self.ranks)

    def product(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Returns what a layer that only multiplies and adds makes of its input; see Note [Overlapped backward]."""
        ready = self.ranks.products.take(module, x)
        if ready is not None:
            return ready
        if self.is_input_gathered or not can_overlap(x, module.weight, self.ranks):  # type: ignore[arg-type]
            return product(module, self.before(x), _bias(module))
        overlapped = self.ranks.shared(x, OverlappedInput, self._overlapped)
        return overlapped.product(module, is_transposed=is_transposed(module))

    def _overlapped(self, x: torch.Tensor) -> OverlappedInput:
        return OverlappedInput(x, self.siblings, self.ranks)

    def after(self, y: torch.Tensor) -> torch.Tensor:
        """Returns what the layer returns."""
        return gather_features(y, self.ranks, self.sizes) if self.gathers_output else y


@dataclass(frozen=True, slots=True)
class RowSplit:
    """How a row-parallel layer goes about.

    Attributes:
        ranks: Who have the other features.
        sizes: Input features of each rank.
        splits_input: Whether its input has the features of all ranks.
        reduces: Whether it sums over the ranks.
        scatters: Whether each rank keeps its own tokens of the sum.
        sequence_dim: Along which the tokens lie.
    """

    ranks: TensorParallelRanks
    sizes: tuple[int, ...]
    splits_input: bool
    reduces: bool
    scatters: bool
    sequence_dim: int

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what the layer's own part is multiplied with."""
        return split_features(x, self.ranks, self.sizes) if self.splits_input else x

    def after(self, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns what the layer returns.

        Args:
            y: The product with this rank's part of the weight; its memory may be taken.
            bias: What is added to the sum. Without a sum it is added by the first rank alone.
        """
        if not self.reduces:
            return y if bias is None or self.ranks.rank > 0 else y + bias.to(y.dtype)
        if not self.scatters:
            y = sum_over_ranks(y, self.ranks, overwrites=True)
        elif self.ranks.size > 1:
            y = scatter_sum(y, self.ranks, *self._scattering(y))
        return y if bias is None else y.add_(bias.to(y.dtype))

    def chunked(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """Returns what the layer returns, from its input; None: that is not computed in chunks."""
        weight, bias = module.weight, _bias(module)
        if not (self.reduces and self.scatters) or cast_between(x, weight):  # type: ignore[arg-type]
            return None
        dim, sizes = self._scattering(x)
        if not runs_in_chunks(x, self.ranks, dim, sizes):
            return None
        later = later_gradient(module)
        y = scattered_product(x, weight, self.ranks, sizes, is_transposed=is_transposed(module), later=later)  # type: ignore[arg-type]
        return y if bias is None else y.add_(bias.to(y.dtype))

    def _scattering(self, x: torch.Tensor) -> tuple[int, list[int]]:
        """Returns along which dimension a tensor's tokens lie, and how many of them each rank gets."""
        dim, length = (self.sequence_dim, None) if x.dim() > 2 else (0, self.ranks.sequence_length)
        return dim, sizes_of_all(x.shape[dim], self.ranks, length)

    def leave_region(self) -> None:
        """Ends the region that the column-parallel layers before have begun."""
        if not self.ranks.splits_sequence:
            self.ranks.streams.leave()


def make_column_parallel(
    module: nn.Module,
    ranks: TensorParallelRanks,
    *,
    sizes: Sequence[int],
    gathers_output: bool = False,
    is_input_gathered: bool = False,
    siblings: Sequence[nn.Module] = (),
) -> None:
    """Lets a linear layer compute its own output features; see Note [Column and row].

    Args:
        module: An `nn.Linear` or one derived from it, or transformers' `Conv1D`, whose parameters are this rank's.
        ranks: Who have the other features.
        sizes: Output features of each rank.
        gathers_output: Return the features of all ranks, as a tensor that is the same on all.
        is_input_gathered: The input comes from `gather_sequence` or `copy_to_ranks` already.
        siblings: All layers that read the same input, this one included.

    Raises:
        ConfigError: The module is no linear layer.

    The layer's forward and backward are collective.
    """
    require_linear(module, "colwise")
    split = ColumnSplit(ranks, tuple(sizes), gathers_output, is_input_gathered, tuple(siblings))
    _set_features(module, outputs=sizes[ranks.rank])
    become(module, ColumnParallel, split)


def make_row_parallel(
    module: nn.Module,
    ranks: TensorParallelRanks,
    *,
    sizes: Sequence[int],
    splits_input: bool = False,
    reduces: bool = True,
    scatters_sequence: bool | None = None,
    sequence_dim: int = 1,
) -> None:
    """Lets a linear layer read its own input features; see Note [Column and row].

    Args:
        module: An `nn.Linear` or one derived from it, or transformers' `Conv1D`, whose weight is this rank's; the bias
            is whole.
        ranks: Who have the other features.
        sizes: Input features of each rank.
        splits_input: The input has all features, as where it is the same on all ranks.
        reduces: Sum over the ranks. Otherwise each rank returns what it adds to the sum.
        scatters_sequence: Return this rank's tokens of the sum; None: where `ranks` splits the sequence.
        sequence_dim: Along which the tokens lie; inputs of two dimensions have tokens along the first.

    Raises:
        ConfigError: The module is no linear layer.

    The layer's forward and backward are collective.
    """
    require_linear(module, "rowwise")
    scatters = ranks.splits_sequence if scatters_sequence is None else scatters_sequence
    split = RowSplit(ranks, tuple(sizes), splits_input, reduces, scatters, sequence_dim)
    _set_features(module, inputs=sizes[ranks.rank])
    become(module, RowParallel, split)


class ColumnParallel(nn.Module):
    """What is put before a linear layer's class to make it column-parallel."""

    _split: ColumnSplit

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns this rank's output features, or all of them."""
        split = self._split
        split.enter_region(self.training)
        y = split.product(self, x) if is_plain_linear(self) else super().forward(split.before(x), *args, **kwargs)
        return split.after(y)


class RowParallel(nn.Module):
    """What is put before a linear layer's class to make it row-parallel."""

    _split: RowSplit

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the sum over the ranks, or what this rank adds to it."""
        split = self._split
        x = split.before(x)
        is_plain = is_plain_linear(self)
        if is_plain and (chunked := split.chunked(self, x)) is not None:
            return chunked  # no region to leave, as its streams are the stack's
        y = product(self, x, None) if is_plain else self._without_bias(x, *args, **kwargs)
        split.leave_region()
        return split.after(y, _bias(self))

    def _without_bias(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        bias, self._parameters["bias"] = self._parameters.get("bias"), None
        try:
            y: torch.Tensor = super().forward(x, *args, **kwargs)
        finally:
            self._parameters["bias"] = bias
        return y


def product(
    module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, *, num_outputs: int | None = None
) -> torch.Tensor:
    """Returns the product of an input with the weight of an `nn.Linear` or a `Conv1D`.

    Args:
        module: Whose weight it is.
        x: Of any number of dimensions, features last.
        bias: What is added to the product.
        num_outputs: Only the first so many output features; None: all.
    """
    transposed = is_transposed(module)
    deferrable = deferrable_product(module, x, bias, is_transposed=transposed, num_outputs=num_outputs)
    if deferrable is not None:
        return deferrable
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    weight = weight.t() if transposed else weight
    return nn.functional.linear(x, weight if num_outputs is None else weight[:num_outputs], bias)


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer that can be split: its weight is no result of other parameters."""
    return "weight" in module._parameters and (isinstance(module, nn.Linear) or is_transposed(module))


def is_transposed(module: nn.Module) -> bool:
    """Returns whether a module is transformers' `Conv1D`, whose weight is (inputs, outputs)."""
    return any(
        base.__name__ == "Conv1D" and base.__module__ == "transformers.pytorch_utils" for base in type(module).__mro__
    )


def is_plain_linear(module: nn.Module) -> bool:
    """Returns whether a layer multiplies by its weight and adds its bias, and does nothing else."""
    base = class_before(module)
    return base is nn.Linear or (is_transposed(module) and base.__name__ == "Conv1D")


def _bias(module: nn.Module) -> torch.Tensor | None:
    return module.bias  # type: ignore[return-value]


def require_linear(module: nn.Module, style: str) -> None:
    """Raises if a module is no linear layer.

    Raises:
        ConfigError: It names the style that the plan gives to the module.
    """
    if not is_linear(module):
        raise ConfigError(
            f"the plan gives the style {style!r} to a {type(module).__name__}, which is no linear layer: leave it out"
            " of the plan, or give the style to the nn.Linear or Conv1D inside of it"
        )


def _set_features(module: nn.Module, *, inputs: int | None = None, outputs: int | None = None) -> None:
    """Tells a layer its own sizes, by the names that its kind has for them."""
    input_name, output_name = ("nx", "nf") if is_transposed(module) else ("in_features", "out_features")
    for name, size in ((input_name, inputs), (output_name, outputs)):
        if size is not None:
            setattr(module, name, size)
