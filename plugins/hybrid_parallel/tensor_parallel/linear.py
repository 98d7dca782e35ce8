"""Column- and row-parallel linear layers (Shoeybi et al., "Megatron-LM", arXiv:1909.08053).

The layer's class is replaced by a subclass, so that `isinstance` keeps working. Its weight and bias are already sharded
when the functions of this file are called.

A column-parallel layer holds some of the output features. Its input is replicated, and the gradient of the input is
all-reduced. A row-parallel layer holds some of the input features. Its output is all-reduced, and its replicated bias
is added once, after that. A column-row pair with element-wise operations between them needs one all-reduce in forward
and one in backward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from booster.core.layer_stacks import subclass_of

from .async_grad_reduce import AsyncGradInput
from .collective_matmul import is_chunked, matmul_reduce_scatter, traced_matmul_reduce_scatter
from .deferred_wgrad import (
    DeferredWeightGrads,
    deferrable_matmul,
    deferred_wgrad,
    needs_cast,
    weight_matrix,
)
from .dynamic_class import mixin_forward
from .group import TensorParallelGroup
from .mappings import (
    gather_from_tp_region,
    reduce_from_tp_region,
    reduce_scatter_shards,
    scatter_to_tp_region,
    shared_copy_to_tp_region,
)
from .shard_spec import even_sizes


@dataclass(frozen=True, slots=True)
class ColumnParallelConfig:
    """Settings of a column-parallel layer.

    Attributes:
        tp_group: The tensor-parallel group.
        sizes: Number of output features of each rank.
        gathers_output: If True, the layer returns the features of all ranks.
        is_input_gathered: If True, the input comes from `all_gather_shards` or `copy_to_tp_region` already.
        siblings: All layers that read the same input, including this one.
    """

    tp_group: TensorParallelGroup
    sizes: tuple[int, ...]
    gathers_output: bool
    is_input_gathered: bool
    siblings: tuple[nn.Module, ...]

    def is_traceable(self, module: nn.Module) -> bool:
        """Whether `traced_forward` does what `forward` does."""
        return self.tp_group.is_traceable(module.training)

    def prepare_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of this rank's shard."""
        return x if self.is_input_gathered else shared_copy_to_tp_region(x, self.tp_group)

    def finish_output(self, y: torch.Tensor) -> torch.Tensor:
        """Return the layer's output of this rank's output features, or of numbers of them."""
        return gather_from_tp_region(y, self.tp_group, self.sizes) if self.gathers_output else y

    def matmul(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the output of a plain linear layer's shard; see Note [Async gradient all-reduce]."""
        tp_group = self.tp_group
        precomputed = tp_group.precomputed.pop(module, x)
        if precomputed is not None:
            return precomputed
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        needs_both = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
        can_overlap = tp_group.size > 1 and needs_both and not needs_cast(x, weight) and x.dim() > 1
        if self.is_input_gathered or not can_overlap:
            return matmul(module, self.prepare_input(x), module.bias)  # type: ignore[arg-type]
        overlapped = tp_group.shared_input(
            x, AsyncGradInput, lambda shared: AsyncGradInput(shared, self.siblings, tp_group)
        )
        return overlapped.matmul(module, is_transposed=is_transposed(module))


@dataclass(frozen=True, slots=True)
class RowParallelConfig:
    """Settings of a row-parallel layer.

    Attributes:
        tp_group: The tensor-parallel group.
        sizes: Number of input features of each rank.
        splits_input: If True, the input has the features of all ranks.
        scatters: If True, the output is reduce-scattered over the tokens, otherwise all-reduced.
        is_plain: If True, the layer only multiplies by its weight and adds its bias.
    """

    tp_group: TensorParallelGroup
    sizes: tuple[int, ...]
    splits_input: bool
    scatters: bool
    is_plain: bool

    def is_traceable(self, module: nn.Module) -> bool:
        """Whether `traced_forward` does what `forward` does."""
        return self.tp_group.is_traceable(module.training)

    def finish_output(self, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's output from the shard's output.

        Args:
            y: Output of this rank's shard without bias; may be overwritten.
            bias: Bias of the output, which is added once.
        """
        if not self.scatters:
            y = reduce_from_tp_region(y, self.tp_group, overwrites=True)
        elif self.tp_group.size > 1:
            y = reduce_scatter_shards(y, self.tp_group, *self.tokens(y))
        return y if bias is None else y.add_(bias.to(y.dtype))

    def matmul_reduce_scatter(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """Return the layer's output by a chunked matmul and reduce-scatter, or None if chunks are not used."""
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        bias: torch.Tensor | None = module.bias  # type: ignore[assignment]
        if not self.scatters or needs_cast(x, weight):
            return None
        sizes, dim = self.tokens(x)
        if max(sizes) == 0 or not is_chunked(x, self.tp_group, dim):
            return None
        deferred = deferred_wgrad(module)
        y = matmul_reduce_scatter(
            x, weight, self.tp_group, sizes, is_transposed=is_transposed(module), deferred=deferred
        )
        return y if bias is None else y.add_(bias.to(y.dtype))

    def tokens(self, x: torch.Tensor) -> tuple[list[int], int]:
        """Return the number of tokens of each rank after a reduce-scatter, and their dimension."""
        if x.dim() < 3:
            return self.tp_group.token_sizes(is_flat=True), 0
        return even_sizes(x.shape[1], self.tp_group.size), 1


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
        tp_group, sizes, gathers_output, is_input_gathered, siblings: See `ColumnParallelConfig`.

    Collective: no; the layer's forward and backward are.
    """
    config = ColumnParallelConfig(tp_group, tuple(sizes), gathers_output, is_input_gathered, tuple(siblings))
    setattr(module, "nf" if is_transposed(module) else "out_features", sizes[tp_group.rank])
    mixin_forward(module, ColumnParallel, config)


def make_row_parallel(
    module: nn.Module,
    tp_group: TensorParallelGroup,
    *,
    sizes: Sequence[int],
    splits_input: bool = False,
    scatters_sequence: bool | None = None,
) -> None:
    """Make a linear layer row-parallel: it reads this rank's input features.

    Args:
        module: An `nn.Linear` or a subclass, or transformers' `Conv1D`, with this rank's shard as weight and a
            replicated bias.
        tp_group, sizes, splits_input: See `RowParallelConfig`.
        scatters_sequence: If True, reduce-scatter the output over the tokens; optional, defaults to whether `tp_group`
            shards the sequence.

    Collective: no; the layer's forward and backward are.
    """
    scatters = tp_group.shards_sequence if scatters_sequence is None else scatters_sequence
    is_plain = has_plain_forward(type(module))
    config = RowParallelConfig(tp_group, tuple(sizes), splits_input, scatters, is_plain)
    setattr(module, "nx" if is_transposed(module) else "in_features", sizes[tp_group.rank])
    mixin_forward(module, RowParallel, config)


class ColumnParallel(nn.Module):
    """Mixin of a column-parallel linear layer."""

    _split: ColumnParallelConfig

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return this rank's output features, or those of all ranks."""
        config, tp_group = self._split, self._split.tp_group
        # A gathered output is replicated. Where the sequence is sharded, the stack's RNG stream is used.
        if self.training and not config.gathers_output and not tp_group.shards_sequence and tp_group.size > 1:
            tp_group.rng.enter()
        if is_plain_linear(self):
            y = config.matmul(self, x)
        else:
            y = super().forward(config.prepare_input(x), *args, **kwargs)
        return config.finish_output(y)

    def traced_forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return this rank's output features, in a graph of torch.compile."""
        config, tp_group = self._split, self._split.tp_group
        y = tp_group.pop_traced_product(self, x)
        if y is None:
            y = super().forward(config.prepare_input(x), *args, **kwargs)
        tp_group.traced_in_region = not (tp_group.shards_sequence or config.gathers_output)
        return config.finish_output(y)

    def traced_product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output without the bias, in a graph of torch.compile."""
        config, weight = self._split, cast(torch.Tensor, self.weight)
        y = nn.functional.linear(config.prepare_input(x), weight.t() if hasattr(self, "nf") else weight)
        return config.finish_output(y)


class RowParallel(nn.Module):
    """Mixin of a row-parallel linear layer."""

    _split: RowParallelConfig
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the reduced output, or this rank's partial output."""
        config, tp_group = self._split, self._split.tp_group
        if config.splits_input:
            x = scatter_to_tp_region(x, tp_group, config.sizes)
        if is_plain_linear(self):
            output = config.matmul_reduce_scatter(self, x)
            if output is not None:
                return output  # the stack's RNG stream is used, so there is none to leave
            y = matmul(self, x, None)
        else:
            y = self._forward_without_bias(x, *args, **kwargs)
        if not tp_group.shards_sequence:
            tp_group.rng.leave()  # the stream that the preceding column-parallel layers entered
        return config.finish_output(y, self.bias)

    def _forward_without_bias(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        bias, self._parameters["bias"] = self._parameters.get("bias"), None  # added after the reduction
        try:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        finally:
            self._parameters["bias"] = bias

    def traced_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the reduced output, in a graph of torch.compile."""
        tp_group = self._split.tp_group
        tp_group.traced_in_region = False
        y = self.traced_product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def traced_product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output without the bias, in a graph of torch.compile."""
        config, tp_group, weight = self._split, self._split.tp_group, cast(torch.Tensor, self.weight)
        if config.splits_input:
            x = scatter_to_tp_region(x, tp_group, config.sizes)
        is_conv1d = hasattr(self, "nx")  # of transformers, for which torch.compile finds no module
        is_scattered = config.is_plain and config.scatters and not needs_cast(x, weight)
        if is_scattered and is_chunked(x, tp_group, config.tokens(x)[1]):
            tp_group.end_traced_region()
            return traced_matmul_reduce_scatter(tp_group.number, is_conv1d, x, weight, *config.tokens(x)[0])  # type: ignore[no-any-return]
        if config.is_plain:
            y = nn.functional.linear(x, weight.t() if is_conv1d else weight)
        else:
            y = self._forward_without_bias(x)
        if config.scatters:
            return reduce_scatter_shards(y, tp_group, *config.tokens(y))
        return reduce_from_tp_region(y, tp_group)


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
    return nn.functional.linear(x, weight_matrix(weight, transposed, num_outputs), bias)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that can be sharded: its weight is a parameter, not computed from others."""
    return "weight" in module._parameters and (isinstance(module, nn.Linear) or is_transposed(module))


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is transformers' `Conv1D`, whose weight is (inputs, outputs)."""
    return any(_is_conv1d(base) for base in type(module).__mro__)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a layer's forward only multiplies by its weight and adds its bias."""
    return has_plain_forward(type(module).__mro__[2])  # the class before `mixin_forward`


def has_plain_forward(layer_class: type[nn.Module]) -> bool:
    """Whether the forward of a class is that of a linear layer."""
    return layer_class is nn.Linear or _is_conv1d(layer_class)


def _is_conv1d(layer_class: type) -> bool:
    return layer_class.__name__ == "Conv1D" and layer_class.__module__ == "transformers.pytorch_utils"


def defer_weight_gradients(model: nn.Module, gradients: DeferredWeightGrads) -> None:
    """Prepare a model's linear layers to defer the gradients of their weights, in place.

    Applies to `nn.Linear`, transformers' `Conv1D`, and their subclasses without an overridden forward, tensor parallel
    or not. Names of modules and parameters, `isinstance` and `copy.deepcopy` keep working. Call it after layers were
    sharded for tensor parallelism. Not collective.

    Args:
        model: Model whose layers are all prepared, replacing earlier queues.
        gradients: Queue of the stage that runs the model.
    """
    for module in model.modules():
        is_sharded = "_split" in vars(module)  # these layers defer already
        if not is_linear(module) or ("forward" in vars(module) and not is_sharded):
            continue
        owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
        if "_wgrad_queue" not in vars(module) and has_plain_forward(owner):
            module.__class__ = subclass_of(type(module), "deferring", _deferring_members)
        module._wgrad_queue = gradients  # type: ignore[assignment]


def _deferring_members(base: type[nn.Module]) -> dict[str, Any]:
    plain = base.forward
    (_, input_name) = inspect.signature(plain).parameters

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = (args or (kwargs.get(input_name),))[0] if len(args) + len(kwargs) == 1 else None
        y = None if x is None else deferrable_matmul(self, x, self.bias, is_transposed=is_transposed(self))  # type: ignore[arg-type]
        return plain(self, *args, **kwargs) if y is None else y  # type: ignore[no-any-return]

    return {"forward": forward}
