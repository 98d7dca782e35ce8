"""Models with adapters of peft against peft in one process: every plugin, precision and way of accumulating."""

from __future__ import annotations

import pytest
from harness import preload
from parity import assert_parallel_equals_serial
from zoo import TRANSFORMERS_MODULES
from zoo.adapters import ADAPTED_MODELS, ADAPTER_MODULES

pytestmark = [
    pytest.mark.on_device,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # called by peft
]
preload(*TRANSFORMERS_MODULES, *ADAPTER_MODULES)

# Plugin and its arguments, number of ranks.
LAYOUTS = {
    "torch_ddp": ("torch_ddp", 2, {}),
    "zero_1": ("low_level_zero", 2, {"stage": 1}),
    "zero_2": ("low_level_zero", 2, {"stage": 2}),
    "gemini": ("gemini", 2, {}),
    "gemini_offload": ("gemini", 2, {"placement_policy": "cpu"}),
    "gemini_auto": ("gemini", 2, {"placement_policy": "auto"}),
    "torch_fsdp": ("torch_fsdp", 2, {}),
    "tp": ("hybrid_parallel", 2, {"tp_size": 2}),
    "tp_zero_2": ("hybrid_parallel", 4, {"tp_size": 2, "zero_stage": 2}),
    "pp": ("hybrid_parallel", 2, {"pp_size": 2, "num_microbatches": 2}),
    "pp_zero_1": ("hybrid_parallel", 4, {"pp_size": 2, "num_microbatches": 2, "zero_stage": 1}),
    "tp_pp": ("hybrid_parallel", 4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}),
}
MODELS = [entry.name for entry in ADAPTED_MODELS if entry.name != "llama_lora_bf16"]
STEPS = 4


def assert_equals_peft(model: str, layout: str, **settings) -> None:
    plugin, world_size, arguments = LAYOUTS[layout]
    samples = 4 if "pp_size" in arguments else 2
    assert_parallel_equals_serial(
        plugin,
        model,
        world_size=world_size,
        plugin_arguments=arguments,
        steps=STEPS,
        samples_per_rank=samples,
        **settings,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_clipped_training(model, layout):
    assert_equals_peft(model, layout, max_norm=0.3)


@pytest.mark.parametrize("synchronize", ["always", "no_sync", "accumulate"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_accumulation(layout, synchronize):
    assert_equals_peft("llama_lora", layout, accumulation=2, synchronize=synchronize, max_norm=0.3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_low_precision(layout, precision):
    assert_equals_peft("llama_lora", layout, precision=precision, max_norm=0.3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_base_in_bf16(layout):
    assert_equals_peft("llama_lora_bf16", layout)
