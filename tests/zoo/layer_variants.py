"""More architectures of transformers, for plugins that cut layers apart: to others they are all alike."""

from __future__ import annotations

from typing import Any

import torch

from zoo.entry import Batch, ZooEntry
from zoo.transformers_models import DECODER, LENGTH, VOCABULARY, causal_batch, from_config, own_loss, token_ids

_WITHOUT_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cache": False}
_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_FALCON = {
    **_TOKENS,
    **_WITHOUT_DROPOUT,
    "hidden_size": 32,
    "ffn_hidden_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_WHISPER = {
    **_TOKENS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 56,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "use_cache": False,
    "decoder_start_token_id": 1,
}
_CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", "MistralForCausalLM", {**DECODER, "head_dim": 8, "sliding_window": None}),
    "mistral_sliding": ("MistralConfig", "MistralForCausalLM", {**DECODER, "head_dim": 8, "sliding_window": 5}),
    # One head of keys and values; heads that together are wider than the hidden states.
    "gemma": (
        "GemmaConfig",
        "GemmaForCausalLM",
        {**DECODER, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True},
    ),
    # Attention and MLP side by side, rotary positions on half of a head, a head with a bias.
    "phi": (
        "PhiConfig",
        "PhiForCausalLM",
        {**DECODER, "num_key_value_heads": 4, "partial_rotary_factor": 0.5, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    # Query, key and value of a head next to each other; a bias by distance that depends on the head's number.
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {**_TOKENS, **_WITHOUT_DROPOUT, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    # The three layouts of Falcon's fused projection: one head of keys, groups of heads, and as Bloom has it.
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {**_FALCON, "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False},
    ),
    "falcon_groups": (
        "FalconConfig",
        "FalconForCausalLM",
        {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": False, "alibi": False},
    ),
    "falcon_alibi": (
        "FalconConfig",
        "FalconForCausalLM",
        {**_FALCON, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
    ),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", _WHISPER),
    "llama_padded": ("LlamaConfig", "LlamaForCausalLM", DECODER),
}


def _padded(num_samples: int, generator: torch.Generator) -> Batch:
    """Samples of 8 to 12 tokens, of which as many count in each."""
    ids = token_ids(num_samples, generator)
    lengths = torch.randint(8, LENGTH + 1, (num_samples, 1), generator=generator)
    is_there = torch.arange(LENGTH) < lengths
    labels = ids.masked_fill(torch.arange(LENGTH) >= 8, -100)
    return {"input_ids": ids.masked_fill(~is_there, 0), "attention_mask": is_there.long(), "labels": labels}


def _speech(num_samples: int, generator: torch.Generator) -> Batch:
    features = torch.randn(num_samples, 8, 20, generator=generator)
    return {"input_features": features, "labels": token_ids(num_samples, generator)[:, :7].contiguous()}


def _entry(name: str, **settings: Any) -> ZooEntry:
    attention = settings.pop("attention", "eager")
    settings = {"sample": causal_batch, "loss": own_loss, "is_layer_variant": True, **settings}
    return ZooEntry(name=name, **from_config(*_CONFIGS[name], attention=attention), **settings)


_ROTARY_TIES = (("model.embed_tokens.weight", "lm_head.weight"),)
_ALIBI_TIES = (("transformer.word_embeddings.weight", "lm_head.weight"),)

LAYER_VARIANTS = (
    _entry("mistral"),
    _entry("mistral_sliding", attention="sdpa"),
    _entry("gemma", tied=_ROTARY_TIES),
    _entry("phi"),
    _entry("bloom", tied=_ALIBI_TIES),
    _entry("falcon", tied=_ALIBI_TIES),
    _entry("falcon_groups", attention="sdpa", tied=_ALIBI_TIES),
    _entry("falcon_alibi", tied=_ALIBI_TIES),
    _entry(
        "whisper",
        sample=_speech,
        blocks_share_tensors=True,
        uses_unused_parameters=True,
        never_used=("model.encoder.embed_positions.weight",),  # sines that don't train
        tied=(("model.decoder.embed_tokens.weight", "proj_out.weight"),),
    ),
    _entry("llama_padded", sample=_padded, attention="sdpa"),
)
