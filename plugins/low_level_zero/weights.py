"""The weights of one param group in one flat buffer, and the shards that this rank updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from booster.interface import Shard, shard_spec_of
from booster.plugins.low_level_zero.layout import FlatLayout, Part
from booster.plugins.sharding.masters import follow_weights

__all__ = ["FlatGroup", "OwnedPart", "Sharding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How weights are cut and kept.

    Attributes:
        num_shards: Ranks that share the weights' updates.
        rank: This one among them.
        is_primary: True where other ranks hold copies of this rank's shards, and this one writes them.
        max_bucket_numel: Elements that are communicated together, at most.
        keeps_masters: Low-precision weights have fp32 masters.
        master_device: Where masters and optimizer states are; None: with the weights.
    """

    num_shards: int
    rank: int
    is_primary: bool
    max_bucket_numel: int
    keeps_masters: bool
    master_device: torch.device | None


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """A shard and where it lies."""

    shard: Shard
    part: Part


class FlatGroup:
    """Parameters of one param group and one number format, as views of one flat buffer.

    Making it re-points the parameters' memory; the `nn.Parameter` objects stay the same ones.

    Args:
        group_index: Of the param group.
        named: Parameters with their names, in the order in which the model registers them.
        dtype: Number format of the weights from now on.
        sharding: How they are cut.

    Attributes:
        weights: The flat buffer, padding included.
        owned: This rank's shards, bucket by bucket.
    """

    def __init__(
        self, group_index: int, named: Sequence[tuple[str, nn.Parameter]], dtype: torch.dtype, sharding: Sharding
    ) -> None:
        self.group_index = group_index
        self.sharding = sharding
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.dtype = dtype
        shapes = [tuple(parameter.shape) for parameter in self.parameters]
        self.layout = FlatLayout(shapes, sharding.num_shards, sharding.max_bucket_numel)
        device = self.parameters[0].device
        self.weights = torch.zeros(self.layout.numel, dtype=dtype, device=device)
        self.masters = self._new_masters(device)
        self.owned = self._own(self.layout.parts(sharding.rank))
        self.note_versions()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.device

    @property
    def rounds_in_place(self) -> bool:
        """Whether an optimizer may write this rank's pieces of the weights while it updates their masters."""
        return self.masters is not None and self.masters.device == self.device

    def weights_of(self, owned: OwnedPart) -> torch.Tensor:
        """Returns the weights that a shard is the master of."""
        return self.weights[owned.part.in_buffer]

    def memory_of(self, part: Part) -> torch.Tensor:
        """Returns the memory of a shard of this rank: of its master, or of the weights themselves."""
        if self.masters is None:
            return self.weights[part.in_buffer]
        start = self.layout.buckets[part.bucket].shard_start
        return self.masters[start + part.in_piece.start : start + part.in_piece.stop]

    @torch.no_grad()
    def write_weights(self) -> None:
        """Rounds the masters into this rank's pieces of the weights, after a step."""
        if self.masters is None:
            return
        for bucket in self.layout.buckets:
            master = self.masters[bucket.shard_start : bucket.shard_start + bucket.piece_numel]
            self.weights[bucket.piece(self.sharding.rank)].copy_(master, non_blocking=True)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Takes over weights that were changed from outside; see `follow_weights`."""
        if self.masters is not None:
            for owned in self.owned:
                follow_weights(owned.shard)

    def note_versions(self) -> None:
        """Remembers the weights as they are now; see `changed_outside`."""
        self._versions = [parameter._version for parameter in self.parameters]

    def changed_outside(self) -> bool:
        """Returns whether a weight was written in place since `note_versions`, other than through `.data`."""
        return self._versions != [parameter._version for parameter in self.parameters]

    def moved_parameter(self) -> str | None:
        """Returns the name of a parameter whose memory is no longer in the flat buffer; None: all are."""
        start, size = self.weights.data_ptr(), self.weights.element_size()
        for name, parameter, place in zip(self.names, self.parameters, self.layout.places, strict=True):
            if parameter.data_ptr() != start + place.start * size and parameter.numel() > 0:
                return name
        return None

    def _new_masters(self, device: torch.device) -> torch.Tensor | None:
        is_low = self.dtype in (torch.float16, torch.bfloat16)
        moves = self.sharding.master_device not in (None, device)
        if not moves and not (is_low and self.sharding.keeps_masters):
            return None
        dtype = torch.float32 if is_low and self.sharding.keeps_masters else self.dtype
        home = device if self.sharding.master_device is None else self.sharding.master_device
        return torch.zeros(self.layout.shard_numel, dtype=dtype, device=home)

    @torch.no_grad()
    def _own(self, parts: Sequence[Part]) -> list[OwnedPart]:
        """Moves every parameter into the buffer, its exact values into the masters, and makes the shards."""
        of_place: dict[int, list[Part]] = {}
        for part in parts:
            of_place.setdefault(part.place, []).append(part)
        owned: dict[tuple[int, int], OwnedPart] = {}
        for index, (parameter, place) in enumerate(zip(self.parameters, self.layout.places, strict=True)):
            exact = parameter.detach().reshape(-1)
            view = self.weights[place.start : place.stop]
            view.copy_(exact)
            for part in of_place.get(index, ()):
                owned[index, part.bucket] = OwnedPart(self._shard(index, part, exact), part)
            parameter.data = view.view(place.shape)  # the old memory goes here, one parameter at a time
            parameter.grad = None
        return [owned[part.place, part.bucket] for part in parts]

    def _shard(self, index: int, part: Part, exact: torch.Tensor) -> Shard:
        memory = self.memory_of(part)
        if self.masters is not None:
            memory.copy_(exact[slice(*part.span)])
        return Shard(
            name=self.names[index],
            global_shape=shard_spec_of(self.parameters[index]).logical_shape,
            span=part.span,
            parameter=nn.Parameter(memory, requires_grad=True),
            model_param=self.parameters[index],
            group_index=self.group_index,
            has_master=self.masters is not None and self.masters.dtype != self.dtype,
            is_primary=self.sharding.is_primary,
        )
