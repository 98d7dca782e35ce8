"""transformers config entries of well-known models, so that nothing has to be downloaded."""

from __future__ import annotations

from typing import Any

__all__ = ["PRESETS"]

_Config = dict[str, Any]


def _decoder(
    kind: tuple[str, str], width: int, inner: int, layers: int, heads: int, vocabulary: int, **others: Any
) -> _Config:
    return {
        "model_type": kind[0],
        "architectures": [kind[1]],
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **others,
    }


def _gpt2(width: int, layers: int, heads: int, positions: int = 1024) -> _Config:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": positions}
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}


def _opt(width: int, layers: int, heads: int, **others: Any) -> _Config:
    return {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": width,
        "word_embed_proj_dim": width,
        "ffn_dim": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }


def _encoder(kind: tuple[str, str], width: int, layers: int, heads: int, **others: Any) -> _Config:
    return {
        "model_type": kind[0],
        "architectures": [kind[1]],
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }


def _t5(width: int, inner: int, layers: int, heads: int, head_width: int = 64) -> _Config:
    sizes = {"d_model": width, "d_ff": inner, "num_layers": layers, "num_heads": heads, "d_kv": head_width}
    starts = {"decoder_start_token_id": 0}
    return {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **sizes, **starts}


def _whisper(width: int, layers: int, heads: int, **others: Any) -> _Config:
    sides = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * width))
    }
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": width,
        "vocab_size": 51865,
        **sides,
        **others,
    }


_LLAMA = ("llama", "LlamaForCausalLM")
_LLAMA_3 = {"num_key_value_heads": 8, "max_position_embeddings": 8192}
_LLAMA_32 = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": True}
_MIXTRAL = ("mixtral", "MixtralForCausalLM")
_QWEN2 = ("qwen2", "Qwen2ForCausalLM")
_QWEN3 = ("qwen3", "Qwen3ForCausalLM")
_QWEN3_MOE = ("qwen3_moe", "Qwen3MoeForCausalLM")
_GEMMA = ("gemma", "GemmaForCausalLM")
_GEMMA_ALL = {"head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 8192}
_LONG = {"max_position_embeddings": 32768}
_MORE_HEADS = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}

PRESETS: dict[str, _Config] = {
    "llama-7b": _decoder(_LLAMA, 4096, 11008, 32, 32, 32000, max_position_embeddings=2048),
    "llama-13b": _decoder(_LLAMA, 5120, 13824, 40, 40, 32000, max_position_embeddings=2048),
    "llama-30b": _decoder(_LLAMA, 6656, 17920, 60, 52, 32000, max_position_embeddings=2048),
    "llama-65b": _decoder(_LLAMA, 8192, 22016, 80, 64, 32000, max_position_embeddings=2048),
    "llama-2-7b": _decoder(_LLAMA, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": _decoder(_LLAMA, 5120, 13824, 40, 40, 32000),
    "llama-2-70b": _decoder(_LLAMA, 8192, 28672, 80, 64, 32000, num_key_value_heads=8),
    "llama-3-8b": _decoder(_LLAMA, 4096, 14336, 32, 32, 128256, **_LLAMA_3),
    "llama-3-70b": _decoder(_LLAMA, 8192, 28672, 80, 64, 128256, **_LLAMA_3),
    "llama-3-405b": _decoder(
        _LLAMA, 16384, 53248, 126, 128, 128256, num_key_value_heads=8, max_position_embeddings=131072
    ),
    "llama-3.2-1b": _decoder(_LLAMA, 2048, 8192, 16, 32, 128256, **_LLAMA_32),
    "llama-3.2-3b": _decoder(_LLAMA, 3072, 8192, 28, 24, 128256, **_LLAMA_32),
    "mistral-7b": _decoder(
        ("mistral", "MistralForCausalLM"), 4096, 14336, 32, 32, 32000, num_key_value_heads=8, **_LONG
    ),
    "mixtral-8x7b": _decoder(_MIXTRAL, 4096, 14336, 32, 32, 32000, num_key_value_heads=8, **_LONG),
    "mixtral-8x22b": _decoder(
        _MIXTRAL, 6144, 16384, 56, 48, 32768, num_key_value_heads=8, max_position_embeddings=65536
    ),
    "qwen2.5-0.5b": _decoder(
        _QWEN2, 896, 4864, 24, 14, 151936, num_key_value_heads=2, tie_word_embeddings=True, **_LONG
    ),
    "qwen2.5-1.5b": _decoder(
        _QWEN2, 1536, 8960, 28, 12, 151936, num_key_value_heads=2, tie_word_embeddings=True, **_LONG
    ),
    "qwen2.5-7b": _decoder(_QWEN2, 3584, 18944, 28, 28, 152064, num_key_value_heads=4, **_LONG),
    "qwen2.5-14b": _decoder(_QWEN2, 5120, 13824, 48, 40, 152064, num_key_value_heads=8, **_LONG),
    "qwen2.5-32b": _decoder(_QWEN2, 5120, 27648, 64, 40, 152064, num_key_value_heads=8, **_LONG),
    "qwen2.5-72b": _decoder(_QWEN2, 8192, 29568, 80, 64, 152064, num_key_value_heads=8, **_LONG),
    "qwen3-8b": _decoder(_QWEN3, 4096, 12288, 36, 32, 151936, **_MORE_HEADS),
    "qwen3-14b": _decoder(_QWEN3, 5120, 17408, 40, 40, 151936, **_MORE_HEADS),
    "qwen3-32b": _decoder(_QWEN3, 5120, 25600, 64, 64, 151936, **_MORE_HEADS),
    "qwen3-30b-a3b": _decoder(
        _QWEN3_MOE,
        2048,
        6144,
        48,
        32,
        151936,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        max_position_embeddings=40960,
    ),
    "gemma-2b": _decoder(_GEMMA, 2048, 16384, 18, 8, 256000, num_key_value_heads=1, **_GEMMA_ALL),
    "gemma-7b": _decoder(_GEMMA, 3072, 24576, 28, 16, 256000, **_GEMMA_ALL),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt3-175b": _gpt2(12288, 96, 96, positions=2048),
    "gpt-neox-20b": _encoder(("gpt_neox", "GPTNeoXForCausalLM"), 6144, 44, 64, vocab_size=50432),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "opt-175b": _opt(12288, 96, 96),
    "bloom-176b": {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "hidden_size": 14336,
        "n_layer": 70,
        "n_head": 112,
        "vocab_size": 250880,
    },
    "bert-base": _encoder(("bert", "BertForMaskedLM"), 768, 12, 12),
    "bert-large": _encoder(("bert", "BertForMaskedLM"), 1024, 24, 16),
    "t5-small": _t5(512, 2048, 6, 8),
    "t5-base": _t5(768, 3072, 12, 12),
    "t5-large": _t5(1024, 4096, 24, 16),
    "t5-3b": _t5(1024, 16384, 24, 32, head_width=128),
    "t5-11b": _t5(1024, 65536, 24, 128, head_width=128),
    "vit-base": _encoder(("vit", "ViTForImageClassification"), 768, 12, 12, num_labels=1000),
    "vit-large": _encoder(("vit", "ViTForImageClassification"), 1024, 24, 16, num_labels=1000),
    "vit-huge": _encoder(("vit", "ViTForImageClassification"), 1280, 32, 16, num_labels=1000, patch_size=14),
    "whisper-small": _whisper(768, 12, 12),
    "whisper-large": _whisper(1280, 32, 20, num_mel_bins=128, vocab_size=51866),
}
