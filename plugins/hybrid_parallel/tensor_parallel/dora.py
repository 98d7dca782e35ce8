"""DoRA of peft on column- and row-parallel layers (Liu et al., "DoRA", arXiv:2402.09353).

DoRA divides each row of the adapted weight by its norm, and multiplies it by a trained magnitude. A column-parallel
layer holds whole rows, and their magnitudes are sharded with them. A row-parallel layer holds a part of every row: the
ranks sum the squares of their parts, and each has all magnitudes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster.comm import all_reduce_sum, sum_dtype

from .dynamic_class import mixin_forward
from .linear import ColumnParallelConfig, RowParallelConfig, matmul
from .mappings import all_reduce, scatter_to_tp_region


def make_parallel_dora(module: nn.Module, layer: nn.Module) -> None:
    """Make the magnitudes of a column- or row-parallel layer compute with this rank's shards of it.

    Args:
        module: A `DoraLinearLayer` of peft, with this rank's magnitudes.
        layer: Layer beside the adapter, which is column- or row-parallel already.

    Collective: no; the forward is.
    """
    config: Any = layer._split
    mixin_forward(module, ParallelDora, ParallelLayer(layer, config))


@dataclass(frozen=True, slots=True, eq=False)
class ParallelLayer:
    """Layer beside an adapter.

    Attributes:
        module: Column- or row-parallel layer.
        config: Its settings.
    """

    module: nn.Module
    config: ColumnParallelConfig | RowParallelConfig

    def is_traceable(self, module: nn.Module) -> bool:
        """Whether the forward can be traced."""
        return self.config.is_traceable(self.module)

    def as_output(self, features: torch.Tensor) -> torch.Tensor:
        """Return numbers of this rank's rows as those of the layer's output features."""
        return self.config.finish_output(features) if isinstance(self.config, ColumnParallelConfig) else features

    def without_bias(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output without its bias."""
        config = self.config
        if torch.compiler.is_compiling():
            return self.module.traced_product(x)  # type: ignore[no-any-return, operator]
        if isinstance(config, ColumnParallelConfig):
            return self.as_output(matmul(self.module, config.prepare_input(x), None))
        if config.splits_input:
            x = scatter_to_tp_region(x, config.tp_group, config.sizes)
        return config.finish_output(matmul(self.module, x, None), None)


class ParallelDora(nn.Module):
    """Mixin of the magnitudes of a sharded layer."""

    _split: ParallelLayer
    weight: nn.Parameter
    fan_in_fan_out: bool

    def get_lora_weight(self, lora_A: Any, lora_B: Any, adapter_name: str | None = None) -> torch.Tensor:
        """Return this rank's shard of the update. peft calls the layers, which communicate."""
        update: torch.Tensor = lora_B.weight @ lora_A.weight
        return update

    def get_weight_norm(
        self, weight: torch.Tensor, lora_weight: torch.Tensor, scaling: float, adapter_name: str | None = None
    ) -> torch.Tensor:
        """Return the norms of this rank's rows. Collective beside a row-parallel layer, where they are all rows."""
        adapted = ((weight.T if self.fan_in_fan_out else weight) + scaling * lora_weight).detach()
        config = self._split.config
        if isinstance(config, ColumnParallelConfig):
            norms: torch.Tensor = torch.linalg.norm(adapted, dim=1)
        else:
            squares = adapted.to(sum_dtype(adapted.dtype)).square().sum(dim=1)
            if torch.compiler.is_compiling():
                norms = all_reduce(squares, config.tp_group.number).sqrt()
            else:
                norms = all_reduce_sum(squares, config.tp_group.group).sqrt()
        return norms.to(weight.dtype)

    def forward(
        self,
        x: torch.Tensor,
        *,
        lora_A: Any,
        lora_B: Any,
        scaling: float,
        base_layer: Any,
        base_result: torch.Tensor | None = None,
        adapter_name: str = "default",
    ) -> torch.Tensor:
        """Return what is added to the layer's output, in its layout."""
        layer = self._split
        update = self.get_lora_weight(lora_A, lora_B).to(x.dtype)
        norms = self.get_weight_norm(base_layer.weight.to(x.dtype), update.detach(), scaling)
        factors = layer.as_output(self.weight / norms)
        if base_result is None:  # with dropout of the adapter's input
            base_result = layer.without_bias(x)
        elif base_layer.bias is not None:
            base_result = base_result - layer.as_output(base_layer.bias)
        added: torch.Tensor = (factors - 1) * base_result + factors * lora_B(lora_A(x)) * scaling
        return added

    def traced_forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the same in a graph of torch.compile."""
        return ParallelDora.forward(self, x, **kwargs)
