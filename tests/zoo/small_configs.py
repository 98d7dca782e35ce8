"""Configurations of transformers made small: two layers, a few heads, no dropout, by the names of their attributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_DIM = 32, 4, 2, 8
VOCABULARY = 99
POSITIONS = 64
IMAGE, PATCH = 16, 4

_SIZES: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth"),
            *("num_decoder_layers", "num_encoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers"),
            *("speech_encoder_layers", "t2u_encoder_layers", "t2u_decoder_layers", "num_layers_stage"),
        ),
        2,
    ),
    **dict.fromkeys(
        (
            *("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "word_embed_proj_dim"),
            *("projection_dim", "speech_encoder_hidden_size", "backbone_hidden_size", "cross_hidden_size"),
        ),
        HIDDEN,
    ),
    **dict.fromkeys(
        (
            *("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "inner_dim"),
            *("hidden_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size"),
            *("shared_intermediate_size", "expert_ffn_hidden_size", "speech_encoder_intermediate_size"),
            *("t2u_encoder_ffn_dim", "t2u_decoder_ffn_dim", "moe_shared_expert_intermediate_size"),
            *("shared_experts_intermediate_size", "classifier_proj_size"),
        ),
        56,
    ),
    **dict.fromkeys(
        (
            *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
            *("decoder_attention_heads", "speech_encoder_attention_heads", "swa_num_attention_heads"),
            *("t2u_encoder_attention_heads", "t2u_decoder_attention_heads", "linear_num_value_heads"),
            *("cross_num_attention_heads", "cross_num_key_value_heads"),
        ),
        HEADS,
    ),
    **dict.fromkeys(
        (
            *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads"),
            "index_n_heads",
        ),
        KEY_VALUE_HEADS,
    ),
    **dict.fromkeys(
        (
            *("head_dim", "d_kv", "attention_head_dim", "swa_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"),
            *("v_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "cross_head_dim"),
        ),
        HEAD_DIM,
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(
        (
            *("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"),
            "t2u_max_position_embeddings",
        ),
        POSITIONS,
    ),
    **dict.fromkeys(
        (
            *("vocab_size", "vocab_size_per_layer_input", "entity_vocab_size", "t2u_vocab_size", "char_vocab_size"),
            *(
                "src_vocab_size",
                "tgt_vocab_size",
                "pronunciation_vocab_size",
                "shape_vocab_size",
                "unit_hifi_gan_vocab_size",
                "unpadded_vocab_size",
            ),
        ),
        VOCABULARY,
    ),
    "image_size": IMAGE,
    "patch_size": PATCH,
    "hidden_size_per_layer_input": 8,
    "codebook_size": 64,
    "num_mel_bins": 16,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
# The convolutions in front of wav2vec2 and its relatives.
_LISTS: dict[str, list[int]] = {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3]}
# Off: random numbers other than dropout's, and losses that are not means over samples.
_OFF = {
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "router_jitter_noise": 0.0,
    "use_cache": False,
    "output_router_logits": False,
    "ctc_loss_reduction": "mean",
}

_SMALL_HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 8}
_CONVOLUTIONS = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
_SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2}
_REFORMER = {
    **{"axial_pos_shape": [3, 4], "axial_pos_embds_dim": [16, 16], "attention_head_size": 8, "feed_forward_size": 56},
    **{"attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2},
    "hash_seed": 0,
}
_HALVES = ["sliding_attention", "full_attention"]

# What sizes alone make neither small nor valid, by model type or by class: further values.
CHANGES: Mapping[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 64, "frequency_stride": 4, "time_stride": 4},
    "bamba": {**_SMALL_HYBRID, "attn_layer_indices": [1]},
    "bit": {**_CONVOLUTIONS, "num_groups": 4},
    "codegen": {"rotary_dim": 4},
    "cohere_asr": {"decoder_start_token_id": 2, "pad_token_id": 0},
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "convnextv2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "cvt": {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [2, 2, 2], "drop_path_rate": [0.0, 0.0, 0.0]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 56, "hidden_size": HIDDEN},
    },
    "donut-swin": _SWIN,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "efficientnet": {
        **{"width_coefficient": 1.0, "depth_coefficient": 1.0, "kernel_sizes": [3, 3], "in_channels": [32, 16]},
        **{"out_channels": [16, 24], "strides": [1, 2], "num_block_repeats": [1, 1], "expand_ratios": [1, 2]},
        **{"hidden_dim": 1280, "num_hidden_layers": 2},
    },
    "encoder-decoder": {
        **{"decoder_start_token_id": 2, "pad_token_id": 0},
        "decoder": {"is_decoder": True, "add_cross_attention": True},
    },
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3, "pad_token_id": 1},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon_h1": {**_SMALL_HYBRID, "mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": _HALVES},
    "gemma4_text": {"layer_types": _HALVES},
    "git": {"vision_config": {"intermediate_size": 24}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granite_speech5_ctc": {"encoder_config": {"context_size": 32}},
    "granitemoehybrid": {**_SMALL_HYBRID, "layer_types": ["mamba", "attention"]},
    "hgnet_v2": {
        **{"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "stem_channels": [3, 8, 8]},
        **{"stage_in_channels": [8, 8], "stage_mid_channels": [8, 8], "stage_out_channels": [8, 16]},
        **{"stage_num_blocks": [1, 1], "stage_downsample": [False, True], "stage_downsample_strides": [2, 2]},
        **{"stage_light_block": [False, True], "stage_kernel_size": [3, 3], "stage_numb_of_layers": [2, 2]},
    },
    "hiera": {
        **{"embed_dim": 16, "image_size": [32, 32], "depths": [1, 1], "num_heads": [1, 2], "masked_unit_size": [2, 2]},
        **{"num_query_pool": 1, "masked_unit_attention": [True, False]},
    },
    "inkling2_text": {"rel_extent": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "led": {"attention_window": 8},
    "levit": {
        **{
            "image_size": 128,
            "patch_size": 16,
            "hidden_sizes": [16, 32, 48],
            "num_attention_heads": [2, 4, 6],
            "depths": [1, 1, 1],
        },
        **{"key_dim": [8, 8, 8], "mlp_ratio": [2, 2, 2], "attention_ratio": [2, 2, 2]},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "longformer": {"attention_window": 8},
    "longt5": {"decoder_start_token_id": 0, "local_radius": 4},
    "luke": {"entity_emb_size": 16},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16},
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
    "moonshine": {"pad_token_id": 0},
    "nemotron_h": {
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2},
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
    },
    "neomme": {"embedding_rank": 16, "head_dim": 16, "embedding_dim": 16},
    "pegasus_x": {"block_size": 8, "num_global_tokens": 4},
    "perceiver": {
        **{"num_latents": 8, "d_latents": HIDDEN, "d_model": HIDDEN, "num_self_attends_per_block": 2},
        **{"num_self_attention_heads": 4, "num_cross_attention_heads": 1},
    },
    "poolformer": {
        **{"depths": [1, 2], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]},
        "num_encoder_blocks": 2,
    },
    "pop2piano": {"decoder_start_token_id": 0},
    "pvt": {
        **{"image_size": 32, "num_encoder_blocks": 2, "depths": [1, 2], "sequence_reduction_ratios": [2, 1]},
        **{"hidden_sizes": [8, 16], "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2]},
        "mlp_ratios": [2, 2],
    },
    "pvt_v2": {"image_size": 64},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen4_exp_text": {"hc_lowrank": 8, "ngram_vocab_size_base": 50, "split_ngram_parts": 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "ReformerForMaskedLM": _REFORMER,
    "ReformerModelWithLMHead": {**_REFORMER, "is_decoder": True},
    "regnet": {**_CONVOLUTIONS, "groups_width": 4},
    "resnet": _CONVOLUTIONS,
    "roc_bert": {"pronunciation_embed_dim": 16, "shape_embed_dim": 16},
    "rwkv": {"context_length": 64},
    "speech-encoder-decoder": {
        **{"decoder_start_token_id": 2, "pad_token_id": 0},
        "decoder": {"is_decoder": True, "add_cross_attention": True},
    },
    "speech_to_text": {"conv_channels": 16, "input_feat_per_channel": 16},
    "squeezebert": {"embedding_size": HIDDEN},
    "swin": _SWIN,
    "swinv2": {**_SWIN, "pretrained_window_sizes": [0, 0]},
    "switch_transformers": {"decoder_start_token_id": 0},
    "t5": {"decoder_start_token_id": 0},
    "textnet": {
        **{"image_size": [32, 32], "hidden_sizes": [8, 8, 16], "stem_out_channels": 8},
        **{"conv_layer_kernel_sizes": [[[3, 3]], [[3, 3]]], "conv_layer_strides": [[2], [2]]},
    },
    "xlstm": {"mode": "train", "chunk_size": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        **{"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "attention_hidden_size": 64},
        **{"num_key_value_heads": HEADS, "attention_head_dim": 16},
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "adapter_rank": 8, "num_key_value_heads": HEADS},
    "zaya": {"num_experts_per_tok": 1},
}


def small_config(config_class: type, changes: Mapping[str, Any] | None = None) -> Any:
    """Return a configuration of the class with two layers and small sizes.

    Args:
        config_class: A class of transformers.
        changes: Further values, of inner configurations as dicts under their names, beside those of `CHANGES`.
    """
    changes = {**CHANGES.get(config_class.model_type, {}), **(changes or {})}
    values: dict[str, Any] = {}
    # Multi-head latent attention has a key and a value for each head.
    is_latent = hasattr(config_class, "kv_lora_rank")
    for field in dataclasses.fields(config_class):
        name, default = field.name, field.default
        if name in _SIZES and (default is None or isinstance(default, int)):
            values[name] = HEADS if name == "num_key_value_heads" and is_latent else _SIZES[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(default, int) and default >= VOCABULARY:
            values[name] = VOCABULARY - 1
        elif "drop" in name and isinstance(default, float):
            values[name] = 0.0
        elif name in _LISTS and isinstance(default, (tuple, list)):
            values[name] = _LISTS[name]
        elif name in _OFF:
            values[name] = _OFF[name]
    inner_names = config_class.sub_configs
    default = config_class() if inner_names else None
    for name in inner_names:
        if (inner := getattr(default, name, None)) is not None:
            values[name] = small_config(type(inner), changes.pop(name, None))
    return config_class(**{**values, **changes})
