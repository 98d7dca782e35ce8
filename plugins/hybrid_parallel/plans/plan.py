"""What a tensor-parallel plan says: which modules are split how. Data only, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from booster.plugins.hybrid_parallel.tensor_parallel.splits import Block, units_of_rank

__all__ = ["ArgumentSplit", "AttributeChange", "PlannedEntry", "Style", "TensorParallelPlan", "UserPlan"]

# Note [Plans]
# A plan has an *entry* for every module (rarely: for a bare parameter) that is treated in a way of its own; what has no
# entry is replicated. The entry's *style* says how, in the names that transformers uses:
#   colwise                 linear layer split by output features; its input is replicated, its output stays split
#   colwise_gather_output   the same, with its output gathered
#   packed_colwise          the same, with several blocks behind each other (query, key and value; gate and up)
#   rowwise                 linear layer split by input features, which are split already; its output is summed
#   rowwise_split_input     the same, with an input that is replicated and that it cuts itself
#   packed_rowwise          rowwise with several blocks in its input; on a bare parameter, a split of its last dimension
#   vocab                   embedding split by rows, its output summed
#   vocab_head              head split by rows of its weight and bias; it shares the split of a tied embedding
#   embedding_colwise       embedding split by features, output stays split (T5's relative bias, by heads)
#   embedding_colwise_gather_output   the same, gathered
#   replicated_with_grad_allreduce   whole on every rank, used on split features: its gradient is summed
#   sequence                whole on every rank; in the modes that split the sequence its gradient is summed
#   replicated              whole on every rank, said by the user: plans for other modules below don't reach it
#   moe_tp_experts, moe_identity_expert, mla_kv_a_proj, all_reduce, local_params   as in transformers
# On a bare parameter (the weights of all experts in one tensor) colwise, packed_colwise, rowwise and packed_rowwise say
# only which dimension is cut: the module around it, an entry of its own, says what is communicated.


@dataclass(frozen=True, slots=True)
class Style:
    """How a module is split, for plans that users write; a string is the short form of one with a name only.

    The names:

    - `"colwise"`: linear layer split by output features; its output stays split, for a rowwise layer.
    - `"colwise_gather_output"`: the same, with its output gathered, whole on every rank.
    - `"packed_colwise"`: colwise with several blocks behind each other (query, key and value; gate and up). As a
      string, `"packed_colwise:3"` says how many.
    - `"rowwise"`: linear layer split by input features, which a colwise layer has split; its output is summed.
    - `"rowwise_split_input"`: the same, with a whole input that it cuts itself.
    - `"packed_rowwise"`: rowwise with several blocks in its input.
    - `"vocab"`: embedding split by rows, its output summed.
    - `"vocab_head"`: the linear layer that gives logits, split by rows; it shares the split of a tied embedding.
    - `"embedding_colwise"`: embedding split by features; its output stays split.
    - `"embedding_colwise_gather_output"`: the same, with its output gathered.
    - `"replicated_with_grad_allreduce"`: whole on every rank, used on split features; its gradient is summed.
    - `"sequence"`: whole on every rank; its gradient is summed in modes that split the sequence.
    - `"replicated"`: whole on every rank, whatever patterns for more modules say.
    - `"moe_tp_experts"`, `"moe_identity_expert"`, `"mla_kv_a_proj"`, `"all_reduce"`, `"local_params"`: as in
      transformers, for its experts and latent attention.

    Attributes:
        name: One of the above.
        blocks: What the dimension that is split consists of, in order; (): one block of single features, or of the
            heads that the model's configuration names.
        num_heads: Heads of the only block, instead of `blocks`; each stays on one rank.
        num_blocks: Equal blocks behind each other, of a packed layer, instead of `blocks`; None: two, or query, key and
            value where the layer's name says so.
    """

    name: str
    blocks: tuple[Block, ...] = ()
    num_heads: int | None = None
    num_blocks: int | None = None


UserPlan: TypeAlias = Mapping[str, str | Style]
"""Patterns of module names, and what is done with the modules that match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEntry:
    """What is done with one module.

    Attributes:
        name: Of the module in the user's model, or of a bare parameter.
        style: See Note [Plans].
        blocks: What the dimension that is split consists of; () where nothing is split.
        dim: The dimension of the weight (or of the bare parameter) that is split.
        region: Name of the module at whose input the parallel region begins: where a mode that splits the sequence
            gathers it. "": outside of all stacks of layers, or fed from there, so that its input is never split.
        siblings: Names of the column-parallel modules that read the same input, this one included.
        is_parameter: `name` is that of a bare parameter.
        reason: Why it is treated so, where that isn't the plan's plain word; shown by `explain`.
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
    """A number that a module's forward takes its local tensors apart with, so that it depends on the split.

    Attributes:
        module: Name of the module.
        attribute: Name of the number.
        block: What it counts.
        counts: Whether it is a number of units (heads), or of features.
        divisor: The number is a ratio to the units of this block (query heads per key-value head); None: it is not.
    """

    module: str
    attribute: str
    block: Block
    counts: Literal["units", "features"] = "units"
    divisor: Block | None = None

    def local_value(self, num_ranks: int, rank: int) -> int:
        """Returns the number that is right on a rank."""
        value = _num_local_units(self.block, num_ranks, rank)
        if self.counts == "features":
            value *= self.block.unit_size
        return value if self.divisor is None else value // _num_local_units(self.divisor, num_ranks, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentSplit:
    """A tensor with a value per head that a module is given from outside of it: a rank's heads are taken of it.

    Attributes:
        module: Name of the module.
        argument: Name of the argument of its forward.
        dim: The dimension that the heads are along, whose size is that of the block times anything that comes before
            (batch and heads in one). A tensor of which this dimension has another size (1, for all heads) stays.
        block: The heads.
    """

    module: str
    argument: str
    dim: int
    block: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelPlan:
    """Everything that tensor and sequence parallelism do to a model.

    Attributes:
        entries: In the order of the model's modules.
        attributes: Numbers to change.
        arguments: Tensors to cut at the modules that get them.
        stacks: Per stack of layers that run one after the other, the layers' names in order.
        source: Where the plan comes from, as a sentence.
        notes: What stays replicated and why, and what else the user should know.
        is_derived: It was read off the module graph, so that the user should look at it.
    """

    entries: tuple[PlannedEntry, ...] = ()
    attributes: tuple[AttributeChange, ...] = ()
    arguments: tuple[ArgumentSplit, ...] = ()
    stacks: tuple[tuple[str, ...], ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()
    is_derived: bool = False

    def entry_of(self, name: str) -> PlannedEntry | None:
        """Returns what is done with the module or the bare parameter of this name."""
        return next((entry for entry in self.entries if entry.name == name), None)


def _num_local_units(block: Block, num_ranks: int, rank: int) -> int:
    held = units_of_rank(block, num_ranks, rank)
    return held.stop - held.start
