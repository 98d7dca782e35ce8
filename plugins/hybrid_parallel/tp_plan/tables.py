"""Built-in plans of models that transformers has no plan for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block

from .plan import PartialPlan, ShardedArgument, Style, match_names, matches, read_style

_EXPERT_PARALLEL = frozenset({"grouped_gemm", "ep_dispatch_experts", "ep_router"})


def pretrained_models(
    model: nn.Module, name: str = "", types: Container[str] | None = None
) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the outermost transformers models in a model, or those of given types: name, module and configuration."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    is_wanted = kind is not None if types is None else kind in types
    if is_wanted and hasattr(type(model), "base_model_prefix"):  # peft's models forward attributes
        yield name, model, model.config
        return
    for key, child in model.named_children():
        yield from pretrained_models(child, f"{name}.{key}" if name else key, types)


# Gate and up are one after the other in each expert, and the forward takes halves. Shared experts hold parameters, not
# layers, so that their inputs, too, have the gradient of a rank's features only.
_INKLING = {
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.shared_experts": "moe_tp_experts",
}

CORRECTIONS: Mapping[str, Mapping[str, str]] = {
    # An activation with parameters between sharded layers: each rank has the gradient of its features only.
    "apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    "inkling_text": _INKLING,
    "inkling2_text": _INKLING,
}
"""What transformers' own plans leave out or have wrong, by the `model_type` of a configuration."""


UNSHARDABLE: Mapping[str, str] = {"neomme": "adds embeddings with features of all heads to the values of an attention"}
"""Why the plan that transformers has for a model does not work, by the `model_type` of a configuration."""


def transformers_plan(model: nn.Module) -> PartialPlan | None:
    """Return the plan of the transformers models in a model, or None if they have none.

    Raises:
        ConfigError: The plan does not work.
    """
    for _, module, config in pretrained_models(model, types=UNSHARDABLE):
        raise ConfigError(
            f"{type(module).__name__} {UNSHARDABLE[config.model_type]}, which transformers' own plan leaves out: give"
            " plan= with layers outside of attention, such as those of the MLP, or use tp_size=1"
        )
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
    for name, module, config in pretrained_models(model, types=CORRECTIONS):
        names = [key for key, _ in module.named_modules()] + [key for key, _ in module.named_parameters()]
        plan = {key: read_style(key, style) for key, style in CORRECTIONS[config.model_type].items()}
        styles, _ = match_names(plan, names, str(getattr(module, "base_model_prefix", "")))
        found.update({f"{name}.{key}" if name else key: style for key, style in styles.items()})
    return PartialPlan(styles=found, source=f"transformers' own plan of {', '.join(sources)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """The plan of a family of models, with and without a head.

    A table only has styles: attentions are recognized by name (see Note [Attention heads]), and size attributes
    such as `num_heads` are found in the models' code (see `head_attributes`).

    Attributes:
        plan: Styles by pattern of module names, relative to the base model. A pattern may have alternatives, such as
            `{query,key,value}`.
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


_ENCODER_MLP = {"encoder.layer.*.intermediate.dense": "colwise", "encoder.layer.*.output.dense": "rowwise"}
_BERT_HEADS = ("cls.predictions.decoder", "lm_head.decoder", "generator_lm_head")

_BERT = PlanTable(
    plan={
        "encoder.layer.*.{attention,crossattention}.self.{query,key,value}": "colwise",
        "encoder.layer.*.{attention,crossattention}.output.dense": "rowwise",
        **_ENCODER_MLP,
    },
    heads=_BERT_HEADS,
)

# Of models whose attention is not a plain one: it stays unsharded.
_FEED_FORWARD = PlanTable(
    plan={
        **_ENCODER_MLP,
        "encoder.layer.*.ffn.*.intermediate.dense": "colwise",  # of MobileBERT, like the next one
        "encoder.layer.*.ffn.*.output.dense": "rowwise",
    },
    heads=_BERT_HEADS,
)

_DATA2VEC_VISION = PlanTable(
    plan={
        "encoder.layer.*.attention.attention.{query,key,value}": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise",
        **_ENCODER_MLP,
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

TABLES: Mapping[str, PlanTable] = {
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "esm", "layoutlm"),
            *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
            *("tapas", "xlm-roberta", "xlm-roberta-xl"),
        ),
        _BERT,
    ),
    **dict.fromkeys(
        (
            *("big_bird", "convbert", "deberta", "deberta-v2", "fnet", "longformer", "luke", "mra", "nystromformer"),
            "yoso",
        ),
        _FEED_FORWARD,
    ),
    "bloom": _BLOOM,
    "convnext": PlanTable(
        plan={"encoder.stages.*.layers.*.pwconv1": "colwise", "encoder.stages.*.layers.*.pwconv2": "rowwise"}, heads=()
    ),
    "cpmant": PlanTable(
        plan={"encoder.layers.*.ffn.ffn.w_in.{w_0,w_1}": "colwise", "encoder.layers.*.ffn.ffn.w_out": "rowwise"}
    ),
    "data2vec-vision": _DATA2VEC_VISION,
    "donut-swin": PlanTable(
        plan={
            "encoder.layers.*.blocks.*.intermediate.dense": "colwise",
            "encoder.layers.*.blocks.*.output.dense": "rowwise",
        },
        heads=(),
    ),
    "falcon": PlanTable(
        plan=_BLOOM.plan,
        arguments={"h.*.self_attention": (("alibi", 0), ("attention_mask", 1))},
        customize=_falcon,
    ),
    "gpt2": PlanTable(
        plan={
            "h.*.attn.c_attn": "packed_colwise:3",
            "h.*.crossattention.c_attn": "packed_colwise:2",
            "h.*.crossattention.q_attn": "colwise",
            "h.*.{attn,crossattention}.c_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        }
    ),
    "mobilebert": replace(_FEED_FORWARD, heads=()),  # the weight of its head is put together from two parameters
    "mobilevit": PlanTable(
        plan={
            key.replace("encoder.layer.*", "encoder.layer.*.transformer.layer.*"): style
            for key, style in _DATA2VEC_VISION.plan.items()
        },
        heads=(),
    ),
    "mpnet": PlanTable(
        plan={
            "encoder.layer.*.attention.attn.{q,k,v}": "colwise",
            "encoder.layer.*.attention.attn.o": "rowwise",
            **_ENCODER_MLP,
            "encoder.relative_attention_bias": "replicated_with_grad_allreduce",
        },
        heads=("lm_head.decoder",),
        arguments={"encoder.layer.*.attention.attn": (("position_bias", 1),)},
    ),
    "mpt": PlanTable(
        plan={
            "blocks.*.attn.Wqkv": "packed_colwise:3",
            "blocks.*.attn.out_proj": "rowwise",
            "blocks.*.ffn.up_proj": "colwise",
            "blocks.*.ffn.down_proj": "rowwise",
        },
        arguments={"blocks.*.attn": (("position_bias", 0),)},
    ),
    "opt": PlanTable(
        plan={
            "decoder.layers.*.self_attn.{q_proj,k_proj,v_proj}": "colwise",
            "decoder.layers.*.self_attn.out_proj": "rowwise",
            "decoder.layers.*.fc1": "colwise",
            "decoder.layers.*.fc2": "rowwise",
        }
    ),
    "reformer": PlanTable(
        plan={
            "encoder.layers.*.feed_forward.dense.dense": "colwise",
            "encoder.layers.*.feed_forward.output.dense": "rowwise",
        },
        heads=("lm_head.decoder",),
    ),
    "sew-d": PlanTable(plan={f"encoder.{key}": style for key, style in _ENCODER_MLP.items()}, heads=()),
    # Attention of the encoder takes embeddings of relative positions.
    "speecht5": PlanTable(
        plan={
            f"{side}.wrapped_{side}.layers.*.feed_forward.{name}_dense": style
            for side in ("encoder", "decoder")
            for name, style in (("intermediate", "colwise"), ("output", "rowwise"))
        },
        heads=(),
    ),
    "t5": PlanTable(
        plan={
            "{encoder,decoder}.block.*.layer.*.{SelfAttention,EncDecAttention}.{q,k,v}": "colwise",
            "{encoder,decoder}.block.*.layer.*.{SelfAttention,EncDecAttention}.o": "rowwise",
            "{encoder,decoder}.block.*.layer.*.SelfAttention.relative_attention_bias": "embedding_colwise",
            "{encoder,decoder}.block.*.layer.*.DenseReluDense.{wi,wi_0,wi_1}": "colwise",
            "{encoder,decoder}.block.*.layer.*.DenseReluDense.wo": "rowwise",
        }
    ),
    "vit": PlanTable(
        plan={
            "layers.*.attention.{q_proj,k_proj,v_proj}": "colwise",
            "layers.*.attention.o_proj": "rowwise",
            "layers.*.mlp.fc1": "colwise",
            "layers.*.mlp.fc2": "rowwise",
        },
        heads=(),
    ),
    "whisper": PlanTable(
        plan={
            "{encoder,decoder}.layers.*.{self_attn,encoder_attn}.{q_proj,k_proj,v_proj}": "colwise",
            "{encoder,decoder}.layers.*.{self_attn,encoder_attn}.out_proj": "rowwise",
            "{encoder,decoder}.layers.*.fc1": "colwise",
            "{encoder,decoder}.layers.*.fc2": "rowwise",
        },
        heads=("proj_out", "lm_head"),
    ),
}
"""Tables by the `model_type` of a configuration."""


def table_plan(model: nn.Module) -> PartialPlan | None:
    """Return the built-in plan of the transformers models in a model, or None."""
    styles: dict[str, Style] = {}
    arguments: list[ShardedArgument] = []
    kinds = []
    for name, module, config in pretrained_models(model, types=TABLES):
        table = TABLES[config.model_type]
        prefix = f"{name}." if name else ""
        patterns = {**table.plan, **(table.customize(config) if table.customize else {})}
        names = [key for key, _ in module.named_modules()]
        base = str(getattr(module, "base_model_prefix", ""))
        given = {key: read_style(key, style) for several, style in patterns.items() for key in _spelled_out(several)}
        found, _ = match_names(given, names, base)
        found |= {key: Style("vocab_head") for key in names if key in table.heads}
        styles.update({f"{prefix}{key}": style for key, style in found.items()})
        arguments.extend(_arguments_of(module, table, config, prefix))
        kinds.append(config.model_type)
    if not styles:
        return None
    source = f"the table for models of type {', '.join(kinds)}"
    return PartialPlan(styles=styles, source=source, arguments=tuple(arguments))


def _spelled_out(pattern: str) -> Iterator[str]:
    """Yield the patterns that one with alternatives is short for."""
    parts = re.split(r"{(.*?)}", pattern)
    yield from map("".join, itertools.product(*(part.split(",") for part in parts)))


def _arguments_of(module: nn.Module, table: PlanTable, config: Any, prefix: str) -> list[ShardedArgument]:
    if not table.arguments:
        return []
    base = str(getattr(module, "base_model_prefix", ""))
    heads = Block(num_units=config.num_attention_heads)
    return [
        ShardedArgument(module=f"{prefix}{name}", argument=argument, dim=dim, block=heads)
        for pattern, arguments in table.arguments.items()
        for name, _ in module.named_modules()
        if matches(pattern, name) or matches(f"{base}.{pattern}", name)
        for argument, dim in arguments
    ]
