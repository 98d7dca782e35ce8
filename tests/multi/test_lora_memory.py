"""Memory of models with adapters, as allocated: a frozen base costs its weights, or a rank's share of them."""

from __future__ import annotations

import peft
import pytest
import torch
from allocations import Allocations
from harness import preload, run_ranks
from lora_cases import PLUGINS, TENSOR_PARALLEL, run_batch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster
from booster.plugins import GeminiPlugin

pytestmark = [
    pytest.mark.on_device,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # called by peft
]
preload("peft", "transformers.models.llama.modeling_llama")

LAYOUTS = {
    **PLUGINS,
    **TENSOR_PARALLEL,
    "gemini": lambda: GeminiPlugin(precision="fp32", chunk_config_dict={"chunk_size": 2**16}),
}
# Share of the base that a rank holds between steps. Embedding and head have a hundredth of the weights.
SHARES = {"torch_ddp": 1, "zero_1": 1, "zero_2": 1, "gemini": 1 / 2, "torch_fsdp": 1 / 2, "tp": 1 / 2, "pp": 1 / 2}


def build() -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def numels() -> tuple[int, int]:
    """Return the elements of the base and of the adapter."""
    sizes = {True: 0, False: 0}
    for one in build().parameters():
        sizes[one.requires_grad] += one.numel()
    return sizes[False], sizes[True]


def bytes_of_training(plugin: str) -> tuple[int, int, int]:
    """Return the bytes after boost and after two steps, and the peak of the second step above that of inference."""
    booster = Booster(plugin=LAYOUTS[plugin]())
    ids = torch.zeros(2, 4, dtype=torch.long, device=booster.device)
    batch = {"input_ids": ids, "labels": ids}
    with Allocations() as allocations:
        raw = build()
        optimizer = torch.optim.AdamW([one for one in raw.parameters() if one.requires_grad])
        model, optimizer, *_ = booster.boost(raw, optimizer)
        allocations.mark("boosted")
        for number in (1, 2):
            allocations.mark(f"start {number}")
            run_batch(booster, model, batch, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            allocations.mark(f"end {number}")
        with torch.no_grad():
            run_batch(booster, model, batch)
        allocations.mark("inference")
    trained = allocations.peak("start 2", "end 2")
    return allocations.at("boosted"), allocations.at("end 2"), trained - allocations.peak("end 2", "inference")


@pytest.mark.parametrize("plugin", SHARES)
def test_a_frozen_base_costs_its_weights(plugin):
    base, adapter = numels()
    assert adapter < base / 100  # below what is allowed
    share, allowed = SHARES[plugin], 0.06  # paddings and buckets; gradients of the base would be at least its share
    pooled = 1 / 4 if plugin in ("torch_fsdp", "gemini") else 0  # the buffers that layers are gathered in
    for boosted, trained, above in run_ranks(bytes_of_training, 2, plugin):
        assert share <= boosted / (4 * base) < share + allowed
        assert share <= trained / (4 * base) < share + pooled + allowed
        assert above / (4 * base) < allowed
