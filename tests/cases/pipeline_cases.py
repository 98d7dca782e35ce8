"""How models are divided into pipeline stages, and the models that the pipeline's tests train under each division."""

from __future__ import annotations

from typing import Any

from hybrid_cases import MODES
from parity import assert_parallel_equals_serial
from zoo import get_model

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"pp_style": "1f1b"},
    "gpipe": {"pp_style": "gpipe"},
    "interleaved": {"pp_style": "interleaved", "num_model_chunks": 2},
    "zbv": {"pp_style": "zbv", "num_model_chunks": 2},
}

# Decoders, encoders, both, experts, pictures, and what people write by hand.
DECODERS = ["llama", "qwen3", "mistral", "mistral_sliding", "gemma", "phi", "gpt2", "opt", "bloom", "falcon", "mixtral"]
MORE_DECODERS = ["llama_padded", "falcon_groups", "falcon_alibi"]
ENCODERS = ["bert", "vit", "bert_unpooled", "bert_pretraining"]
HEADS = ["gpt2_double_heads"]
ENCODER_DECODERS = ["t5", "whisper"]
WRITTEN = ["user_transformer", "user_mixer", "byte_gpt", "tied_lm", "glued_chain", "partly_frozen_chain"]
SEQUENCES = ["unlike_sequence", "named_chain"]
MODELS = [*DECODERS, *MORE_DECODERS, *HEADS, *ENCODERS, *ENCODER_DECODERS, *WRITTEN]
TIED = [model for model in MODELS if get_model(model).tied]

# Ranks of the other axes: how many in all there are for each stage, and the plugin's arguments.
AXES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "dp 2": (2, {}),
    "dp 2 zero 1": (2, {"zero_stage": 1}),
    "dp 2 inside": (2, {"dp_outside": False}),
    "tp 2": (2, {"tp_size": 2}),
    "dp 2 tp 2": (4, {"tp_size": 2}),
    **{mode: MODES[mode] for mode in ("split_gather 2", "ring 2", "all_to_all 2", "ring_attn 2")},
}


def num_layers_for(model: str, num_parts: int) -> int | None:
    """Returns how many layers a model needs for each chunk to have one; None: it has enough."""
    if get_model(model).construct_deep is None:
        return None
    # Two stacks follow each other in an encoder-decoder model.
    needed = -(-num_parts // 2) if model in ENCODER_DECODERS else num_parts
    return needed if needed > 2 or model == "tied_lm" else None


def num_chunks_of(schedule: str, pp_size: int) -> int:
    """Returns into how many chunks a schedule divides a model."""
    return pp_size * SCHEDULES[schedule].get("num_model_chunks", 1)


def assert_pipeline_equals_serial(
    model: str,
    *,
    pp_size: int = 2,
    schedule: str = "1f1b",
    microbatches: int = 4,
    axes: str = "alone",
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Trains in stages and in one process; see `assert_parallel_equals_serial`."""
    ranks_per_stage, more = AXES[axes]
    plugin_arguments = {"pp_size": pp_size, "num_microbatches": microbatches, **SCHEDULES[schedule], **more}
    plugin_arguments |= arguments or {}
    if "microbatch_size" in plugin_arguments:
        del plugin_arguments["num_microbatches"]
    settings.setdefault("num_layers", num_layers_for(model, num_chunks_of(schedule, pp_size)))
    settings.setdefault("samples_per_rank", microbatches)
    # SGD in low precision: its update is linear in the gradient, so that an error is the gradient's own.
    settings.setdefault("optimizer", "adamw" if settings.get("precision") is None else "sgd")
    settings.setdefault("max_norm", 0.5)
    settings.setdefault("steps", 2)
    assert_parallel_equals_serial(
        "hybrid_parallel",
        model,
        world_size=pp_size * ranks_per_stage,
        plugin_arguments=plugin_arguments,
        **settings,
    )


# What is given to models that don't say by themselves how they run.


def take_features(x: Any, y: Any) -> Any:
    """Returns what the first module needs of a batch."""
    return x
