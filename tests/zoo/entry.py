"""What a model of the zoo is: a builder, its batches and its loss, all deterministic and all tiny."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]
ParamGroups = Callable[[nn.Module], list[dict[str, Any]]]

_WEIGHT_SEED = 0
_BATCH_SEED = 1000  # plus the step: another stream than the weights


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    """Returns all parameters that train, as one group for an optimizer."""
    return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooEntry:
    """One model and how to train it.

    Attributes:
        name: as `get_model` takes it.
        construct: makes the model from the current generator; call `build` instead.
        sample: makes a batch of that many samples from a generator; call `make_batch` instead.
        loss: mean over the samples of a batch, where every sample counts alike: so the mean over equal parts of a batch
            is the loss of the whole (unless `mixes_samples`).
        param_groups: parameter groups for an optimizer, with their own settings where the model is about that.
        uses_unused_parameters: a step may leave parameters without gradient: DDP needs find_unused_parameters.
        never_used: names of the parameters that no batch gives a gradient.
        mixes_samples: a sample's output depends on the other samples of the batch (BatchNorm).
        routes_by_rank: capacities and load-balancing losses are those of a rank's samples: compared with one process
            that takes the parts of the ranks, and only by the tests of MoE layers.
        amplifies_roundings: differences of the last bit grow beyond the exact bounds in a step, as through statistics
            of few values: then it is compared by how far nudged serial runs differ.
        blocks_share_tensors: a tensor that trains goes into several blocks (a position bias, an encoder's states), so
            that its gradient is a sum over them.
        computes_in_bf16: frozen weights are in bf16: computed in other parts, a batch rounds otherwise.
        tied: groups of names that are the same parameter.
        slow: building or a step takes clearly longer than for the others.
        is_layer_variant: differs from others only in how its layers are made, which matters to plugins that cut layers
            apart, and to no other.
        construct_deep: makes the model with that many layers (an encoder and a decoder have as many each); None: the
            depth is part of what the model is.
    """

    name: str
    construct: Callable[[], nn.Module]
    sample: Callable[[int, torch.Generator], Batch]
    loss: Loss
    param_groups: ParamGroups = field(default=one_group)
    uses_unused_parameters: bool = False
    never_used: tuple[str, ...] = ()
    mixes_samples: bool = False
    routes_by_rank: bool = False
    amplifies_roundings: bool = False
    blocks_share_tensors: bool = False
    computes_in_bf16: bool = False
    tied: tuple[tuple[str, ...], ...] = ()
    slow: bool = False
    is_layer_variant: bool = False
    construct_deep: Callable[[int], nn.Module] | None = None

    def with_layers(self, num_layers: int) -> ZooEntry:
        """Returns the same model with another number of layers.

        Raises:
            ValueError: this one's depth can't be chosen.
        """
        if self.construct_deep is None:
            raise ValueError(f"the depth of {self.name} can't be chosen: take a model with `construct_deep`")
        return replace(self, construct=partial(self.construct_deep, num_layers))

    def build(self) -> nn.Module:
        """Returns the model in training mode, with the same weights at every call. Leaves the generator as it is."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_WEIGHT_SEED)
            return self.construct().train()

    def make_batch(self, step: int, global_batch: int) -> Batch:
        """Returns the batch of all ranks for a step: tensors whose first dimension is `global_batch`."""
        return self.sample(global_batch, torch.Generator().manual_seed(_BATCH_SEED + step))


def split_batch(batch: Any, rank: int, world_size: int) -> Any:
    """Returns a rank's contiguous part of a batch along dimension 0; containers keep their form.

    Raises:
        ValueError: the batch does not divide into equal parts, without which means of means would be wrong.
    """
    if isinstance(batch, torch.Tensor):
        num_samples = batch.shape[0]
        if num_samples % world_size:
            raise ValueError(f"{num_samples} samples do not divide over {world_size} ranks: take a multiple of it")
        part = num_samples // world_size
        return batch[rank * part : (rank + 1) * part]
    if isinstance(batch, dict):
        return {name: split_batch(value, rank, world_size) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(split_batch(value, rank, world_size) for value in batch)
    return batch
