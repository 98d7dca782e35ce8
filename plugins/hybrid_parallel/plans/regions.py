"""Parallel regions of a plan, modules with a common input, and requirements of a sharded sequence.

In the modes that shard the sequence over the tensor-parallel ranks, each rank holds some of the tokens between regions.
The module that contains the column-parallel layers of one input gathers the tokens at its own input, so that its other
computation sees all of them. If that module is a full layer of the stack, which runs on sharded tokens, the
column-parallel layer itself gathers. Keys and values of cross-attention come from the encoder's output, which is
unsharded. The gradients of all modules in a region must be partial: the gradient of a module that all ranks compute
redundantly would be counted once per rank when the gradient of the region's input is reduce-scattered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.plans.features import COLUMN_STYLES, ROW_STYLES, feature_sizes
from booster.plugins.hybrid_parallel.plans.heads import owner_of, role_of
from booster.plugins.hybrid_parallel.plans.plan import Style
from booster.plugins.hybrid_parallel.plans.stacks import stack_layer_of
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear

__all__ = ["TENSOR_AXIS_MODES", "find_siblings", "region_of", "sequence_parallel_modules"]

TENSOR_AXIS_MODES = frozenset({"split_gather", "ring"})
"""Modes in which the sequence between regions is sharded over the tensor-parallel ranks."""

_CROSS_ATTENTION = ("cross", "encdec", "encoder_attn", "enc_dec", "encoder_decoder")
_LATENT = ("q_b_proj", "kv_b_proj")  # multi-head latent attention: each has its own input
_VOCABULARY_STYLES = frozenset({"vocab_head", "vocab"})
_IN_REGION = COLUMN_STYLES | ROW_STYLES | {"replicated_with_grad_allreduce", "embedding_colwise"}
_MIXES_TOKENS = ("attention", "attn", "conv", "mamba", "mixer", "ssm", "lstm", "gru", "rnn", "batchnorm")


def find_siblings(
    model: nn.Module, styles: Mapping[str, Style], known: tuple[tuple[str, ...], ...] = ()
) -> dict[str, tuple[str, ...]]:
    """Return for each column-parallel layer the layers that read the same input, including itself.

    Args:
        model: The user's model.
        styles: Styles of modules and bare parameters, by name.
        known: Groups that are already known.
    """
    found = {name: group for group in known for name in group}
    groups: dict[tuple[str, str, int], list[str]] = {}
    for name, style in styles.items():
        module = _module(model, name)
        if style.name in COLUMN_STYLES and module is not None and is_linear(module) and name not in found:
            groups.setdefault(_input_key(name, module), []).append(name)
    return found | {name: tuple(names) for names in groups.values() for name in names}


def region_of(name: str, style: Style, stacks: tuple[tuple[str, ...], ...]) -> str:
    """Return the module whose input starts a module's region, or "" if the input is never sharded by tokens."""
    layer = stack_layer_of(name, stacks)
    if layer is None or style.name in _VOCABULARY_STYLES or name == layer:
        return ""
    if is_cross_attention(name) and role_of(name) != "query":
        return ""
    owner = owner_of(name)
    return name if owner == layer else owner


def is_cross_attention(name: str) -> bool:
    """Whether a module belongs to a cross-attention."""
    lower = name.lower()
    return any(word in lower for word in _CROSS_ATTENTION) or lower.endswith(".q_attn")


def sequence_parallel_modules(
    model: nn.Module,
    styles: Mapping[str, Style],
    regions: Mapping[str, str],
    stacks: tuple[tuple[str, ...], ...],
) -> list[str]:
    """Return the modules whose parameters run on sharded tokens.

    Raises:
        ConfigError: A module in a stack would see a rank's tokens only although it needs all, or the gradient of a
            module in a region would be wrong.
    """
    if not stacks:
        raise ConfigError(
            "the model has no stack of layers (a ModuleList of modules of one class) in which the sequence could be"
            " sharded: leave enable_sequence_parallelism off"
        )
    inside = {region for region in regions.values() if region}
    found = []
    for name, module in model.named_modules():
        if stack_layer_of(name, stacks) is None or name in styles:
            _check_style(name, styles)
            continue
        region = next((one for one in _ancestors(name) if one in inside), None)
        has_parameters = any(True for _ in module.parameters(recurse=False))
        if region is not None and has_parameters:
            raise ConfigError(
                f"{name!r} is replicated, but computed between sharded layers of {region!r} from the full sequence, so"
                " its gradient would be counted once per rank: use sequence_parallelism_mode='all_to_all', which has a"
                " separate axis, or a plan that shards it"
            )
        if region is None and _needs_all_tokens(name, module, inside):
            raise ConfigError(
                f"{name!r} mixes tokens, but the plan does not shard it, so it would see only its rank's tokens: use"
                " sequence_parallelism_mode='all_to_all', which has a separate axis, or a plan that shards it"
            )
        if region is None and has_parameters:
            found.append(name)
    return found


def _check_style(name: str, styles: Mapping[str, Style]) -> None:
    style = styles.get(name)
    if style is not None and style.name.startswith(("moe_", "mla_", "local_params", "all_reduce")):
        raise ConfigError(
            f"the plan has {style.name!r} for {name!r}, which needs the full sequence and does not support sequence"
            " parallelism on the tensor-parallel axis: use sequence_parallelism_mode='all_to_all', which has a separate"
            " axis, or none"
        )


def _needs_all_tokens(name: str, module: nn.Module, regions: set[str]) -> bool:
    kind = f"{type(module).__name__} {name.rpartition('.')[2]}".lower()
    if "norm" in kind.partition(" ")[0] and "batchnorm" not in kind:
        return False
    has_region = any(region == name or region.startswith(f"{name}.") for region in regions)
    has_parameters = any(True for _ in module.parameters())
    return has_parameters and not has_region and not is_linear(module) and any(word in kind for word in _MIXES_TOKENS)


def _input_key(name: str, module: nn.Module) -> tuple[str, str, int]:
    leaf = name.rpartition(".")[2]
    source = leaf if leaf in _LATENT else ""
    if is_cross_attention(name):
        source = "query" if role_of(name) == "query" else "memory"
    return owner_of(name), source, feature_sizes(module)[0]


def _ancestors(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
