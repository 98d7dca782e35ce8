"""Apply a tensor-parallel plan: swap module forwards, hook parallel regions, reduce partial gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from booster.errors import ConfigError
from booster.interface import ParameterLayout
from booster.plugins.hybrid_parallel.argument_splits import split_argument
from booster.plugins.hybrid_parallel.plans.features import COLUMN_STYLES, ROW_STYLES
from booster.plugins.hybrid_parallel.plans.plan import PlannedEntry, TensorParallelPlan
from booster.plugins.hybrid_parallel.sequence_parallel.recorded_outputs import join_kept_outputs
from booster.plugins.hybrid_parallel.sequence_parallel.splitters import TensorAxisSplitter
from booster.plugins.hybrid_parallel.sequence_parallel.stacks import attach_stack
from booster.plugins.hybrid_parallel.tensor_parallel.embedding import (
    make_feature_embedding,
    make_vocabulary_embedding,
    make_vocabulary_head,
)
from booster.plugins.hybrid_parallel.tensor_parallel.experts import (
    make_identity_expert,
    make_latent_projection,
    make_output_sum,
    make_split_experts,
)
from booster.plugins.hybrid_parallel.tensor_parallel.gradients import sum_shared_gradient, sum_whole_gradient
from booster.plugins.hybrid_parallel.tensor_parallel.linear import make_column_parallel, make_row_parallel
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks
from booster.plugins.hybrid_parallel.tensor_parallel.region_input import RegionInput
from booster.plugins.hybrid_parallel.tensor_parallel.splits import local_sizes

__all__ = ["parallelize"]

_NO_EXCHANGE = frozenset({"replicated", "sequence", "replicated_with_grad_allreduce", "local_params"})


def parallelize(
    model: nn.Module,
    plan: TensorParallelPlan,
    ranks: TensorParallelRanks,
    layouts: Mapping[str, Sequence[ParameterLayout]],
    *,
    vocabulary_multiple: int,
    parallel_output: bool,
) -> None:
    """Make the model's layers compute with this rank's shards, in place. Its parameters are already sharded.

    Args:
        model: The user's model.
        plan: Tensor-parallel style of each module.
        ranks: The tensor-parallel group.
        layouts: Shard specs of each parameter, one per tensor-parallel rank.
        vocabulary_multiple: Multiple to which the vocabulary is padded.
        parallel_output: If True, heads return logits that stay sharded, as `SplitLogits`.

    Raises:
        ConfigError: A module does not support its style.

    Collective: no.
    """
    modules = dict(model.named_modules())
    exchange = _Exchange(modules, plan, ranks, vocabulary_multiple, parallel_output)
    for entry in plan.entries:
        if not entry.is_parameter and entry.style not in _NO_EXCHANGE:
            exchange.apply(entry)
    for change in plan.attributes:
        setattr(modules[change.module], change.attribute, change.local_value(ranks.size, ranks.rank))
    for split in plan.arguments:
        split_argument(modules, split, ranks)
    _sum_gradients(model, plan, ranks, layouts)
    if ranks.splits_sequence:
        _split_sequences(modules, plan, ranks)
        join_kept_outputs(model)


class _Exchange:
    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        plan: TensorParallelPlan,
        ranks: TensorParallelRanks,
        multiple: int,
        parallel_output: bool,
    ) -> None:
        self._modules = modules
        self._ranks = ranks
        self._on_split_tokens = _names_on_split_tokens(plan, ranks)
        self._multiple = multiple
        self._parallel_output = parallel_output

    def apply(self, entry: PlannedEntry) -> None:
        module, ranks, style = self._modules[entry.name], self._ranks, entry.style
        sizes = local_sizes(entry.blocks, ranks.size) if entry.blocks else []
        if style in COLUMN_STYLES:
            make_column_parallel(
                module,
                ranks,
                sizes=sizes,
                gathers_output=style == "colwise_gather_output",
                is_input_gathered=self._is_input_gathered(entry),
                siblings=[self._modules[name] for name in entry.siblings],
            )
        elif style in ROW_STYLES:
            scatters = entry.name.startswith(self._on_split_tokens)
            splits_input = style == "rowwise_split_input"
            make_row_parallel(module, ranks, sizes=sizes, splits_input=splits_input, scatters_sequence=scatters)
        elif style == "vocab":
            num_entries = sum(block.size for block in entry.blocks)
            make_vocabulary_embedding(module, ranks, num_entries=num_entries, multiple=self._multiple)
        elif style == "vocab_head":
            num_entries = sum(block.size for block in entry.blocks)
            make_vocabulary_head(
                module,
                ranks,
                num_entries=num_entries,
                multiple=self._multiple,
                gathers_output=not self._parallel_output,
            )
        elif style in ("embedding_colwise", "embedding_colwise_gather_output"):
            make_feature_embedding(module, ranks, sizes=sizes, gathers_output=style != "embedding_colwise")
        else:
            self._apply_of_experts(module, style)

    def _apply_of_experts(self, module: nn.Module, style: str) -> None:
        if style == "mla_kv_a_proj":
            make_latent_projection(module, self._ranks, num_rotary=_num_rotary(self._modules[""]))
            return
        makers: dict[str, Callable[[nn.Module, TensorParallelRanks], None]] = {
            "moe_tp_experts": make_split_experts,
            "moe_identity_expert": make_identity_expert,
            "all_reduce": make_output_sum,
        }
        if style not in makers:
            raise AssertionError(f"check_plan() let the style {style!r} pass")
        makers[style](module, self._ranks)

    def _is_input_gathered(self, entry: PlannedEntry) -> bool:
        """Whether the region's hook has already all-gathered the layer's input."""
        return self._ranks.splits_sequence and entry.region != ""


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


def _names_on_split_tokens(plan: TensorParallelPlan, ranks: TensorParallelRanks) -> tuple[str, ...]:
    """Return the name prefixes of the modules inside stacks, where each rank holds its own tokens."""
    return tuple(f"{name}." for stack in plan.stacks for name in stack) if ranks.splits_sequence else ()


def _sum_gradients(
    model: nn.Module,
    plan: TensorParallelPlan,
    ranks: TensorParallelRanks,
    layouts: Mapping[str, Sequence[ParameterLayout]],
) -> None:
    """Register the all-reduces of partial gradients; see Note [Partial gradients]."""
    # With a single key-value head every rank holds the full column-parallel layer, but uses it for its own query heads.
    of_features = COLUMN_STYLES | {"replicated_with_grad_allreduce"}
    partial = {entry.name for entry in plan.entries if entry.style in of_features}
    on_split_tokens = _names_on_split_tokens(plan, ranks)
    for name, parameter in model.named_parameters():
        of_ranks = layouts[name]
        if not of_ranks[0].is_whole:
            sum_shared_gradient(parameter, of_ranks, ranks.rank, ranks.group)
        elif name.rpartition(".")[0] in partial or name in partial or name.startswith(on_split_tokens):
            sum_whole_gradient(parameter, ranks.group)


def _split_sequences(modules: Mapping[str, nn.Module], plan: TensorParallelPlan, ranks: TensorParallelRanks) -> None:
    """Shard the sequence between the layers: Korthikanti et al., "Reducing Activation Recomputation", 2022."""
    for stack in plan.stacks:
        attach_stack([modules[name] for name in stack], TensorAxisSplitter(ranks))
    layers: dict[str, list[nn.Module]] = {}
    for entry in plan.entries:
        if entry.style in COLUMN_STYLES and entry.region:
            layers.setdefault(entry.region, []).append(modules[entry.name])
    for region, readers in layers.items():
        RegionInput(ranks, readers).attach(modules[region])
