"""LoRA on a base that bitsandbytes has quantized (QLoRA): as in one process with peft, or an error."""

from __future__ import annotations

import warnings
from pathlib import Path

import peft
import pytest
import torch
from harness import preload, run_ranks
from lora_cases import PLUGINS, TENSOR_PARALLEL, batch_of, run_batch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from booster import Booster, ConfigError

pytest.importorskip("bitsandbytes")
preload("peft", "transformers.models.llama.modeling_llama")

KINDS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Folder of a small Llama."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path / "base")
    return tmp_path


def quantized(folder: Path, kind: str) -> nn.Module:
    config = BitsAndBytesConfig(**KINDS[kind])
    return AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=config, device_map={"": "cpu"})


def config() -> peft.LoraConfig:
    torch.manual_seed(0)
    return peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


def train(kind: str, plugin: str, folder: Path) -> list[float]:
    """Trains under a plugin, "peft" for peft and torch alone, and saves the adapter."""
    warnings.simplefilter("ignore")  # of bitsandbytes about its kernels
    booster = Booster(plugin=PLUGINS["none" if plugin == "peft" else plugin]())
    model = quantized(folder, kind)
    model = (
        peft.get_peft_model(model, config()) if plugin == "peft" else booster.enable_lora(model, lora_config=config())
    )
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01, eps=1e-3)
    if plugin != "peft":
        model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for _ in range(3):
        if plugin == "peft":
            loss = model(**batch_of("llama", booster.plugin)).loss
            loss.backward()
            losses.append(float(loss.detach()))
        else:
            losses.append(run_batch(booster, model, batch_of("llama", booster.plugin), optimizer))
        optimizer.step()
        optimizer.zero_grad()
    if plugin == "peft":
        model.save_pretrained(folder / plugin)
    else:
        booster.save_lora_as_pretrained(model, folder / plugin)
    return losses


@pytest.mark.parametrize("plugin", ["none", "torch_ddp", "zero_1", "zero_2", "torch_fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_training(folder, kind, plugin):
    expected = run_ranks(train, 1, kind, "peft", folder)[0]
    for losses in run_ranks(train, 1 if plugin == "none" else 2, kind, plugin, folder):
        assert losses == pytest.approx(expected, rel=1e-5)
    one, found = (load_file(folder / which / "adapter_model.safetensors") for which in ("peft", plugin))
    assert one.keys() == found.keys()
    for key, value in one.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


def refusal(plugin: str, folder: Path) -> str:
    warnings.simplefilter("ignore")
    booster = Booster(plugin=(PLUGINS | TENSOR_PARALLEL)[plugin]())
    model = booster.enable_lora(quantized(folder, "nf4"), lora_config=config())
    with pytest.raises(ConfigError) as caught:
        booster.boost(model)
    return str(caught.value)


@pytest.mark.parametrize("plugin", ["gemini", "tp", "pp"])
def test_plugins_that_refuse_it(folder, plugin):
    for message in run_ranks(refusal, 2, plugin, folder):
        assert "is quantized by bitsandbytes (Params4bit)" in message
        assert "use TorchFSDPPlugin" in message
