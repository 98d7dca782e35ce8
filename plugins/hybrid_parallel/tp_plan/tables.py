"""Built-in plans of models that transformers has no plan for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block

from .plan import PartialPlan, ShardedArgument, Style, match_names, matches, read_style

_EXPERT_PARALLEL = frozenset({"grouped_gemm", "ep_dispatch_experts", "ep_router"})


def pretrained_models(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the outermost transformers models in a model: name, module and configuration."""
    config = getattr(model, "config", None)
    if hasattr(type(model), "base_model_prefix") and hasattr(config, "model_type"):  # peft's models forward attributes
        yield name, model, config
        return
    for key, child in model.named_children():
        yield from pretrained_models(child, f"{name}.{key}" if name else key)


def transformers_plan(model: nn.Module) -> PartialPlan | None:
    """Return the plan of the transformers models in a model, or None if they have none."""
    found: dict[str, Style] = {}
    sources = []
    for name, module, config in pretrained_models(model):
        given: dict[str, str] = getattr(module, "_tp_plan", None) or {}
        plan = {key: read_style(key, style) for key, style in given.items() if style not in _EXPERT_PARALLEL}
        names = [key for key, _ in module.named_modules()] + [key for key, _ in module.named_parameters()]
        styles, _ = match_names(plan, names)  # patterns without a match belong to other models of the family
        if not any(style.name.startswith(("colwise", "packed_colwise", "moe_")) for style in styles.values()):
            continue
        found.update({f"{name}.{key}" if name else key: style for key, style in styles.items()})
        sources.append(f"{type(module).__name__} ({config.model_type})")
    if not found:
        return None
    return PartialPlan(styles=found, source=f"transformers' own plan of {', '.join(sources)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """The plan of a family of models, with and without a head.

    A table only has styles: attentions are recognized by name (see Note [Attention heads]), and size attributes
    such as `num_heads` are found in the models' code (see `head_attributes`).

    Attributes:
        plan: Styles by pattern of module names, relative to the base model.
        heads: Names of the layers that compute logits, relative to the full model.
        arguments: Arguments with a value per head by pattern of modules: name, and dimension of the heads.
        customize: Function of the configuration that returns styles to add or replace, optional.
    """

    plan: Mapping[str, str]
    heads: tuple[str, ...] = ("lm_head",)
    arguments: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    customize: Callable[[Any], Mapping[str, str]] | None = None


def _falcon(config: Any) -> Mapping[str, str]:
    """Multi-query Falcon has all queries, then one key and value; others have the heads of each group consecutive."""
    is_multi_query = config.multi_query and not config.new_decoder_architecture
    return {"h.*.self_attention.query_key_value": "packed_colwise" if is_multi_query else "colwise"}


def _bloom(config: Any) -> Mapping[str, str]:
    if config.pretraining_tp > 1 and config.slow_but_exact:
        raise ConfigError(
            "this Bloom has pretraining_tp > 1 with slow_but_exact, which slices weights by their unsharded size: set"
            " slow_but_exact=False in its configuration to use tensor parallelism"
        )
    return {}


_BERT = PlanTable(
    plan={
        **{f"encoder.layer.*.{kind}.self.{name}": "colwise" for kind in ("attention", "crossattention")
           for name in ("query", "key", "value")},
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.crossattention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    },
    heads=("cls.predictions.decoder", "lm_head.decoder", "generator_lm_head"),
)  # fmt: skip

_GPT2 = PlanTable(
    plan={
        "h.*.attn.c_attn": "packed_colwise:3",
        "h.*.attn.c_proj": "rowwise",
        "h.*.crossattention.c_attn": "packed_colwise:2",
        "h.*.crossattention.q_attn": "colwise",
        "h.*.crossattention.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }
)

_OPT = PlanTable(
    plan={
        **{f"decoder.layers.*.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
    }
)

_T5 = PlanTable(
    plan={
        **{f"{side}.block.*.layer.*.{kind}.{name}": "colwise" for side in ("encoder", "decoder")
           for kind in ("SelfAttention", "EncDecAttention") for name in ("q", "k", "v")},
        **{f"{side}.block.*.layer.*.{kind}.o": "rowwise" for side in ("encoder", "decoder")
           for kind in ("SelfAttention", "EncDecAttention")},
        **{f"{side}.block.*.layer.*.SelfAttention.relative_attention_bias": "embedding_colwise"
           for side in ("encoder", "decoder")},
        **{f"{side}.block.*.layer.*.DenseReluDense.{name}": "colwise" for side in ("encoder", "decoder")
           for name in ("wi", "wi_0", "wi_1")},
        **{f"{side}.block.*.layer.*.DenseReluDense.wo": "rowwise" for side in ("encoder", "decoder")},
    }
)  # fmt: skip

_VIT = PlanTable(
    plan={
        **{f"layers.*.attention.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    },
    heads=(),
)

_BLOOM = PlanTable(
    plan={
        "h.*.self_attention.query_key_value": "colwise",
        "h.*.self_attention.dense": "rowwise",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    },
    arguments={"h.*.self_attention": (("alibi", 0),)},
    customize=_bloom,
)

_FALCON = PlanTable(
    plan=_BLOOM.plan,
    arguments={"h.*.self_attention": (("alibi", 0), ("attention_mask", 1))},
    customize=_falcon,
)

_WHISPER = PlanTable(
    plan={
        **{f"{side}.layers.*.{kind}.{name}": "colwise" for side in ("encoder", "decoder")
           for kind in ("self_attn", "encoder_attn") for name in ("q_proj", "k_proj", "v_proj")},
        **{f"{side}.layers.*.{kind}.out_proj": "rowwise" for side in ("encoder", "decoder")
           for kind in ("self_attn", "encoder_attn")},
        **{f"{side}.layers.*.fc1": "colwise" for side in ("encoder", "decoder")},
        **{f"{side}.layers.*.fc2": "rowwise" for side in ("encoder", "decoder")},
    },
    heads=("proj_out", "lm_head"),
)  # fmt: skip

TABLES: Mapping[str, PlanTable] = {
    "bert": _BERT,
    "bloom": _BLOOM,
    "falcon": _FALCON,
    "gpt2": _GPT2,
    "opt": _OPT,
    "t5": _T5,
    "vit": _VIT,
    "whisper": _WHISPER,
}
"""Tables by the `model_type` of a configuration."""


def table_plan(model: nn.Module) -> PartialPlan | None:
    """Return the built-in plan of the transformers models in a model, or None."""
    styles: dict[str, Style] = {}
    arguments: list[ShardedArgument] = []
    kinds = []
    for name, module, config in pretrained_models(model):
        table = TABLES.get(config.model_type)
        if table is None:
            continue
        prefix = f"{name}." if name else ""
        patterns = {**table.plan, **(table.customize(config) if table.customize else {})}
        names = [key for key, _ in module.named_modules()]
        base = str(getattr(module, "base_model_prefix", ""))
        found, _ = match_names({key: read_style(key, style) for key, style in patterns.items()}, names, base)
        found |= {key: Style("vocab_head") for key in names if key in table.heads}
        styles.update({f"{prefix}{key}": style for key, style in found.items()})
        arguments.extend(_arguments_of(module, table, config, prefix))
        kinds.append(config.model_type)
    if not styles:
        return None
    source = f"the table for models of type {', '.join(kinds)}"
    return PartialPlan(styles=styles, source=source, arguments=tuple(arguments))


def _arguments_of(module: nn.Module, table: PlanTable, config: Any, prefix: str) -> list[ShardedArgument]:
    base = str(getattr(module, "base_model_prefix", ""))
    heads = Block(num_units=config.num_attention_heads)
    return [
        ShardedArgument(module=f"{prefix}{name}", argument=argument, dim=dim, block=heads)
        for pattern, arguments in table.arguments.items()
        for name, _ in module.named_modules()
        if matches(pattern, name) or matches(f"{base}.{pattern}", name)
        for argument, dim in arguments
    ]
