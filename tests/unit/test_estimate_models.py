"""Models and batches that `booster estimate` is asked about: known names, configs, functions of scripts."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from booster.errors import ConfigError
from booster.estimate import estimate_memory
from booster.estimate.model_sources import PRESETS, example_batch, load_model

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("llama-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-405b", 405_853_388_800),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("gemma-2b", 2_506_172_416),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("gpt-neox-20b", 20_554_567_680),
        ("opt-6.7b", 6_658_473_984),
        ("bloom-176b", 176_247_271_424),
        ("bert-base", 109_514_298),
        ("t5-small", 60_506_624),
        ("vit-base", 86_567_656),
        ("whisper-large", 1_543_490_560),
    ],
)
def test_known_models_have_the_published_sizes(name, num_parameters):
    source = load_model(name)
    assert sum(one.numel() for one in source.model.parameters()) == num_parameters
    assert all(one.is_meta for one in source.model.parameters())


def test_every_known_model_can_be_made(monkeypatch):
    for name, entries in PRESETS.copy().items():
        few = {key: 1 for key in entries if key.endswith(("_layers", "n_layer"))}
        monkeypatch.setitem(PRESETS, name, {**entries, **few})
        source = load_model(name)
        assert source.batch_text, name
        assert not source.notes, name
    monkeypatch.undo()
    assert load_model("LLAMA-7B").name == "llama-7b"


def test_formats_batches_and_lengths():
    source = load_model("gpt2", batch=3, sequence=17, dtype=torch.bfloat16)
    assert {one.dtype for one in source.model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    assert {name: tuple(one.shape) for name, one in source.batch.items()} == {"input_ids": (3, 17), "labels": (3, 17)}
    assert tuple(load_model("gpt2").batch["input_ids"].shape) == (1, 1024)
    assert tuple(load_model("llama-3-8b").batch["input_ids"].shape) == (1, 2048)
    pictures = load_model("vit-base", batch=2).batch
    assert tuple(pictures["pixel_values"].shape) == (2, 3, 224, 224)
    assert tuple(pictures["labels"].shape) == (2,)
    sounds = load_model("whisper-small").batch
    assert tuple(sounds["input_features"].shape) == (1, 80, 3000)
    assert tuple(sounds["labels"].shape) == (1, 448)
    with pytest.raises(ConfigError, match="--seq 1025 exceeds the 1024 positions of GPT2LMHeadModel: give at most"):
        load_model("gpt2", sequence=1025)


def test_a_config_is_read_by_its_class_or_by_its_task(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    assert type(load_model(str(path)).model).__name__ == "LlamaForCausalLM"
    assert type(load_model(str(tmp_path)).model).__name__ == "LlamaForCausalLM"
    path.write_text(json.dumps({key: value for key, value in TINY.items() if key != "architectures"}))
    assert type(load_model(str(path)).model).__name__ == "LlamaForCausalLM"
    path.write_text(json.dumps({**TINY, "architectures": ["LlamaForSequenceClassification"]}))
    assert tuple(load_model(str(path), batch=4).batch["labels"].shape) == (4,)
    path.write_text(json.dumps({**TINY, "architectures": ["LlamaModel"]}))
    source = load_model(str(path))
    assert "LlamaModel returns no loss" in source.notes[0]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({**TINY, "model_type": "llama9"}, "rejects this config"),
        ({**TINY, "architectures": ["LlamaForEverything"]}, "has no LlamaForEverything"),
        ({**TINY, "quantization_config": {"bits": 4}}, "has quantized weights"),
        ({"hidden_size": 3}, "has no entry model_type"),
        ([1], "has no entry model_type"),
        ("{", "can't be read as JSON"),
    ],
)
def test_configs_that_cannot_work(tmp_path, entries, message):
    path = tmp_path / "config.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    with pytest.raises(ConfigError, match=message):
        load_model(str(path))


SCRIPT = """
import torch
from torch import nn
from torch import nn

def alone(): return nn.Linear(4, 3)
def with_batch(): return nn.Linear(4, 3), torch.empty(2, 4)
def in_full(): return nn.Linear(4, 3), torch.empty(2, 4), lambda outputs, batch: outputs.mean()
def three(): return 3
def looks(): return nn.Linear(int(torch.ones(1)), 3)
def no_tensor(): return nn.Linear(4, 3), "text"
def no_criterion(): return nn.Linear(4, 3), torch.empty(2, 4), 1
"""


def test_functions_of_a_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    source = load_model(f"{path}:in_full")
    assert source.model.weight.is_meta
    assert source.criterion(torch.ones(2), None) == 1
    assert tuple(load_model(f"{path}:with_batch").batch.shape) == (2, 4)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (":alone", "no example batch for Linear"),
        (":three", r"three\(\) returned a int: return the model"),
        (":looks", r"looks\(\) failed with .*create those whose values are read with device='cpu'"),
        (":no_tensor", "as a batch, which has no tensor"),
        (":no_criterion", "as a criterion: return a function"),
        (":missing", "has no function missing; it has alone, with_batch"),
        ("", "has no function of the script: write .*train.py:build_model"),
    ],
)
def test_functions_that_cannot_work(tmp_path, function, message):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    with pytest.raises(ConfigError, match=message):
        load_model(f"{path}{function}")


def test_scripts_and_names_that_cannot_work(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        load_model(str(tmp_path / "nowhere.py:build"))
    with pytest.raises(ConfigError, match=r"is not a known model or a file.*Did you mean llama-7b"):
        load_model("llama7b")
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit(3)")
    with pytest.raises(ConfigError, match="importing the script failed with SystemExit: 3"):
        load_model(f"{path}:build")
    path.write_text(SCRIPT)
    with pytest.raises(ConfigError, match="--batch or --seq was given too"):
        load_model(f"{path}:with_batch", batch=2)


def test_models_whose_batches_are_not_known_are_told():
    with pytest.raises(ConfigError, match="its forward takes input, but supported are"):
        example_batch(torch.nn.Linear(2, 2))


def test_a_pipeline_of_a_users_own_model():
    """Its first batch is checked by its values, of which fake tensors have none."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, hidden):
            return hidden + self.linear(hidden).relu()

    settings = {"pp_size": 2, "num_microbatches": 2, "precision": "fp32"}
    model = nn.Sequential(*(Residual() for _ in range(4)))
    estimate = estimate_memory(
        model,
        "hybrid_parallel",
        batch=torch.randn(8, 32),
        criterion=lambda outputs, _: outputs.square().mean(),
        num_ranks=2,
        settings=settings,
    )
    assert estimate.memory.steady_state.parameters == 4 * 2 * (32 * 32 + 32)  # fp32, two layers on each stage
