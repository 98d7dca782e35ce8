"""Checkpoints of models with adapters: without the base, from any plugin to any plugin, and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from harness import preload, run_ranks
from lora_cases import ON_FOUR, PLUGINS, TENSOR_PARALLEL, batch_of, run_batch
from oracles.joined_slices import copied_slices, gathered_over_ranks, join_slices, joined_over_ranks
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster, CheckpointError, ConfigError, LazyInitContext
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin

pytestmark = [
    pytest.mark.on_device,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # called by peft
]
preload("peft", "transformers.models.llama.modeling_llama")

LAYOUTS = {
    **{name: PLUGINS[name] for name in ("torch_ddp", "zero_1", "zero_2", "gemini", "torch_fsdp", "pp", "zbv")},
    **{name: TENSOR_PARALLEL[name] for name in ("tp", "tp_zero_1", "tp_pp")},
    "gemini_offload": lambda: GeminiPlugin(precision="fp32", placement_policy="cpu"),
    "zero_1_bf16": lambda: LowLevelZeroPlugin(stage=1, precision="bf16"),
    "gemini_bf16": lambda: GeminiPlugin(precision="bf16"),
    "tp_bf16": lambda: HybridParallelPlugin(tp_size=2, precision="bf16"),
    "pp_fp16": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp16", initial_scale=2**8),
}
IN_FP32 = [name for name in LAYOUTS if not name.endswith("16")]


def num_ranks_of(layout: str) -> int:
    return 4 if layout in ON_FOUR else 2


def adapted() -> nn.Module:
    """Adapters with dropout, of which the inactive one has trained before."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    config = {"r": 4, "lora_dropout": 0.1, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], **config))
    model.add_adapter("second", peft.LoraConfig(target_modules="all-linear", **config))
    model.set_adapter("second")
    return model


class Run:
    """Training of an adapter."""

    def __init__(self, layout: str) -> None:
        self.booster = Booster(plugin=LAYOUTS[layout]())
        raw = adapted()
        optimizer = torch.optim.AdamW([one for one in raw.parameters() if one.requires_grad], lr=0.01, eps=1e-3)
        self.model, self.optimizer, *_ = self.booster.boost(raw, optimizer)

    def train(self, num_steps: int) -> list[float]:
        """Train with accumulation over two batches and clipping."""
        losses = []
        for _ in range(2 * num_steps):
            with self.booster.accumulate(self.model, self.optimizer, 2):
                losses.append(
                    run_batch(self.booster, self.model, batch_of("llama", self.booster.plugin), self.optimizer)
                )
                self.booster.clip_grad_norm_(self.optimizer, 0.3)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        if isinstance(self.booster.plugin, HybridParallelPlugin):
            return joined_over_ranks(self.model)
        return {name: tensor.detach().clone().cpu() for name, tensor in self.model.state_dict().items()}

    def states(self) -> dict[str, torch.Tensor]:
        return join_slices(gathered_over_ranks(copied_slices(self.optimizer.checkpoint_state().slices())))


def save(layout: str, folder: Path, **options):
    run = Run(layout)
    run.train(2)
    run.booster.save(folder, run.model, run.optimizer, exclude_frozen_parameters=True, **options)
    run.booster.wait_for_checkpoints()
    return run.weights(), run.states(), run.train(2), run.weights()


def load(layout: str, folder: Path):
    run = Run(layout)
    run.train(1)  # another history
    run.booster.load(folder, run.model, run.optimizer)
    return run.weights(), run.states(), run.train(2), run.weights()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_without_the_base_is_exact(tmp_path, layout):
    ranks = run_ranks(save, num_ranks_of(layout), layout, tmp_path / "c")
    stored = load_file(tmp_path / "c" / "model.safetensors")
    assert stored
    assert all("lora_" in name for name in stored)
    assert any(".default." in name for name in stored)  # the inactive adapter, too
    assert not (tmp_path / "c" / "config.json").exists()
    for found, expected in zip(run_ranks(load, num_ranks_of(layout), layout, tmp_path / "c"), ranks, strict=True):
        assert_equal(found[0], expected[0])
        assert_equal(found[1], expected[1])
        assert found[2] == expected[2]
        assert_equal(found[3], expected[3])


PAIRS = [(one, IN_FP32[(index + 3) % len(IN_FP32)]) for index, one in enumerate(IN_FP32)]
PAIRS += [(one, IN_FP32[(index + 5) % len(IN_FP32)]) for index, one in enumerate(IN_FP32)]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_another_plugin_continues_without_the_base(tmp_path, source, target):
    weights, states, *_ = run_ranks(save, num_ranks_of(source), source, tmp_path / "c")[0]
    for found in run_ranks(load, num_ranks_of(target), target, tmp_path / "c"):
        assert_equal(found[0], weights)
        assert_equal(found[1], states)


def frozen_first(is_frozen: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[0].requires_grad_(not is_frozen)
    model[2].weight = model[0].weight  # tied, and frozen with it
    return model


def save_and_load_partly_frozen(folder: Path) -> None:
    booster = Booster(plugin=TorchDDPPlugin())
    models = {"student": frozen_first(), "teacher": nn.Linear(8, 8).requires_grad_(False)}
    boosted = {name: booster.boost(model)[0] for name, model in models.items()}
    boosted["student"](torch.randn(4, 8, device=booster.device))  # batch statistics
    booster.save(folder, boosted, exclude_frozen_parameters=True)
    statistics = boosted["student"].get_buffer("1.running_mean").clone()
    assert statistics.abs().sum() > 0
    again = {
        name: booster.boost(model)[0] for name, model in (("student", frozen_first()), ("teacher", nn.Linear(8, 8)))
    }
    with pytest.raises(CheckpointError, match=r"2 missing in the checkpoint:\s+weight\s+bias"):  # it trains now
        booster.load(folder, again)
    again["teacher"].unwrap().requires_grad_(False)
    before = {name: one.clone() for name, one in again["teacher"].state_dict().items()}
    booster.load(folder, again)
    assert torch.equal(again["student"].get_buffer("1.running_mean"), statistics)
    assert_equal(again["teacher"].state_dict(), before)
    trained, *_ = booster.boost(frozen_first(is_frozen=False))
    with pytest.raises(
        CheckpointError, match=r"exclude_frozen_parameters=True\).*\s+2 missing .*:\s+0.weight\s+0.bias"
    ):
        booster.load(folder, {"student": trained})
    with pytest.raises(CheckpointError, match="missing in the checkpoint"):  # it does not ask what is frozen
        booster.load_model(trained, folder / "student")
    with pytest.raises(ConfigError, match="exclude_frozen_parameters must be a bool"):
        booster.save(folder, boosted, exclude_frozen_parameters="yes")


def test_other_frozen_parameters(tmp_path):
    run_ranks(save_and_load_partly_frozen, 2, tmp_path / "c")
    assert load_file(tmp_path / "c" / "student" / "model.safetensors").keys() == {
        *("1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked", "2.bias")
    }


def load_base(plugin: str, folder: Path, **arguments) -> dict[str, torch.Tensor]:
    """Loads the base into a model that was never filled, after boost."""
    torch.manual_seed(1)
    booster = Booster(plugin=LAYOUTS[plugin]())
    with LazyInitContext():
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    model = booster.enable_lora(model, lora_config=peft.LoraConfig(target_modules=["q_proj", "down_proj"], **arguments))
    model, optimizer, *_ = booster.boost(
        model, torch.optim.SGD([one for one in model.parameters() if one.requires_grad])
    )
    booster.load_model(model, folder)
    run_batch(booster, model, batch_of("llama", booster.plugin), optimizer)
    optimizer.step()  # masters of copies are filled, too
    if isinstance(booster.plugin, HybridParallelPlugin):
        return joined_over_ranks(model)
    return {name: tensor.detach().clone().cpu() for name, tensor in model.state_dict().items()}


def small_base() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


@pytest.mark.parametrize("plugin", LAYOUTS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_base_is_loaded_after_boost(tmp_path, plugin, is_tied):
    base = small_base()
    if is_tied:
        base.config.tie_word_embeddings = True
        base.tie_weights()
    base.save_pretrained(tmp_path)
    expected = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "down_proj"])).state_dict()
    for found in run_ranks(load_base, num_ranks_of(plugin), plugin, tmp_path):
        for name, value in expected.items():
            if "lora_" not in name:
                dtype = found[name].dtype
                assert torch.equal(found[name], value.to(dtype)), name
            elif "lora_A" in name:  # which a load of the base leaves alone; B is 0 before the step
                assert found[name].abs().sum() > 0


@pytest.mark.parametrize("plugin", ["zero_2", "gemini", "torch_fsdp", "tp", "pp", "zero_1_bf16"])
def test_trained_copies_are_loaded_with_the_base(tmp_path, plugin):
    small_base().save_pretrained(tmp_path)
    expected = small_base().lm_head.weight
    for found in run_ranks(load_base, num_ranks_of(plugin), plugin, tmp_path, modules_to_save=["lm_head"]):
        original, copy = (
            found[f"base_model.model.lm_head.{place}.weight"]
            for place in ("original_module", "modules_to_save.default")
        )
        assert torch.equal(original, expected.to(original.dtype))
        assert not torch.equal(copy, original)
        torch.testing.assert_close(copy.float(), expected.float(), rtol=2e-2, atol=2e-3)  # one step away


def refuse_base(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'default' \(use_dora=True\) was computed from the weights of the base"):
        load_base("torch_ddp", folder, use_dora=True)


def test_a_base_under_adapters_that_depend_on_it_is_refused(tmp_path):
    small_base().save_pretrained(tmp_path)
    run_ranks(refuse_base, 2, tmp_path)
