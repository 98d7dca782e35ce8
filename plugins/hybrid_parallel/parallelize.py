"""Apply a tensor-parallel plan: swap module forwards, hook parallel regions, reduce partial gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from booster.errors import ConfigError
from booster.interface import ShardSpec
from booster.plugins.hybrid_parallel.argument_splits import shard_argument
from booster.plugins.hybrid_parallel.plans.features import COLUMN_STYLES, ROW_STYLES
from booster.plugins.hybrid_parallel.plans.plan import PlannedEntry, TensorParallelPlan
from booster.plugins.hybrid_parallel.sequence_parallel.recorded_outputs import gather_returned_outputs
from booster.plugins.hybrid_parallel.sequence_parallel.splitters import TensorAxisSplitter
from booster.plugins.hybrid_parallel.sequence_parallel.stacks import attach_stack
from booster.plugins.hybrid_parallel.tensor_parallel.embedding import (
    make_feature_parallel_embedding,
    make_vocab_parallel_embedding,
    make_vocab_parallel_head,
)
from booster.plugins.hybrid_parallel.tensor_parallel.experts import (
    make_identity_expert,
    make_latent_projection,
    make_output_all_reduce,
    make_sharded_experts,
)
from booster.plugins.hybrid_parallel.tensor_parallel.gradients import all_reduce_replicated_grad, all_reduce_shared_grad
from booster.plugins.hybrid_parallel.tensor_parallel.linear import make_column_parallel, make_row_parallel
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelGroup
from booster.plugins.hybrid_parallel.tensor_parallel.region_input import GatheredRegionInput
from booster.plugins.hybrid_parallel.tensor_parallel.splits import local_sizes

__all__ = ["parallelize"]

_UNSWAPPED_STYLES = frozenset({"replicated", "sequence", "replicated_with_grad_allreduce", "local_params"})


def parallelize(
    model: nn.Module,
    plan: TensorParallelPlan,
    tp_group: TensorParallelGroup,
    shard_specs: Mapping[str, Sequence[ShardSpec]],
    *,
    vocabulary_multiple: int,
    parallel_output: bool,
) -> None:
    """Make the model's layers compute with this rank's shards, in place. Its parameters are already sharded.

    Args:
        model: The user's model.
        plan: Tensor-parallel style of each module.
        tp_group: The tensor-parallel group.
        shard_specs: Shard specs of each parameter, one per tensor-parallel rank.
        vocabulary_multiple: Multiple to which the vocabulary is padded.
        parallel_output: If True, heads return logits that stay sharded, as `VocabParallelLogits`.

    Raises:
        ConfigError: A module does not support its style.

    Collective: no.
    """
    modules = dict(model.named_modules())
    swap = _ModuleSwap(modules, plan, tp_group, vocabulary_multiple, parallel_output)
    for entry in plan.entries:
        if not entry.is_parameter and entry.style not in _UNSWAPPED_STYLES:
            swap.apply(entry)
    for change in plan.attributes:
        setattr(modules[change.module], change.attribute, change.local_value(tp_group.size, tp_group.rank))
    for split in plan.arguments:
        shard_argument(modules, split, tp_group)
    _register_grad_all_reduces(model, plan, tp_group, shard_specs)
    if tp_group.shards_sequence:
        _shard_sequences(modules, plan, tp_group)
        gather_returned_outputs(model)


class _ModuleSwap:
    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        plan: TensorParallelPlan,
        tp_group: TensorParallelGroup,
        multiple: int,
        parallel_output: bool,
    ) -> None:
        self._modules = modules
        self._tp_group = tp_group
        self._sequence_parallel_prefixes = _sequence_parallel_prefixes(plan, tp_group)
        self._multiple = multiple
        self._parallel_output = parallel_output

    def apply(self, entry: PlannedEntry) -> None:
        module, tp_group, style = self._modules[entry.name], self._tp_group, entry.style
        sizes = local_sizes(entry.blocks, tp_group.size) if entry.blocks else []
        if style in COLUMN_STYLES:
            make_column_parallel(
                module,
                tp_group,
                sizes=sizes,
                gathers_output=style == "colwise_gather_output",
                is_input_gathered=self._is_input_gathered(entry),
                siblings=[self._modules[name] for name in entry.siblings],
            )
        elif style in ROW_STYLES:
            scatters = entry.name.startswith(self._sequence_parallel_prefixes)
            splits_input = style == "rowwise_split_input"
            make_row_parallel(module, tp_group, sizes=sizes, splits_input=splits_input, scatters_sequence=scatters)
        elif style == "vocab":
            num_entries = sum(block.size for block in entry.blocks)
            make_vocab_parallel_embedding(module, tp_group, vocab_size=num_entries, multiple=self._multiple)
        elif style == "vocab_head":
            num_entries = sum(block.size for block in entry.blocks)
            make_vocab_parallel_head(
                module,
                tp_group,
                vocab_size=num_entries,
                multiple=self._multiple,
                gathers_output=not self._parallel_output,
            )
        elif style in ("embedding_colwise", "embedding_colwise_gather_output"):
            make_feature_parallel_embedding(module, tp_group, sizes=sizes, gathers_output=style != "embedding_colwise")
        else:
            self._apply_moe(module, style)

    def _apply_moe(self, module: nn.Module, style: str) -> None:
        if style == "mla_kv_a_proj":
            make_latent_projection(module, self._tp_group, num_rotary=_num_rotary(self._modules[""]))
            return
        makers: dict[str, Callable[[nn.Module, TensorParallelGroup], None]] = {
            "moe_tp_experts": make_sharded_experts,
            "moe_identity_expert": make_identity_expert,
            "all_reduce": make_output_all_reduce,
        }
        if style not in makers:
            raise AssertionError(f"check_plan() let the style {style!r} pass")
        makers[style](module, self._tp_group)

    def _is_input_gathered(self, entry: PlannedEntry) -> bool:
        """Whether the region's hook has already all-gathered the layer's input."""
        return self._tp_group.shards_sequence and entry.region != ""


def _num_rotary(model: nn.Module) -> int:
    """Return how many of a latent projection's features are the keys' rotary ones, from the transformers config."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    number = getattr(text, "qk_rope_head_dim", None)
    if not isinstance(number, int):
        raise ConfigError(
            "the plan uses the style 'mla_kv_a_proj', but the model's config has no qk_rope_head_dim, so the features"
            " that all heads share are unknown: choose another style, or add qk_rope_head_dim to the config"
        )
    return number


def _sequence_parallel_prefixes(plan: TensorParallelPlan, tp_group: TensorParallelGroup) -> tuple[str, ...]:
    """Return the name prefixes of the modules inside stacks, where each rank holds its own tokens."""
    return tuple(f"{name}." for stack in plan.stacks for name in stack) if tp_group.shards_sequence else ()


def _register_grad_all_reduces(
    model: nn.Module,
    plan: TensorParallelPlan,
    tp_group: TensorParallelGroup,
    shard_specs: Mapping[str, Sequence[ShardSpec]],
) -> None:
    """Register the all-reduces of partial gradients; see Note [Partial gradients]."""
    # With a single key-value head every rank holds the full column-parallel layer, but uses it for its own query heads.
    feature_styles = COLUMN_STYLES | {"replicated_with_grad_allreduce"}
    partial = {entry.name for entry in plan.entries if entry.style in feature_styles}
    prefixes = _sequence_parallel_prefixes(plan, tp_group)
    for name, parameter in model.named_parameters():
        rank_specs = shard_specs[name]
        if not rank_specs[0].is_unsharded:
            all_reduce_shared_grad(parameter, rank_specs, tp_group.rank, tp_group.group)
        elif name.rpartition(".")[0] in partial or name in partial or name.startswith(prefixes):
            all_reduce_replicated_grad(parameter, tp_group.group)


def _shard_sequences(modules: Mapping[str, nn.Module], plan: TensorParallelPlan, tp_group: TensorParallelGroup) -> None:
    """Shard the sequence between the layers: Korthikanti et al., "Reducing Activation Recomputation", 2022."""
    for stack in plan.stacks:
        attach_stack([modules[name] for name in stack], TensorAxisSplitter(tp_group))
    layers: dict[str, list[nn.Module]] = {}
    for entry in plan.entries:
        if entry.style in COLUMN_STYLES and entry.region:
            layers.setdefault(entry.region, []).append(modules[entry.name])
    for region, readers in layers.items():
        GatheredRegionInput(tp_group, readers).attach(modules[region])
