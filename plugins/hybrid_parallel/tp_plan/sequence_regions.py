"""Where the tokens of a sequence that is sharded over the tensor-parallel ranks are gathered.

In the modes "split_gather" and "ring" each rank holds some of the tokens of a layer. The module that contains the
column-parallel layers of one input gathers the tokens at its own input, so that its other computation sees all of them.
If that module is a full layer of the stack, which runs on sharded tokens, the column-parallel layer itself gathers.
Keys and values of cross-attention come from the encoder's output, which is unsharded.

The gradients of all modules in a region must be partial: the gradient of a module that all ranks compute redundantly
would be counted once per rank when the gradient of the region's input is reduce-scattered. Blocks of which that is not
known, such as router and experts, or attention without shards, compute all tokens on each rank instead, as without a
sharded sequence. Their gradients are complete on each rank, which takes those of its own tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import nn

from booster.core.layer_stacks import stack_layer_of
from booster.errors import ConfigError

from .attention_heads import owner_of, role_of
from .plan import COLUMN_STYLES, OPEN_STYLES, ROW_STYLES, VOCABULARY_STYLES, Style, generalize

_WITH_REGION = COLUMN_STYLES | {"embedding_colwise"}
# Modules of these styles get replicated inputs, and return replicated outputs.
_OF_ALL_TOKENS = frozenset({"all_reduce", "local_params", "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts"})
_CROSS_ATTENTION = ("cross", "encdec", "encoder_attn", "enc_dec", "encoder_decoder")
_MIXES_TOKENS = ("attention", "attn", "conv", "mamba", "mixer", "ssm", "lstm", "gru", "rnn", "batchnorm", "instance")

_RANDOM_RATES = re.compile("drop|noise|jitter")
_ATTENTION_RATES = re.compile("att.*drop")

Stacks = tuple[tuple[str, ...], ...]


def is_cross_attention(name: str) -> bool:
    """Return whether a module is of cross-attention, by its name."""
    lower = name.lower()
    return any(word in lower for word in _CROSS_ATTENTION) or lower.endswith(".q_attn")


def region_starts(styles: Mapping[str, Style], stacks: Stacks) -> dict[str, str]:
    """Return the module whose input starts the region of each module with a region.

    Args:
        styles: Styles of modules.
        stacks: Names of the layers of each stack.

    Returns:
        Names; "" if the input is never sharded by tokens.
    """
    return {name: _region_of(name, style, stacks) for name, style in styles.items() if style.name in _WITH_REGION}


def _region_of(name: str, style: Style, stacks: Stacks) -> str:
    layer = stack_layer_of(name, stacks)
    if layer is None or style.name in VOCABULARY_STYLES or name == layer:
        return ""
    if is_cross_attention(name) and role_of(name) != "query":
        return ""
    owner = owner_of(name)
    return name if owner == layer else owner


def all_token_blocks(
    model: nn.Module, styles: Mapping[str, Style], regions: Mapping[str, str], stacks: Stacks
) -> dict[str, str]:
    """Return the modules of layers that compute all tokens on each rank, and why.

    Args:
        model: The user's model.
        styles: Styles of modules and bare parameters.
        regions: The result of `region_starts`.
        stacks: Names of the layers of each stack.

    Raises:
        ConfigError: There is no stack, a layer itself computes with experts that need all tokens, or a block draws
            random numbers, which differ between ranks where tokens are sharded.
    """
    if not stacks:
        raise ConfigError(
            "the model has no stack of layers (a ModuleList of modules of one class) in which the sequence could be"
            " sharded: leave enable_sequence_parallelism off"
        )
    blocks = _blocks_of_styles(styles, stacks)
    inside = {region for region in regions.values() if region}
    for name, module in model.named_modules():
        if stack_layer_of(name, stacks) in (None, name) or name in styles or is_within(name, blocks):
            continue
        region = _innermost(name, inside)
        if region and _has_parameters(module):
            if _leaves_open(region, styles, regions):
                raise ConfigError(
                    f"{name!r} is replicated, but computed from the full sequence before sharded layers of {region!r},"
                    " so its gradient would be counted once per rank: use sequence_parallelism_mode='all_to_all', which"
                    " has a separate axis, or a plan that shards it"
                )
            blocks[region] = f"{name.removeprefix(region)[1:] or 'a weight'} is replicated between its sharded layers"
        elif not region and _may_mix_tokens(module, f"{name}.", styles):
            blocks[name] = "it is not sharded, and may mix tokens"
    outermost = {name: reason for name, reason in blocks.items() if not is_within(name.rpartition(".")[0], blocks)}
    for name in outermost:
        _check_draws_nothing(model.get_submodule(name), name)
    return outermost


def _check_draws_nothing(block: nn.Module, name: str) -> None:
    for own_name, module in block.named_modules():
        for key, rate in _random_rates(module).items():
            raise ConfigError(
                f"{f'{name}.{own_name}'.rstrip('.')} draws random numbers ({key}={rate}) for all tokens, which differ"
                " between ranks in sequence parallelism on the tensor-parallel axis: set the rate to 0, or use"
                " sequence_parallelism_mode='all_to_all', which has a separate axis"
            )


def _random_rates(module: nn.Module) -> dict[str, float]:
    """Return the rates above 0 of dropout and noise that a module has, or its attention reads from its config."""
    rates = {key: value for key, value in vars(module).items() if _RANDOM_RATES.search(key)}
    if isinstance(module, nn.modules.dropout._DropoutNd):
        rates["p"] = module.p
    if "config" in vars(module):
        rates |= {f"config.{key}": value for key, value in vars(module.config).items() if _ATTENTION_RATES.search(key)}
    return {key: value for key, value in rates.items() if type(value) in (int, float) and value > 0}


def _blocks_of_styles(styles: Mapping[str, Style], stacks: Stacks) -> dict[str, str]:
    blocks: dict[str, str] = {}
    for name, style in styles.items():
        layer = stack_layer_of(name, stacks)
        if style.name not in _OF_ALL_TOKENS or layer is None:
            continue
        owner = owner_of(name)
        if owner == layer and style.name.startswith("moe_"):
            raise ConfigError(
                f"the plan has {style.name!r} for {name!r}, which the layer itself calls with the experts of all"
                " tokens, but sequence parallelism on the tensor-parallel axis shards a layer's tokens: put router and"
                " experts into a module of their own, or use sequence_parallelism_mode='all_to_all', which has a"
                " separate axis"
            )
        blocks.setdefault(name if owner == layer else owner, f"it has {style.name!r}")
    return blocks


def own_token_modules(
    model: nn.Module,
    styles: Mapping[str, Style],
    regions: Mapping[str, str],
    stacks: Stacks,
    blocks: Collection[str],
) -> list[str]:
    """Return the replicated modules that compute this rank's tokens, whose gradients are partial.

    Args:
        model: The user's model.
        styles: Styles of modules and bare parameters.
        regions: The result of `region_starts`.
        stacks: Names of the layers of each stack.
        blocks: The result of `all_token_blocks`.

    Raises:
        ConfigError: One has a parameter that also computes all tokens.
    """
    inside = {region for region in regions.values() if region}

    def has_own_tokens(name: str) -> bool:
        is_replicated = stack_layer_of(name, stacks) is not None and name not in styles
        return is_replicated and not is_within(name, blocks) and not _innermost(name, inside)

    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    for names in holders.values():
        of_own = [name for name in names if has_own_tokens(name.rpartition(".")[0])]
        of_all = [name for name in names if name not in of_own]
        if of_own and of_all:
            raise ConfigError(
                f"{of_own[0]!r}, which computes a rank's own tokens with a sharded sequence, is also {of_all[0]!r},"
                " which computes all tokens on each rank: the second use's gradient would be added up from all ranks."
                " Give each place a module of its own, or use sequence_parallelism_mode='all_to_all' or 'ring_attn'"
            )
    return [name for name, module in model.named_modules() if _has_parameters(module) and has_own_tokens(name)]


def notes_of_blocks(blocks: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note for the user about each kind of `all_token_blocks`."""
    kinds = {generalize(name): reason for name, reason in blocks.items()}
    return tuple(f"{name} computes all tokens on each rank: {reason}" for name, reason in kinds.items())


def _leaves_open(region: str, styles: Mapping[str, Style], regions: Mapping[str, str]) -> bool:
    """Return whether the output of a region is sharded over features, and reduced by layers outside of it."""
    opens = any(regions.get(name) == region and style.name in OPEN_STYLES for name, style in styles.items())
    return opens and not any(style.name in ROW_STYLES and is_within(name, {region}) for name, style in styles.items())


def is_within(name: str, blocks: Collection[str]) -> bool:
    """Return whether a module is one of the blocks, or in one."""
    return _innermost(name, blocks) != ""


def _innermost(name: str, blocks: Collection[str]) -> str:
    """Return the innermost of the blocks that a module is or is in, or ""."""
    while name and name not in blocks:
        name = name.rpartition(".")[0]
    return name


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _may_mix_tokens(module: nn.Module, prefix: str, styles: Mapping[str, Style]) -> bool:
    """Return whether a module of which nothing is sharded may compute a token from others."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # never called
        return False
    if not any(True for _ in module.parameters()) or any(name.startswith(prefix) for name in styles):
        return False
    return not _is_token_wise(module)


def _is_token_wise(module: nn.Module) -> bool:
    """Return whether a module is known to compute each token by itself, by its class and those of its submodules."""
    kind = type(module).__name__.lower()
    if any(word in kind for word in _MIXES_TOKENS):
        return False
    if children := list(module.children()):
        return all(_is_token_wise(one) for one in children)
    has_parameters = any(True for _ in module.parameters())
    is_known = type(module).__module__.startswith(("torch.nn.modules.", "transformers.activations"))
    return has_parameters or is_known or any(word in kind for word in ("norm", "drop", "activation", "identity"))
