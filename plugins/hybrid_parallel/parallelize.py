"""Apply a tensor-parallel plan: swap module forwards, hook parallel regions, reduce partial gradients."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import all_reduce_sum, sum_dtype
from booster.core.layer_stacks import stack_layer_of
from booster.errors import ConfigError
from booster.interface import ShardSpec
from booster.plugins.base import taking_hooks

from .sequence_parallel.between_layers import attach_to_model
from .sequence_parallel.layer_context import is_in_backward
from .sequence_parallel.layer_stack import attach_stack, run_on_all_tokens
from .sequence_parallel.recorded_outputs import gather_returned_outputs
from .sequence_parallel.splitters import SequenceSplitter, TensorAxisSplitter
from .tensor_parallel.dora import make_parallel_dora
from .tensor_parallel.embedding import (
    make_feature_parallel_embedding,
    make_vocab_parallel_embedding,
    make_vocab_parallel_head,
)
from .tensor_parallel.group import TensorParallelGroup
from .tensor_parallel.linear import make_column_parallel, make_row_parallel
from .tensor_parallel.mappings import sum_over
from .tensor_parallel.moe import (
    make_identity_expert,
    make_latent_projection,
    make_output_all_reduce,
    make_sharded_experts,
)
from .tensor_parallel.random_functions import make_dropout
from .tensor_parallel.region_input import GatheredRegionInput
from .tensor_parallel.shard_spec import local_sizes, units_of_rank
from .tensor_parallel_nd.feature_reductions import divide_features
from .tensor_parallel_nd.grid import TensorGrid
from .tensor_parallel_nd.linear import make_grid_linear
from .tensor_parallel_nd.plan import FEATURE_WISE, is_on_grid
from .tensor_parallel_nd.stack import attach_grid_stack, take_own_examples
from .tp_plan.attention_heads import owner_of
from .tp_plan.plan import (
    CLOSING_STYLES,
    COLUMN_STYLES,
    FEATURE_STYLES,
    OPEN_STYLES,
    ROW_STYLES,
    PlannedEntry,
    ShardedArgument,
    TensorParallelPlan,
)
from .tp_plan.sequence_regions import is_cross_attention


def _take_local_heads(
    split: ShardedArgument, position: int, heads: slice, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook that narrows a dimension in which units vary fastest, such as (batch * heads, ...)."""
    is_positional = len(args) > position
    value = args[position] if is_positional else kwargs.get(split.argument)
    if not isinstance(value, torch.Tensor):
        return args, kwargs
    # A 3-d argument has batch and heads in one dimension, a 4-d one has them separate.
    dim = 1 if split.dim == 0 and value.dim() == 4 else split.dim
    if value.shape[dim] % split.block.num_units:
        return args, kwargs  # a mask that is the same for all heads
    units = value.unflatten(dim, (-1, split.block.num_units))
    own = _narrow(units, dim + 1, heads).flatten(dim, dim + 1)
    if is_positional:
        return (*args[:position], own, *args[position + 1 :]), kwargs
    return args, {**kwargs, split.argument: own}


# Note [Partial gradients]
# A replicated parameter gets the same gradient on all ranks if its input and the gradient of its output are equal on
# all. Otherwise (norms of a rank's own heads or tokens, key-value heads that several ranks read) each rank computes a
# partial gradient, which a tensor hook all-reduces as soon as autograd has computed it.


def all_reduce_replicated_grad(parameter: nn.Parameter, group: dist.ProcessGroup | None) -> None:
    """All-reduce the gradient of a parameter that is replicated on a group, in every backward.

    Collective: no; every backward is, over the group.
    """
    _register_hook(parameter, partial(_all_reduced, group))


def _register_hook(parameter: nn.Parameter, hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Register a gradient hook on a parameter, also on a frozen one, which may train later."""
    if parameter.is_floating_point() or parameter.is_complex():
        with taking_hooks(parameter):
            parameter.register_hook(hook)


def _all_reduced(group: dist.ProcessGroup | None, gradient: torch.Tensor) -> torch.Tensor:
    return sum_over(gradient, group).to(gradient.dtype)


SlicePairs = list[tuple[slice, slice]]


def _shared_slices(shard_specs: Sequence[ShardSpec], rank: int) -> tuple[int, int, SlicePairs] | None:
    """Find the elements of this rank's shard that other ranks hold as well.

    Returns:
        The sharded dimension, its total shared length, and pairs of slices of this rank's shard and of the all-reduced
        buffer; None if no elements are shared.
    """
    non_primary = [
        region.logical for shard_spec in shard_specs for region in shard_spec.regions if not region.is_primary
    ]
    if not non_primary:
        return None
    shape = shard_specs[0].logical_shape
    dim = next(dim for dim, size in enumerate(shape) if any(box[dim] != (0, size) for box in non_primary))
    starts: dict[tuple[int, int], int] = {}
    total = 0
    for offset, length in sorted({box[dim] for box in non_primary}):
        starts[offset, length], total = total, total + length
    slices: SlicePairs = []
    for region in shard_specs[rank].regions:
        (local, _), (logical, size) = region.local[dim], region.logical[dim]
        for (offset, length), start in starts.items():
            if logical <= offset and offset + length <= logical + size:
                position = local + offset - logical
                slices.append((slice(position, position + length), slice(start, start + length)))
    return dim, total, slices


def _all_reduced_slices(
    dim: int, length: int, slices: SlicePairs, group: dist.ProcessGroup | None, gradient: torch.Tensor
) -> torch.Tensor:
    shape = [*gradient.shape[:dim], length, *gradient.shape[dim + 1 :]]
    shared = torch.zeros(shape, dtype=sum_dtype(gradient.dtype), device=gradient.device)
    for local, position in slices:
        _narrow(shared, dim, position).copy_(_narrow(gradient, dim, local))
    all_reduce_sum(shared, group)
    result = gradient.clone()
    for local, position in slices:
        _narrow(result, dim, local).copy_(_narrow(shared, dim, position))
    return result


def _narrow(tensor: torch.Tensor, dim: int, span: slice) -> torch.Tensor:
    return tensor.narrow(dim, span.start, span.stop - span.start)


class _RegionWatch:
    """Hooks of a module on sharded features, which raise where it is called outside of its regions.

    There it gets all features, so that all ranks have the whole gradient of that use, and would add it up.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._depth = 0  # of running regions

    def attach(self, module: nn.Module, regions: Sequence[nn.Module]) -> None:
        """Register the hooks. Collective: no."""
        module.register_forward_pre_hook(self._check)
        for region in regions:
            region.register_forward_pre_hook(self._enter)
            region.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: object) -> None:
        self._depth += 1

    def _leave(self, *_: object) -> None:
        self._depth -= 1

    def _check(self, *_: object) -> None:
        if self._depth == 0 and torch.is_grad_enabled() and not is_in_backward():  # where it may be recomputed alone
            raise ConfigError(
                f"{self._name!r}, which is used on sharded features, was called from outside of the module that shards"
                " them, on all features: tensor parallelism would add up this use's gradient from all ranks. Give each"
                " place a module of its own, or a plan={'pattern of module names': style, ...} that leaves these"
                " layers whole"
            )


def _watch_regions(model: nn.Module, plan: TensorParallelPlan) -> None:
    """Watch the calls of modules with parameters of which each rank has a part of the gradient, in a derived plan."""
    columns = [entry.name for entry in plan.entries if entry.style in COLUMN_STYLES]
    watched: dict[int, tuple[str, list[nn.Module]]] = {}
    for entry in plan.entries:
        if entry.style != "replicated_with_grad_allreduce" or entry.is_parameter:
            continue
        region = owner_of(entry.name)
        while region and not any(name.startswith(f"{region}.") for name in columns):
            region = owner_of(region)
        _, regions = watched.setdefault(id(model.get_submodule(entry.name)), (entry.name, []))
        regions.append(model.get_submodule(region))
    for name, regions in watched.values():
        _RegionWatch(name).attach(model.get_submodule(name), list(dict.fromkeys(regions)))


_UNSWAPPED_STYLES = frozenset({"replicated", "sequence", "replicated_with_grad_allreduce", "local_params"})


def parallelize(
    model: nn.Module,
    plan: TensorParallelPlan,
    tp_group: TensorParallelGroup,
    shard_specs: Mapping[str, Sequence[ShardSpec]],
    *,
    vocabulary_multiple: int,
    parallel_output: bool,
    grid: TensorGrid | None = None,
) -> None:
    """Make the model's layers compute with this rank's shards, in place. Its parameters are already sharded.

    Args:
        model: The user's model.
        plan: Tensor-parallel style of each module.
        tp_group: The tensor-parallel group.
        shard_specs: Shard specs of each parameter, one per tensor-parallel rank.
        vocabulary_multiple: Multiple to which the vocabulary is padded.
        parallel_output: If True, heads return logits that stay sharded, as `VocabParallelLogits`.
        grid: Grid of the ranks, optional.

    Raises:
        ConfigError: A module does not support its style.

    Collective: no.
    """
    modules = dict(model.named_modules())
    # Name prefixes of the modules inside stacks, where each rank holds its own tokens.
    prefixes = tuple(f"{name}." for stack in plan.stacks for name in stack) if tp_group.shards_sequence else ()
    of_all_tokens = tuple(f"{name}." for name in plan.all_token_blocks)
    for entry in plan.entries:
        if grid is not None and is_on_grid(entry):
            _put_on_grid(modules[entry.name], entry, plan, grid)
        elif not entry.is_parameter and entry.style not in _UNSWAPPED_STYLES:
            scatters = entry.name.startswith(prefixes) and not f"{entry.name}.".startswith(of_all_tokens)
            _swap_forward(entry, modules, tp_group, vocabulary_multiple, gathers=not parallel_output, scatters=scatters)
    num_shards, index = tp_group.size, tp_group.rank
    if grid is not None:
        num_shards, index = grid.side, grid.coordinates[grid.shape.inner.features]
    for change in plan.attributes:
        change.apply(model, num_shards, index)
    for split in plan.arguments:  # such as Bloom's position biases
        held, module = units_of_rank(split.block, num_shards, index), modules[split.module]
        position = list(inspect.signature(module.forward).parameters).index(split.argument)
        hook = partial(_take_local_heads, split, position, slice(held.start, held.stop))
        module.register_forward_pre_hook(hook, with_kwargs=True)
    if grid is not None:
        _reduce_grads_on_grid(model, plan, grid)
        _divide_stacks(modules, plan, grid)
        return
    if plan.is_derived:
        _watch_regions(model, plan)
    replicas = [name for name, _ in model.named_parameters() if name.startswith(prefixes)]
    on_own_tokens = frozenset(name for name in replicas if not name.startswith(of_all_tokens))
    _register_grad_all_reduces(model, plan, tp_group, shard_specs, on_own_tokens)
    if tp_group.shards_sequence:
        # Korthikanti et al., "Reducing Activation Recomputation", 2022
        attach_stacks(model, plan, TensorAxisSplitter(tp_group))
        readers: dict[str, list[nn.Module]] = {}
        for entry in plan.entries:
            if entry.style in COLUMN_STYLES and entry.region and entry.reads_region:
                readers.setdefault(entry.region, []).append(modules[entry.name])
        for region, layers in readers.items():
            others = _other_states(modules[region]) if not is_cross_attention(region) else ()
            GatheredRegionInput(tp_group, layers, others=others).attach(modules[region])
        for name in plan.all_token_blocks:
            run_on_all_tokens(modules[name], name, tp_group)


def leave_fused_layers(model: nn.Module) -> None:
    """Have torch's encoder layers call their layers in evaluation, too, instead of one operator that reads weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # "other", for which there is no fused operator
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # which only that operator takes


def _other_states(region: nn.Module) -> frozenset[str | int]:
    """Return the positions and names of the arguments that are states of another sequence, such as an encoder's.

    Layers of cross-attention that read them are in no region, and copy them.
    """
    names = list(inspect.signature(region.forward).parameters)
    found = [name for name in names if re.search("encoder|memory|cross", name) and "mask" not in name]
    return frozenset(found) | frozenset(map(names.index, found))


def attach_stacks(model: nn.Module, plan: TensorParallelPlan, splitter: SequenceSplitter) -> None:
    """Make the layers of a plan's stacks run on sharded hidden states, in place. Collective: no."""
    layers = [[model.get_submodule(name) for name in stack] for stack in plan.stacks]
    stacks = [
        attach_stack(
            modules,
            splitter,
            begins_sharded=any(after == stack[0] for _, after in plan.handovers),
            ends_sharded=any(before == stack[-1] for before, _ in plan.handovers),
        )
        for stack, modules in zip(plan.stacks, layers, strict=True)
    ]
    attach_to_model(model, stacks, [layer for modules in layers for layer in modules])


def _put_on_grid(module: nn.Module, entry: PlannedEntry, plan: TensorParallelPlan, grid: TensorGrid) -> None:
    if entry.style == FEATURE_WISE:
        divide_features(module, entry.name, grid, "module")
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = module.weight.shape[1]
    else:
        is_alone = stack_layer_of(entry.name, plan.divided_stacks) is None
        make_grid_linear(module, grid, is_second=entry.style in CLOSING_STYLES, is_alone=is_alone)


def _reduce_grads_on_grid(model: nn.Module, plan: TensorParallelPlan, grid: TensorGrid) -> None:
    """Register the all-reduces of the gradients of what several ranks of a grid hold; see Note [Partial gradients].

    Biases and feature-wise parameters are held by the ranks that differ in their examples only. The gradients of
    weights are complete.
    """
    shape = grid.shape
    styles = {entry.name: entry.style for entry in plan.entries}
    for name, parameter in model.named_parameters():
        owner, _, own_name = name.rpartition(".")
        style = styles.get(name) or styles.get(owner)
        if style == "replicated_with_grad_allreduce":
            all_reduce_replicated_grad(parameter, grid.tp_group.group)
        elif style == FEATURE_WISE or (style in CLOSING_STYLES and own_name == "bias"):
            all_reduce_replicated_grad(parameter, grid.group(*shape.outer.batch))
        elif style == "embedding_colwise" or (style in OPEN_STYLES and own_name == "bias"):
            all_reduce_replicated_grad(parameter, grid.group(*shape.inner.batch))


def _divide_stacks(modules: Mapping[str, nn.Module], plan: TensorParallelPlan, grid: TensorGrid) -> None:
    regions = {
        owner_of(entry.name)
        for entry in plan.entries
        if entry.style in OPEN_STYLES and stack_layer_of(entry.name, plan.stacks) is not None
    }
    layers = {name for stack in plan.divided_stacks for name in stack}
    for stack in plan.divided_stacks:
        for name in stack:
            divide_features(modules[name], name, grid, "layer")
        attach_grid_stack([modules[name] for name in stack], grid)
    heads: dict[str, dict[str, int]] = {}
    for split in plan.arguments:
        heads.setdefault(split.module, {})[split.argument] = split.block.num_units // grid.side
    if grid.shape.inner == grid.shape.outer:  # otherwise layers can't know which one of both reads an argument
        regions |= layers
    for region in sorted(regions):
        is_divided = stack_layer_of(region, plan.divided_stacks) is not None
        if is_divided:
            take_own_examples(modules[region], grid, heads.get(region, {}))
        if grid.shape.mode == "3d" and is_divided and region not in layers:
            divide_features(modules[region], region, grid, "region")
    modules[""].register_forward_hook(gather_returned_outputs)


def _swap_forward(
    entry: PlannedEntry,
    modules: Mapping[str, nn.Module],
    tp_group: TensorParallelGroup,
    multiple: int,
    *,
    gathers: bool,
    scatters: bool,
) -> None:
    """Swap the forward of an entry's module; `gathers` is for heads, `scatters` for stacks with a sharded sequence."""
    module, style = modules[entry.name], entry.style
    sizes = local_sizes(entry.blocks, tp_group.size) if entry.blocks else []
    num_entries = sum(block.size for block in entry.blocks)  # of a vocabulary
    if style in COLUMN_STYLES:
        make_column_parallel(
            module,
            tp_group,
            sizes=sizes,
            gathers_output=style == "colwise_gather_output",
            is_input_gathered=tp_group.shards_sequence and entry.region != "",  # by the hook of its region
            siblings=[modules[name] for name in entry.siblings],
        )
    elif style in ROW_STYLES:
        splits_input = style == "rowwise_split_input"
        make_row_parallel(module, tp_group, sizes=sizes, splits_input=splits_input, scatters_sequence=scatters)
    elif style == "vocab":
        make_vocab_parallel_embedding(module, tp_group, vocab_size=num_entries, multiple=multiple)
    elif style == "vocab_head":
        make_vocab_parallel_head(module, tp_group, vocab_size=num_entries, multiple=multiple, gathers_output=gathers)
    elif style in FEATURE_STYLES:
        make_feature_parallel_embedding(module, tp_group, sizes=sizes, gathers_output=style != "embedding_colwise")
    elif style == "mla_kv_a_proj":
        make_latent_projection(module, tp_group, num_rotary=_num_rotary(modules[""]))
    elif style == "dora":  # after the layer, whose entry comes first
        owner = entry.name.partition(".lora_magnitude_vector.")[0]
        make_parallel_dora(module, modules[f"{owner}.base_layer"])
    else:
        _MAKERS[style](module, tp_group)


_MAKERS: Mapping[str, Callable[[nn.Module, TensorParallelGroup], None]] = {
    "replicated_dropout": partial(make_dropout, is_sharded=False),
    "sharded_dropout": partial(make_dropout, is_sharded=True),
    "moe_tp_experts": make_sharded_experts,
    "moe_identity_expert": make_identity_expert,
    "all_reduce": make_output_all_reduce,
}


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


def _register_grad_all_reduces(
    model: nn.Module,
    plan: TensorParallelPlan,
    tp_group: TensorParallelGroup,
    shard_specs: Mapping[str, Sequence[ShardSpec]],
    on_own_tokens: frozenset[str],
) -> None:
    # With a single key-value head every rank holds the full column-parallel layer, but uses it for its own query heads.
    feature_styles = COLUMN_STYLES | {"replicated_with_grad_allreduce"}
    partial_names = {entry.name for entry in plan.entries if entry.style in feature_styles}
    for name, parameter in model.named_parameters():
        rank_specs = shard_specs[name]
        if not rank_specs[0].is_unsharded:
            slices = _shared_slices(rank_specs, tp_group.rank)
            if slices is not None:
                _register_hook(parameter, partial(_all_reduced_slices, *slices, tp_group.group))
        elif name.rpartition(".")[0] in partial_names or name in partial_names or name in on_own_tokens:
            all_reduce_replicated_grad(parameter, tp_group.group)
