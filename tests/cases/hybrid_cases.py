"""How HybridParallelPlugin divides the ranks, and the models that its tests train under each division."""

from __future__ import annotations

from typing import Any

from parity import assert_parallel_equals_serial

# Of transformers: by the plans that it ships, and by ours.
SHIPPED_PLANS = ["llama", "qwen3", "mistral", "mistral_sliding", "gemma", "phi", "llama_padded"]
OUR_PLANS = ["gpt2", "bert", "opt", "t5", "vit", "bloom", "falcon", "falcon_groups", "falcon_alibi", "whisper"]
DERIVED_PLANS = ["user_transformer", "user_transformer_with_head_counts", "user_mixer"]
EXPERTS = ["mixtral"]
DENSE = [*SHIPPED_PLANS, *OUR_PLANS, *DERIVED_PLANS]
# Their layers hand a sequence on; the mixer's mix its places.
SEQUENCES = [model for model in DENSE if model != "user_mixer"]

# Their attention is code of their own, which sequences on an axis of their own can't be exchanged in.
OWN_ATTENTION = ["bloom", "falcon", "falcon_alibi"]
# Fused groups of heads can't be divided any further.
NUM_FUSED_GROUPS = {"falcon_groups": 2}

TP_2 = (2, {"tp_size": 2})
TP_3 = (3, {"tp_size": 3})
TP_4 = (4, {"tp_size": 4})
TP_2_DP_2 = (4, {"tp_size": 2})


def on_tensor_axis(mode: str, size: int) -> tuple[int, dict[str, Any]]:
    """Returns ranks and arguments of a mode in which the tensor-parallel ranks divide the sequence."""
    return size, {"tp_size": size, "enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}


def on_own_axis(mode: str, size: int, tp_size: int = 1, dp_size: int = 1) -> tuple[int, dict[str, Any]]:
    """Returns ranks and arguments of a mode in which other ranks divide the sequence."""
    arguments = {"sp_size": size, "enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}
    return size * tp_size * dp_size, {"tp_size": tp_size, **arguments}


MODES = {
    **{f"{mode} {size}": on_tensor_axis(mode, size) for mode in ("split_gather", "ring") for size in (2, 4)},
    **{f"{mode} {size}": on_own_axis(mode, size) for mode in ("all_to_all", "ring_attn") for size in (2, 4)},
}
ON_OWN_AXIS = [name for name in MODES if name.startswith(("all_to_all", "ring_attn"))]
LAYOUTS = {"tp 2": TP_2, "tp 4": TP_4, "tp 2 dp 2": TP_2_DP_2, **MODES}


def entry_of(plan: Any, name: str) -> Any:
    """Returns the entry of a module or bare parameter in a tensor-parallel plan."""
    return next((entry for entry in plan.entries if entry.name == name), None)


def models_under(layout: str) -> list[str]:
    """Returns the models that can be trained under a layout by name."""
    models = [*(DENSE if layout not in MODES else SEQUENCES), *EXPERTS]
    tp_size = LAYOUTS[layout][1].get("tp_size", 1)
    return [
        model
        for model in models
        if tp_size <= NUM_FUSED_GROUPS.get(model, tp_size) and not (layout in ON_OWN_AXIS and model in OWN_ATTENTION)
    ]


def assert_hybrid_equals_serial(model: str, layout: tuple[int, dict[str, Any]], *, zero_stage: int = 0, **settings):
    """Trains under the plugin and in one process; see `assert_parallel_equals_serial`."""
    world_size, arguments = layout
    arguments = {**arguments, "zero_stage": zero_stage, **settings.pop("arguments", {})}
    # SGD in low precision: its update is linear in the gradient, so that an error is the gradient's own.
    settings.setdefault("optimizer", "adamw" if settings.get("precision") is None else "sgd")
    assert_parallel_equals_serial(
        "hybrid_parallel", model, world_size=world_size, plugin_arguments=arguments, **settings
    )
