"""Data classes of tensor-parallel plans. Plans are equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from booster.plugins.hybrid_parallel.tensor_parallel.splits import Block, units_of_rank

__all__ = ["AttributeChange", "PlannedEntry", "ShardedArgument", "Style", "TensorParallelPlan", "UserPlan"]

# A plan has an *entry* for every module (rarely, a bare parameter) that is not simply replicated. The styles of entries
# are listed in `Style`, with the names of transformers. On a bare parameter (the weights of all experts in one tensor)
# colwise, packed_colwise, rowwise and packed_rowwise only determine the sharded dimension: the module around it has its
# own entry, which determines the communication.


@dataclass(frozen=True, slots=True)
class Style:
    """Tensor-parallel style of a module, for users' plans; a string is short for a style with a name only.

    Names:

    - `"colwise"`: column-parallel linear layer; its output stays sharded, for a rowwise layer.
    - `"colwise_gather_output"`: column-parallel linear layer with a gathered output.
    - `"packed_colwise"`: colwise with several consecutive blocks (query, key and value; gate and up). As a string,
      `"packed_colwise:3"` includes the number of blocks.
    - `"rowwise"`: row-parallel linear layer with a sharded input; its output is all-reduced.
    - `"rowwise_split_input"`: row-parallel linear layer that shards its replicated input.
    - `"packed_rowwise"`: rowwise with several consecutive blocks of inputs.
    - `"vocab"`: embedding sharded over rows; its output is all-reduced.
    - `"vocab_head"`: linear layer that computes logits, sharded over rows, like an embedding tied to it.
    - `"embedding_colwise"`: embedding sharded over features (T5's relative bias, by heads); its output stays sharded.
    - `"embedding_colwise_gather_output"`: embedding sharded over features with a gathered output.
    - `"replicated_with_grad_allreduce"`: replicated module on sharded features; its gradient is all-reduced.
    - `"sequence"`: replicated; its gradient is all-reduced in modes that shard the sequence on the tp axis.
    - `"replicated"`: replicated, overriding less specific patterns.
    - `"moe_tp_experts"`, `"moe_identity_expert"`, `"mla_kv_a_proj"`, `"all_reduce"`, `"local_params"`: as in
      transformers, for its experts and latent attention.

    Attributes:
        name: One of the names above.
        blocks: Consecutive blocks of the sharded dimension; optional, defaults to one block of single features, or of
            the heads in the model's configuration.
        num_heads: Number of heads of the only block, instead of `blocks`; a head is not divided between ranks.
        num_blocks: Number of equal blocks of a packed layer, instead of `blocks`; optional, defaults to query, key and
            value by the layer's name, otherwise two.
    """

    name: str
    blocks: tuple[Block, ...] = ()
    num_heads: int | None = None
    num_blocks: int | None = None


UserPlan: TypeAlias = Mapping[str, str | Style]
"""Styles by pattern of module names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEntry:
    """Plan of one module.

    Attributes:
        name: Name of the module in the user's model, or of a bare parameter.
        style: Name of the style; see `Style`.
        blocks: Blocks of the sharded dimension, () if nothing is sharded.
        dim: The sharded dimension of the weight or bare parameter.
        region: Name of the module whose input starts the parallel region, where a sharded sequence is gathered. ""
            outside of all stacks of layers, or with an input from there, which is never sharded.
        siblings: Names of the column-parallel modules that read the same input, including this one.
        is_parameter: Whether `name` is a bare parameter.
        reason: Reason of a style that the plan's source did not give; printed by `explain`.
    """

    name: str
    style: str
    blocks: tuple[Block, ...] = ()
    dim: int = 0
    region: str = ""
    siblings: tuple[str, ...] = ()
    is_parameter: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeChange:
    """A size attribute with which a module's forward reshapes its tensors, and which changes with the sharding.

    Attributes:
        module: Name of the module.
        attribute: Name of the attribute.
        block: Block whose units or features it counts.
        counts: "units" (heads) or "features".
        divisor: Block by whose units the number is divided (query heads per key-value head), optional.
    """

    module: str
    attribute: str
    block: Block
    counts: Literal["units", "features"] = "units"
    divisor: Block | None = None

    def local_value(self, num_ranks: int, rank: int) -> int:
        """Return the attribute's value on a rank."""
        value = _num_local_units(self.block, num_ranks, rank)
        if self.counts == "features":
            value *= self.block.unit_size
        return value if self.divisor is None else value // _num_local_units(self.divisor, num_ranks, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedArgument:
    """A forward argument with a value per head, which is narrowed to a rank's heads.

    Attributes:
        module: Name of the module.
        argument: Name of the argument of its forward.
        dim: Dimension of the heads, possibly flattened with preceding ones (batch * heads). Tensors whose size is not a
            multiple of the number of heads, such as 1, are unchanged.
        block: Block of the heads.
    """

    module: str
    argument: str
    dim: int
    block: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelPlan:
    """Plan of a model for tensor and sequence parallelism.

    Attributes:
        entries: Entries in the order of the model's modules.
        attributes: Size attributes to change.
        arguments: Forward arguments to shard.
        stacks: Names of the layers of each stack, in execution order.
        source: Description of the plan's source.
        notes: Notes for the user, such as what is not sharded and why.
        is_derived: Whether it was derived from the module graph, so that users should review it.
    """

    entries: tuple[PlannedEntry, ...] = ()
    attributes: tuple[AttributeChange, ...] = ()
    arguments: tuple[ShardedArgument, ...] = ()
    stacks: tuple[tuple[str, ...], ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()
    is_derived: bool = False

    def entry_of(self, name: str) -> PlannedEntry | None:
        """Return the entry of a module or bare parameter, or None."""
        return next((entry for entry in self.entries if entry.name == name), None)


def _num_local_units(block: Block, num_ranks: int, rank: int) -> int:
    held = units_of_rank(block, num_ranks, rank)
    return held.stop - held.start
