"""Dropout of a layer's input where the layer has entered or left a tensor-parallel region; see `TensorParallelRNG`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster.core.compiling import not_compiled

from .group import TensorParallelGroup


def make_replicated_dropout(module: nn.Module, tp_group: TensorParallelGroup) -> None:
    """Give a dropout whose input is replicated the same mask on all ranks, also inside of a region."""
    module.register_forward_pre_hook(_Stream(tp_group, is_sharded=False))


def make_sharded_dropout(module: nn.Module, tp_group: TensorParallelGroup) -> None:
    """Give a dropout whose input is sharded a mask of its own on every rank, also outside of a region."""
    module.register_forward_pre_hook(_Stream(tp_group, is_sharded=True))


@dataclass(frozen=True, slots=True)
class _Stream:
    tp_group: TensorParallelGroup
    is_sharded: bool

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() and self.tp_group.is_traceable(module.training):
            self.tp_group.traced_in_region = self.is_sharded and not self.tp_group.shards_sequence
        else:
            self._change(module)

    @not_compiled
    def _change(self, module: nn.Module) -> None:
        if not module.training or self.tp_group.shards_sequence or self.tp_group.size == 1:
            return  # where the sequence is sharded, the stack's RNG stream is used
        if self.is_sharded:
            self.tp_group.rng.enter()
        else:
            self.tp_group.rng.leave()
