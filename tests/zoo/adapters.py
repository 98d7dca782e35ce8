"""Models with adapters of peft: frozen bases, and few parameters that train.

peft is imported when a model is built: without it, the rest of the zoo works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zoo.entry import ZooEntry
from zoo.transformers_models import TRANSFORMERS_MODELS

# For harness.preload, beside TRANSFORMERS_MODULES.
ADAPTER_MODULES = ("peft", "transformers.models.bert.modeling_bert")

_BASES = {entry.name: entry for entry in TRANSFORMERS_MODELS}


def adapted(base: nn.Module, configs: dict[str, dict[str, Any]]) -> nn.Module:
    """Returns a model with adapters that are not zero at the start; the last of them trains.

    They are scaled by 1/2 (DoRA: by its norms): as large as the base, they would amplify roundings of low precision.
    """
    import peft

    model: Any = None
    for name, settings in configs.items():
        config = peft.LoraConfig(r=4, lora_alpha=2, init_lora_weights=False, **settings)
        if model is None:
            model = peft.get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
            model.set_adapter(name)
    return model


def _entry(name: str, base: str, configs: dict[str, dict[str, Any]], dtype: torch.dtype | None = None) -> ZooEntry:
    of_base = _BASES[base]

    def build(construct: Callable[[], nn.Module]) -> nn.Module:
        return adapted(construct() if dtype is None else construct().to(dtype), configs)

    def construct_deep(num_layers: int) -> nn.Module:
        assert of_base.construct_deep is not None
        return build(partial(of_base.construct_deep, num_layers))

    return replace(
        of_base,
        name=name,
        construct=partial(build, of_base.construct),
        construct_deep=construct_deep,
        tied=(),
        computes_in_bf16=dtype is torch.bfloat16,
    )


_ATTENTION = ["q_proj", "v_proj"]

ADAPTED_MODELS = (
    _entry("llama_lora", "llama", {"default": {"target_modules": "all-linear"}}),
    _entry("llama_rslora", "llama", {"default": {"target_modules": _ATTENTION, "use_rslora": True}}),
    _entry("llama_dora", "llama", {"default": {"target_modules": "all-linear", "use_dora": True}}),
    _entry("llama_two_adapters", "llama", {name: {"target_modules": _ATTENTION} for name in ("default", "second")}),
    _entry(
        "llama_modules_to_save",
        "llama",
        {"default": {"target_modules": _ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]}},
    ),
    _entry("llama_lora_bf16", "llama", {"default": {"target_modules": "all-linear"}}, torch.bfloat16),
)
