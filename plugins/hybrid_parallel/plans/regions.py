"""Where parallel regions begin, which modules share an input, and what a split sequence asks of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.plans.features import COLUMN_STYLES, ROW_STYLES, feature_sizes
from booster.plugins.hybrid_parallel.plans.heads import owner_of, role_of
from booster.plugins.hybrid_parallel.plans.plan import Style
from booster.plugins.hybrid_parallel.plans.stacks import stack_layer_of
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear

__all__ = ["TENSOR_AXIS_MODES", "find_siblings", "modules_on_split_sequence", "region_of"]

TENSOR_AXIS_MODES = frozenset({"split_gather", "ring"})
"""Modes in which the sequence between regions is split over the tensor-parallel ranks."""

_CROSS_ATTENTION = ("cross", "encdec", "encoder_attn", "enc_dec", "encoder_decoder")
_LATENT = ("q_b_proj", "kv_b_proj")  # multi-head latent attention: each has an input of its own
_ALONE = frozenset({"vocab_head", "vocab"})
_IN_REGION = COLUMN_STYLES | ROW_STYLES | {"replicated_with_grad_allreduce", "embedding_colwise"}
_MIXES_TOKENS = ("attention", "attn", "conv", "mamba", "mixer", "ssm", "lstm", "gru", "rnn", "batchnorm")

# Note [Split sequences and regions]
# In the modes that split the sequence over the tensor-parallel ranks, each rank has some of the tokens between regions.
# The module that holds the column-parallel layers of one input gathers the tokens at its own input, so that what it
# does before (or beside) these layers sees all of them. Where that module is a whole layer of the stack, which must see
# few tokens, the column-parallel layer itself gathers. Keys and values of cross-attention come from the encoder's
# output, which is whole. A module in a region must be one whose gradients the plan accounts for: one that is computed
# alike on all ranks would have its gradient counted once per rank when the region's input is scattered again.


def find_siblings(
    model: nn.Module, styles: Mapping[str, Style], known: tuple[tuple[str, ...], ...] = ()
) -> dict[str, tuple[str, ...]]:
    """Returns which column-parallel layers read the same input, for each of them, itself included.

    Args:
        model: The user's.
        styles: Of modules and bare parameters, by name.
        known: Such groups, where they are known already.
    """
    found = {name: group for group in known for name in group}
    groups: dict[tuple[str, str, int], list[str]] = {}
    for name, style in styles.items():
        module = _module(model, name)
        if style.name in COLUMN_STYLES and module is not None and is_linear(module) and name not in found:
            groups.setdefault(_input_of(name, module), []).append(name)
    return found | {name: tuple(names) for names in groups.values() for name in names}


def region_of(name: str, style: Style, stacks: tuple[tuple[str, ...], ...]) -> str:
    """Returns the name of the module at whose input a module's region begins; "": no split sequence reaches it."""
    layer = stack_layer_of(name, stacks)
    if layer is None or style.name in _ALONE or name == layer:
        return ""
    if is_cross_attention(name) and role_of(name) != "query":
        return ""
    owner = owner_of(name)
    return name if owner == layer else owner


def is_cross_attention(name: str) -> bool:
    """Returns whether a module belongs to an attention that reads keys and values from another sequence."""
    lower = name.lower()
    return any(word in lower for word in _CROSS_ATTENTION) or lower.endswith(".q_attn")


def modules_on_split_sequence(
    model: nn.Module,
    styles: Mapping[str, Style],
    regions: Mapping[str, str],
    stacks: tuple[tuple[str, ...], ...],
) -> list[str]:
    """Returns the modules whose parameters work on this rank's tokens only, where the sequence is split.

    Raises:
        ConfigError: A module in a stack would see only some of the tokens though it needs all, or in a region its
            gradient would be wrong.
    """
    if not stacks:
        raise ConfigError(
            "the model has no stack of layers (a ModuleList of modules of one class), so that there is nothing to split"
            " the sequence in: leave enable_sequence_parallelism off"
        )
    inside = {region for region in regions.values() if region}
    found = []
    for name, module in model.named_modules():
        if stack_layer_of(name, stacks) is None or name in styles:
            _check_style(name, styles)
            continue
        region = next((one for one in _ancestors(name) if one in inside), None)
        holds = any(True for _ in module.parameters(recurse=False))
        if region is not None and holds:
            raise ConfigError(
                f"{name!r} is replicated, and computed between split layers of {region!r} from the whole sequence: its"
                " gradient would count once per rank. Use sequence_parallelism_mode='all_to_all' with an axis of its"
                " own, or a plan that splits it"
            )
        if region is None and _needs_all_tokens(name, module, inside):
            raise ConfigError(
                f"{name!r} mixes tokens, but the plan does not split it, so that it would see only its rank's tokens:"
                " use sequence_parallelism_mode='all_to_all' with an axis of its own, or a plan that splits it"
            )
        if region is None and holds:
            found.append(name)
    return found


def _check_style(name: str, styles: Mapping[str, Style]) -> None:
    style = styles.get(name)
    if style is not None and style.name.startswith(("moe_", "mla_", "local_params", "all_reduce")):
        raise ConfigError(
            f"the plan has {style.name!r} for {name!r}, which needs the whole sequence: sequence parallelism on the"
            " tensor-parallel axis can't be used with it. Use sequence_parallelism_mode='all_to_all' with an axis of"
            " its own, or none"
        )


def _needs_all_tokens(name: str, module: nn.Module, regions: set[str]) -> bool:
    kind = f"{type(module).__name__} {name.rpartition('.')[2]}".lower()
    if "norm" in kind.partition(" ")[0] and "batchnorm" not in kind:
        return False
    has_region = any(region == name or region.startswith(f"{name}.") for region in regions)
    holds = any(True for _ in module.parameters())
    return holds and not has_region and not is_linear(module) and any(word in kind for word in _MIXES_TOKENS)


def _input_of(name: str, module: nn.Module) -> tuple[str, str, int]:
    """Returns what tells apart the inputs of a module's column-parallel layers."""
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
