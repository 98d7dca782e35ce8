"""Mixtures of experts: of transformers, with more experts or fewer dense layers than elsewhere, and written by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zoo.entry import Batch, ZooEntry
from zoo.small_configs import VOCABULARY, small_config
from zoo.transformers_models import LENGTH, causal_batch, own_loss

# By the name of the model here: the class and changes of `small_config`.
_CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mixtral_6_experts": ("MixtralForCausalLM", {"num_local_experts": 6}),
    "mixtral_5_experts": ("MixtralForCausalLM", {"num_local_experts": 5}),
    "mixtral_one_expert_per_token": ("MixtralForCausalLM", {"num_experts_per_tok": 1}),
    "mixtral_8_experts_per_token": ("MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 8}),
    "mixtral_balanced": ("MixtralForCausalLM", {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {"first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4}),
    "deepseek_v3_grouped": (
        "DeepseekV3ForCausalLM",
        {"first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v32": ("DeepseekV32ForCausalLM", {"first_k_dense_replace": 1}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {"first_k_dense_replace": 1}),
    "bailing_hybrid": ("BailingHybridForCausalLM", {"first_k_dense_replace": 1}),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "nllb_moe": ("NllbMoeForConditionalGeneration", {"encoder_sparse_step": 2, "decoder_sparse_step": 2}),
}


def _build(class_name: str, changes: dict[str, Any]) -> nn.Module:
    import transformers

    model_class = getattr(transformers, class_name)
    return model_class(small_config(model_class.config_class, changes))


def _translations(num_samples: int, generator: torch.Generator) -> Batch:
    return {
        "input_ids": torch.randint(3, VOCABULARY, (num_samples, LENGTH), generator=generator),
        "labels": torch.randint(3, VOCABULARY, (num_samples, 7), generator=generator),
    }


def _short_texts(num_samples: int, generator: torch.Generator) -> Batch:
    """Returns sequences so short that torch sums the gradients of a token's experts in one thread, in a fixed order."""
    return {key: value[:, :6].contiguous() for key, value in causal_batch(num_samples, generator).items()}


def _sample_of(name: str, class_name: str) -> Callable[[int, torch.Generator], Batch]:
    if class_name.endswith("ConditionalGeneration"):
        return _translations
    return _short_texts if name == "mixtral_8_experts_per_token" else causal_batch


class ListedExperts(nn.Module):
    """Experts in a list, of which one that gets no token is not called."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, tokens: torch.Tensor, expert_index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(tokens)
        for number, layer in enumerate(self.layers):
            token, place = torch.where(expert_index == number)
            if len(token):
                output = output.index_add(0, token, layer(tokens[token]) * weights[token, place, None])
        return output


class LoopingBlock(nn.Module):
    """A gate, and a plain list of experts that the forward calls one after another, as in users' own models.

    Args:
        num_experts: Number of experts.
        width: Features of a token.
        calls_all: If True, an expert without tokens is called as well.
    """

    def __init__(self, num_experts: int, width: int, *, calls_all: bool) -> None:
        super().__init__()
        self.calls_all = calls_all
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        )
        self.register_buffer("num_forwards", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps (tokens, width) to the same shape."""
        self.num_forwards += 1
        weights, index = self.gate(tokens).softmax(-1).topk(2)
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(index == number)
            if self.calls_all or len(token):
                output.index_add_(0, token, (expert(tokens[token]) * weights[token, place, None]).to(output.dtype))
        return output


class LoopingClassifier(nn.Module):
    """A classifier of vectors with two blocks that loop over experts."""

    def __init__(self, num_experts: int = 5, width: int = 16, num_classes: int = 5, *, calls_all: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LoopingBlock(num_experts, width, calls_all=calls_all) for _ in range(2))
        self.head = nn.Linear(width, num_classes)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Maps (batch, width) to (batch, classes)."""
        for block in self.blocks:
            vectors = vectors + block(vectors)
        return self.head(vectors)


class RoutedClassifier(nn.Module):
    """A classifier of vectors whose two blocks have experts of one's own, some of which get no token of a batch."""

    def __init__(self, num_experts: int = 5, width: int = 16, num_classes: int = 5) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(width, num_experts) for _ in range(2))
        self.experts = nn.ModuleList(ListedExperts(num_experts, width) for _ in range(2))
        self.head = nn.Linear(width, num_classes)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            weights, index = router(vectors).softmax(-1).topk(2)
            vectors = vectors + experts(vectors, index, weights)
        return self.head(vectors)


def _vectors(num_samples: int, generator: torch.Generator) -> Batch:
    return {
        "vectors": torch.randn(num_samples, 16, generator=generator),
        "classes": torch.randint(5, (num_samples,), generator=generator),
    }


def _classification_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(model(batch["vectors"]), batch["classes"])


_INDEXERS = tuple(
    f"model.layers.{layer}.self_attn.indexer.{name}"
    for layer in range(2)
    for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
)
# What no batch gives a gradient: it chooses the keys of an attention, or is left out by the router's masks.
_NEVER_USED = {
    "deepseek_v32": _INDEXERS,
    "glm_moe_dsa": _INDEXERS,
    "nllb_moe": tuple(
        f"model.{stack}.layers.1.ffn.experts.expert_{expert}.{layer}.{kind}"
        for stack in ("encoder", "decoder")
        for expert in (2, 3)
        for layer in ("fc1", "fc2")
        for kind in ("weight", "bias")
    ),
}
_TIES = {
    "switch": ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"),
    "nllb_moe": ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"),
}
# A product of means over the batch; a capacity that depends on its size.
_MIXES_SAMPLES = ("mixtral_balanced", "nllb_moe")

EXPERT_MODELS = (
    *(
        ZooEntry(
            name=name,
            construct=functools.partial(_build, class_name, changes),
            sample=_sample_of(name, class_name),
            loss=own_loss,
            uses_unused_parameters=True,  # an expert may get no token
            never_used=_NEVER_USED.get(name, ()),
            mixes_samples=name in _MIXES_SAMPLES,
            tied=(tuple(f"{one}.weight" for one in _TIES[name]),) if name in _TIES else (),
            is_layer_variant=True,
        )
        for name, (class_name, changes) in _CONFIGS.items()
    ),
    ZooEntry(
        name="routed_classifier",
        construct=RoutedClassifier,
        sample=_vectors,
        loss=_classification_loss,
        uses_unused_parameters=True,
        is_layer_variant=True,
    ),
    *(
        ZooEntry(
            name=name,
            construct=functools.partial(LoopingClassifier, calls_all=calls_all),
            sample=_vectors,
            loss=_classification_loss,
            uses_unused_parameters=not calls_all,
            is_layer_variant=True,
        )
        for name, calls_all in (("looping_classifier", False), ("looping_classifier_that_calls_all", True))
    ),
)
