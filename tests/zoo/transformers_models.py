"""Models of Hugging Face transformers, made from tiny configs without a download.

transformers is imported when a model is built: without it, the rest of the zoo works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo.entry import Batch, Loss, ZooEntry

# For harness.preload: what the builders import, which takes seconds the first time.
TRANSFORMERS_MODULES = (
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
)

VOCABULARY = 99
LENGTH = 12
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attention_dropout": 0.0,
    "use_cache": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_ALBERT = {**_BERT, "embedding_size": 12, "num_hidden_layers": 3, "classifier_dropout_prob": 0.0}
_CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**DECODER, "head_dim": 8}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "gpt2_double_heads": ("GPT2Config", "GPT2DoubleHeadsModel", {**_GPT2, "summary_first_dropout": 0.0}),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "layerdrop": 0.0,
            "use_cache": False,
        },
    ),
    "bert": ("BertConfig", "BertForMaskedLM", _BERT),
    "bert_unpooled": ("BertConfig", "BertModel", _BERT),
    "bert_pretraining": ("BertConfig", "BertForPreTraining", _BERT),
    "albert_unpooled": ("AlbertConfig", "AlbertModel", _ALBERT),
    "albert_pretraining": ("AlbertConfig", "AlbertForPreTraining", _ALBERT),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 56,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
    ),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {
            "hidden_size": 32,
            "intermediate_size": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 8,
            "patch_size": 4,
            "num_channels": 3,
            "num_labels": 5,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
}


# What configs call the number of layers.
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")


def from_config(
    config_name: str, class_name: str, settings: dict[str, Any], attention: str = "eager"
) -> dict[str, Callable[..., nn.Module]]:
    """Returns the builders of a model of transformers, as arguments of a `ZooEntry`."""

    def construct() -> nn.Module:
        import transformers

        config = getattr(transformers, config_name)(**settings, attn_implementation=attention)
        return getattr(transformers, class_name)(config)

    def construct_deep(num_layers: int) -> nn.Module:
        deep = {name: num_layers if name in _DEPTHS else value for name, value in settings.items()}
        return from_config(config_name, class_name, deep, attention)["construct"]()

    return {"construct": construct, "construct_deep": construct_deep}


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns the model's own loss: every sample has the same number of labels that count."""
    return model(**batch).loss


def _both_heads_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    outputs = model(**batch)
    return outputs.loss + outputs.mc_loss


def _hidden_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Regression on the mean of the hidden states: the pooler gets no gradient."""
    inputs = {name: value for name, value in batch.items() if name != "target"}
    hidden = model(**inputs).last_hidden_state
    return F.mse_loss(hidden.float().mean(dim=1), batch["target"])


def token_ids(num_samples: int, generator: torch.Generator) -> torch.Tensor:
    """Returns (samples, length) ids."""
    return torch.randint(4, VOCABULARY, (num_samples, LENGTH), generator=generator)  # above the special tokens


def causal_batch(num_samples: int, generator: torch.Generator) -> Batch:
    """Returns ids that are their own labels."""
    ids = token_ids(num_samples, generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _masked(num_samples: int, generator: torch.Generator) -> Batch:
    """Masks the same number of tokens in every sample, at places that differ."""
    ids = token_ids(num_samples, generator)
    hidden = torch.rand(num_samples, LENGTH, generator=generator).argsort(dim=1)[:, :3]
    is_hidden = torch.zeros_like(ids, dtype=torch.bool).scatter(1, hidden, True)
    return {
        "input_ids": ids.masked_fill(is_hidden, 3),
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(~is_hidden, -100),
    }


def _masked_with(label: str) -> Callable[[int, torch.Generator], Batch]:
    """Adds one of two classes per sample under that name, and the ids of two sentences."""

    def sample(num_samples: int, generator: torch.Generator) -> Batch:
        batch = _masked(num_samples, generator)
        batch["token_type_ids"] = (torch.arange(LENGTH) >= LENGTH // 2).long().expand(num_samples, -1).contiguous()
        return {**batch, label: torch.randint(2, (num_samples,), generator=generator)}

    return sample


def _regression(num_samples: int, generator: torch.Generator) -> Batch:
    ids = token_ids(num_samples, generator)
    target = torch.randn(num_samples, _BERT["hidden_size"], generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "target": target}


def _choices(num_samples: int, generator: torch.Generator) -> Batch:
    """Two continuations per sample, of which one is right."""
    ids = token_ids(2 * num_samples, generator).view(num_samples, 2, LENGTH)
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "mc_token_ids": torch.randint(LENGTH // 2, LENGTH, (num_samples, 2), generator=generator),
        "mc_labels": torch.randint(2, (num_samples,), generator=generator),
    }


def _translation(num_samples: int, generator: torch.Generator) -> Batch:
    ids = token_ids(num_samples, generator)
    labels = token_ids(num_samples, generator)[:, :7].contiguous()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _pictures(num_samples: int, generator: torch.Generator) -> Batch:
    pixels = torch.randn(num_samples, 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(5, (num_samples,), generator=generator)}


def _entry(
    name: str, sample: Callable[[int, torch.Generator], Batch] = causal_batch, loss: Loss = own_loss, **settings: Any
) -> ZooEntry:
    return ZooEntry(name=name, **from_config(*_CONFIGS[name]), sample=sample, loss=loss, **settings)


_BERT_TIES = (
    ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
_ALBERT_TIES = (
    ("albert.embeddings.word_embeddings.weight", "predictions.decoder.weight"),
    ("predictions.bias", "predictions.decoder.bias"),
)
_T5_TIES = (("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),)

TRANSFORMERS_MODELS = (
    _entry("llama"),
    _entry("gpt2", tied=(("transformer.wte.weight", "lm_head.weight"),)),
    _entry("bert", _masked, tied=_BERT_TIES),
    _entry("gpt2_double_heads", _choices, _both_heads_loss, tied=(("transformer.wte.weight", "lm_head.weight"),)),
    _entry("bert_pretraining", _masked_with("next_sentence_label"), tied=_BERT_TIES),
    _entry(
        "bert_unpooled",
        _regression,
        _hidden_loss,
        uses_unused_parameters=True,
        never_used=("pooler.dense.weight", "pooler.dense.bias"),
    ),
    _entry("albert_pretraining", _masked_with("sentence_order_label"), tied=_ALBERT_TIES),
    _entry(
        "albert_unpooled",
        _regression,
        _hidden_loss,
        uses_unused_parameters=True,
        never_used=("pooler.weight", "pooler.bias"),
    ),
    _entry("opt", tied=(("model.decoder.embed_tokens.weight", "lm_head.weight"),)),
    _entry("t5", _translation, tied=_T5_TIES, blocks_share_tensors=True),
    _entry("vit", _pictures),
    _entry("mixtral", uses_unused_parameters=True),  # an expert may get no token
    _entry("qwen3"),
)
