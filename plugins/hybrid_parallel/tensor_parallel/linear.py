"""Column- and row-parallel linear layers (Shoeybi et al., "Megatron-LM", arXiv:1909.08053).

The layer's class is replaced by a subclass, so that `isinstance` keeps working. Its weight and bias are already sharded
when the functions of this file are called.

A column-parallel layer holds some of the output features. Its input is replicated, and the gradient of the input is
all-reduced. A row-parallel layer holds some of the input features. Its output is all-reduced, and its replicated bias
is added once, after that. A column-row pair with element-wise operations between them needs one all-reduce in forward
and one in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigError

from .async_grad_reduce import AsyncGradInput, can_overlap, needs_cast
from .collective_matmul import is_chunked, matmul_reduce_scatter
from .deferred_wgrad import deferrable_matmul, deferred_wgrad
from .dynamic_class import mixin_forward, original_class
from .group import TensorParallelGroup
from .mappings import (
    gather_from_tp_region,
    reduce_from_tp_region,
    reduce_scatter_shards,
    scatter_to_tp_region,
    shared_copy_to_tp_region,
    sizes_from_full,
)


@dataclass(frozen=True, slots=True)
class ColumnParallelConfig:
    """Settings of a column-parallel layer.

    Attributes:
        tp_group: The tensor-parallel group.
        sizes: Number of output features of each rank.
        gathers_output: If True, the layer returns the features of all ranks.
        is_input_gathered: If True, the input comes from `all_gather_sequence` or `copy_to_tp_region` already.
        siblings: All layers that read the same input.
    """

    tp_group: TensorParallelGroup
    sizes: tuple[int, ...]
    gathers_output: bool
    is_input_gathered: bool
    siblings: tuple[nn.Module, ...]

    def enter_region(self, training: bool) -> None:
        """Enter the region's RNG stream, unless the output is replicated or the stack's stream is used."""
        tp_group = self.tp_group
        if training and not self.gathers_output and not tp_group.shards_sequence and tp_group.size > 1:
            tp_group.rng.enter()

    def prepare_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of this rank's shard."""
        return x if self.is_input_gathered else shared_copy_to_tp_region(x, self.tp_group)

    def matmul(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the output of a plain linear layer's shard; see Note [Async gradient all-reduce]."""
        precomputed = self.tp_group.precomputed.pop(module, x)
        if precomputed is not None:
            return precomputed
        if self.is_input_gathered or not can_overlap(x, module.weight, self.tp_group):  # type: ignore[arg-type]
            return matmul(module, self.prepare_input(x), _bias(module))
        overlapped = self.tp_group.shared_input(x, AsyncGradInput, self._overlapped)
        return overlapped.matmul(module, is_transposed=is_transposed(module))

    def _overlapped(self, x: torch.Tensor) -> AsyncGradInput:
        return AsyncGradInput(x, self.siblings, self.tp_group)

    def finish_output(self, y: torch.Tensor) -> torch.Tensor:
        """Return the layer's output from the shard's output."""
        return gather_from_tp_region(y, self.tp_group, self.sizes) if self.gathers_output else y


@dataclass(frozen=True, slots=True)
class RowParallelConfig:
    """Settings of a row-parallel layer.

    Attributes:
        tp_group: The tensor-parallel group.
        sizes: Number of input features of each rank.
        splits_input: If True, the input has the features of all ranks.
        reduces: If True, the output is reduced over the ranks.
        scatters: If True, the reduction is a reduce-scatter over the tokens.
        sequence_dim: Dimension of the tokens.
    """

    tp_group: TensorParallelGroup
    sizes: tuple[int, ...]
    splits_input: bool
    reduces: bool
    scatters: bool
    sequence_dim: int

    def prepare_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of this rank's shard."""
        return scatter_to_tp_region(x, self.tp_group, self.sizes) if self.splits_input else x

    def finish_output(self, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's output from the shard's output.

        Args:
            y: Output of this rank's shard without bias; may be overwritten.
            bias: Bias of the output. Without reduction only the first rank adds it.
        """
        if not self.reduces:
            return y if bias is None or self.tp_group.rank > 0 else y + bias.to(y.dtype)
        if not self.scatters:
            y = reduce_from_tp_region(y, self.tp_group, overwrites=True)
        elif self.tp_group.size > 1:
            y = reduce_scatter_shards(y, self.tp_group, *self._scatter_sizes(y))
        return y if bias is None else y.add_(bias.to(y.dtype))

    def matmul_reduce_scatter(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """Return the layer's output by a chunked matmul and reduce-scatter, or None if chunks are not used."""
        weight, bias = module.weight, _bias(module)
        if not (self.reduces and self.scatters) or needs_cast(x, weight):  # type: ignore[arg-type]
            return None
        dim, sizes = self._scatter_sizes(x)
        if not is_chunked(x, self.tp_group, dim, sizes):
            return None
        deferred = deferred_wgrad(module)
        y = matmul_reduce_scatter(
            x,
            weight,  # type: ignore[arg-type]
            self.tp_group,
            sizes,
            is_transposed=is_transposed(module),
            deferred=deferred,
        )
        return y if bias is None else y.add_(bias.to(y.dtype))

    def _scatter_sizes(self, x: torch.Tensor) -> tuple[int, list[int]]:
        """Return the dimension of the tokens, and the number of tokens of each rank."""
        dim, length = (self.sequence_dim, None) if x.dim() > 2 else (0, self.tp_group.sequence_length)
        return dim, sizes_from_full(x.shape[dim], self.tp_group, length)

    def leave_region(self) -> None:
        """Leave the RNG stream that the preceding column-parallel layers entered."""
        if not self.tp_group.shards_sequence:
            self.tp_group.rng.leave()


def make_column_parallel(
    module: nn.Module,
    tp_group: TensorParallelGroup,
    *,
    sizes: Sequence[int],
    gathers_output: bool = False,
    is_input_gathered: bool = False,
    siblings: Sequence[nn.Module] = (),
) -> None:
    """Make a linear layer column-parallel: it computes this rank's output features.

    Args:
        module: An `nn.Linear` or a subclass, or transformers' `Conv1D`, with this rank's shards as parameters.
        tp_group: The tensor-parallel group.
        sizes: Number of output features of each rank.
        gathers_output: If True, the layer returns the features of all ranks.
        is_input_gathered: If True, the input comes from `all_gather_sequence` or `copy_to_tp_region` already.
        siblings: All layers that read the same input, including this one.

    Raises:
        ConfigError: The module is not a linear layer.

    Collective: no; the layer's forward and backward are.
    """
    check_linear(module, "colwise")
    config = ColumnParallelConfig(tp_group, tuple(sizes), gathers_output, is_input_gathered, tuple(siblings))
    _set_features(module, outputs=sizes[tp_group.rank])
    mixin_forward(module, ColumnParallel, config)


def make_row_parallel(
    module: nn.Module,
    tp_group: TensorParallelGroup,
    *,
    sizes: Sequence[int],
    splits_input: bool = False,
    reduces: bool = True,
    scatters_sequence: bool | None = None,
    sequence_dim: int = 1,
) -> None:
    """Make a linear layer row-parallel: it reads this rank's input features.

    Args:
        module: An `nn.Linear` or a subclass, or transformers' `Conv1D`, with this rank's shard as weight and a
            replicated bias.
        tp_group: The tensor-parallel group.
        sizes: Number of input features of each rank.
        splits_input: If True, the input is replicated with the features of all ranks.
        reduces: If True, the output is reduced over the ranks, otherwise partial.
        scatters_sequence: If True, reduce-scatter the output over the tokens; optional, defaults to whether `tp_group`
            shards the sequence.
        sequence_dim: Dimension of the tokens; 2-d inputs have tokens along the first.

    Raises:
        ConfigError: The module is not a linear layer.

    Collective: no; the layer's forward and backward are.
    """
    check_linear(module, "rowwise")
    scatters = tp_group.shards_sequence if scatters_sequence is None else scatters_sequence
    config = RowParallelConfig(tp_group, tuple(sizes), splits_input, reduces, scatters, sequence_dim)
    _set_features(module, inputs=sizes[tp_group.rank])
    mixin_forward(module, RowParallel, config)


class ColumnParallel(nn.Module):
    """Mixin of a column-parallel linear layer."""

    _split: ColumnParallelConfig

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return this rank's output features, or those of all ranks."""
        config = self._split
        config.enter_region(self.training)
        y = (
            config.matmul(self, x)
            if is_plain_linear(self)
            else super().forward(config.prepare_input(x), *args, **kwargs)
        )
        return config.finish_output(y)


class RowParallel(nn.Module):
    """Mixin of a row-parallel linear layer."""

    _split: RowParallelConfig

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the reduced output, or this rank's partial output."""
        config = self._split
        x = config.prepare_input(x)
        is_plain = is_plain_linear(self)
        if is_plain and (output := config.matmul_reduce_scatter(self, x)) is not None:
            return output  # the stack's RNG stream is used, so there is none to leave
        y = matmul(self, x, None) if is_plain else self._without_bias(x, *args, **kwargs)
        config.leave_region()
        return config.finish_output(y, _bias(self))

    def _without_bias(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        bias, self._parameters["bias"] = self._parameters.get("bias"), None
        try:
            y: torch.Tensor = super().forward(x, *args, **kwargs)
        finally:
            self._parameters["bias"] = bias
        return y


def matmul(
    module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, *, num_outputs: int | None = None
) -> torch.Tensor:
    """Multiply an input with the weight of an `nn.Linear` or a `Conv1D`.

    Args:
        module: The linear layer.
        x: Input of any number of dimensions, features last.
        bias: Bias of the output, or None.
        num_outputs: Number of leading output features to compute; optional, defaults to all.
    """
    transposed = is_transposed(module)
    deferrable = deferrable_matmul(module, x, bias, is_transposed=transposed, num_outputs=num_outputs)
    if deferrable is not None:
        return deferrable
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    weight = weight.t() if transposed else weight
    return nn.functional.linear(x, weight if num_outputs is None else weight[:num_outputs], bias)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that can be sharded: its weight is a parameter, not computed from others."""
    return "weight" in module._parameters and (isinstance(module, nn.Linear) or is_transposed(module))


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is transformers' `Conv1D`, whose weight is (inputs, outputs)."""
    return any(
        base.__name__ == "Conv1D" and base.__module__ == "transformers.pytorch_utils" for base in type(module).__mro__
    )


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a layer's forward only multiplies by its weight and adds its bias."""
    base = original_class(module)
    return base is nn.Linear or (is_transposed(module) and base.__name__ == "Conv1D")


def _bias(module: nn.Module) -> torch.Tensor | None:
    return module.bias  # type: ignore[return-value]


def check_linear(module: nn.Module, style: str) -> None:
    """Check that a module is a linear layer.

    Raises:
        ConfigError: It is not; the message contains the style.
    """
    if not is_linear(module):
        raise ConfigError(
            f"the plan gives the style {style!r} to a {type(module).__name__}, which is not a linear layer: leave it"
            " out of the plan, or give the style to the nn.Linear or Conv1D inside of it"
        )


def _set_features(module: nn.Module, *, inputs: int | None = None, outputs: int | None = None) -> None:
    input_name, output_name = ("nx", "nf") if is_transposed(module) else ("in_features", "out_features")
    for name, size in ((input_name, inputs), (output_name, outputs)):
        if size is not None:
            setattr(module, name, size)
