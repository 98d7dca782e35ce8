"""Monitor's loads of experts: tokens, drops and entropies equal those counted by hand; plots of them."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import get_model
from zoo.experts import LoopingClassifier

from booster import Booster, Monitor
from booster.errors import ConfigError
from booster.moe import FFNExperts, MoeLayer, Top1Router
from booster.monitor.loggers import draw_runs, read_run

EXPERTS, WIDTH = 4, 4


class Routed(nn.Module):
    """Tokens are the logits of their router; its layer drops what is more than two tokens of an expert."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        router = Top1Router(capacity_factor_train=0.1, min_capacity=2)
        self.layer = MoeLayer(WIDTH, EXPERTS, router, FFNExperts(EXPERTS, WIDTH, 8))
        self.use_reentrant = use_reentrant
        with torch.no_grad():
            for parameter in self.layer.parameters():
                if parameter.shape == (EXPERTS, WIDTH):
                    parameter.copy_(torch.eye(WIDTH))  # the gate

    def forward(self, x):
        if self.use_reentrant is None:
            return self.layer(x)
        return checkpoint(self.layer, x, use_reentrant=self.use_reentrant)


# Five tokens of expert 1 and one of expert 3.
TOKENS = torch.tensor([[0.0, 3.0, 0.0, 0.0]] * 5 + [[0.0, 0.0, 0.0, 2.0]])


def entropy(logits):
    return -sum(p * math.log(p) for p in torch.tensor(logits).softmax(-1).tolist())


def boosted(model):
    booster = Booster(device="cpu")
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))[:2]


def step(booster, model, optimizer, *inputs):
    booster.backward(model(*inputs).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_tokens_drops_and_entropies_are_those_counted_by_hand(use_reentrant):
    booster, model, optimizer = boosted(Routed(use_reentrant))
    with Monitor(model, optimizer, every=2) as monitor:
        step(booster, model, optimizer, TOKENS.clone().requires_grad_())
        with torch.no_grad():
            model.unwrap().layer(TOKENS)  # an evaluation does not count
        model.eval()
        model(TOKENS.clone().requires_grad_())
        model.train()
        step(booster, model, optimizer, TOKENS.clone().requires_grad_())
    load = monitor.record["experts"]["layer"]
    assert load["tokens"] == [0, 4, 0, 2]
    assert load["dropped"] == 6
    expected = (5 * entropy([0.0, 3.0, 0.0, 0.0]) + entropy([0.0, 0.0, 0.0, 2.0])) / 6
    assert load["entropy"] == pytest.approx(expected, rel=1e-6)
    assert not model.unwrap().layer.experts._forward_pre_hooks
    assert not model.unwrap().layer.router._forward_pre_hooks


def test_a_record_has_the_steps_since_the_last_one():
    booster, model, optimizer = boosted(Routed())
    found = []
    with Monitor(model, optimizer) as monitor:
        for tokens in (TOKENS, TOKENS[4:]):
            step(booster, model, optimizer, tokens)
            found.append(monitor.record["experts"]["layer"])
    assert [load["tokens"] for load in found] == [[0, 2, 0, 1], [0, 1, 0, 1]]
    assert [load["dropped"] for load in found] == [3, 0]


def test_a_block_that_loops_over_experts():
    torch.manual_seed(0)
    booster, model, optimizer = boosted(LoopingClassifier())
    vectors = torch.randn(7, 16)
    block = model.unwrap().blocks[0]
    expected = block.gate(vectors).softmax(-1).topk(2)[1].flatten().bincount(minlength=5).tolist()
    with Monitor(model, optimizer) as monitor:
        step(booster, model, optimizer, vectors)
    assert list(monitor.record["experts"]) == ["blocks.0", "blocks.1"]
    assert monitor.record["experts"]["blocks.0"] == {"tokens": expected, "dropped": 0, "entropy": None}


# By model: experts per token, and whether probabilities are sigmoids.
OF_TRANSFORMERS = {
    "mixtral": (2, False),
    "deepseek_v3": (2, True),
    "Llama4ForCausalLM": (2, False),
    "GptOssForCausalLM": (2, False),
    "switch": (1, False),
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_models_of_transformers(name):
    top_k, is_sigmoid = OF_TRANSFORMERS[name]
    entry = get_model(name)
    booster, model, optimizer = boosted(entry.build())
    logits = []
    for module in model.unwrap().modules():
        if type(module).__name__ in ("MixtralTopKRouter", "DeepseekV3TopkRouter"):
            module.register_forward_hook(lambda module, args, output: logits.append(output[0].detach()))
    batch = entry.make_batch(0, 2)
    with Monitor(model, optimizer) as monitor:
        booster.backward(entry.loss(model, batch), optimizer)
        optimizer.step()
    loads = monitor.record["experts"]
    num_tokens = {load["dropped"] + sum(load["tokens"]) for load in loads.values()}
    inputs = {batch["input_ids"].numel(), batch["labels"].numel()}
    assert num_tokens <= {top_k * one for one in inputs}
    for load, of_router in zip(loads.values(), logits, strict=bool(logits)):
        scores = of_router.sigmoid() if is_sigmoid else of_router.softmax(-1)
        probabilities = scores / scores.sum(-1, keepdim=True)
        expected = -(probabilities * probabilities.log()).sum(-1).mean()
        assert load["entropy"] == pytest.approx(expected.item(), rel=1e-5)


def test_a_model_without_experts_has_no_loads(tmp_path):
    booster, model, optimizer = boosted(nn.Linear(2, 2))
    with Monitor(model, optimizer, log=tmp_path / "a.jsonl") as monitor:
        step(booster, model, optimizer, torch.ones(1, 2))
    assert "experts" not in monitor.record
    with pytest.raises(ConfigError, match="no log has loads of experts"):
        draw_runs([read_run(tmp_path / "a.jsonl")], tmp_path / "a.png", ["experts"])
    draw_runs([read_run(tmp_path / "a.jsonl")], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0


def panels_of(monkeypatch, runs, path):
    """Returns the axes of a figure that is drawn."""
    from matplotlib.figure import Figure

    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: figures.append(self) or savefig(self, *args))
    draw_runs(runs, path)
    return figures[0].axes


def test_plots_draw_the_load(tmp_path, monkeypatch):
    for name in ("a", "b"):
        booster, model, optimizer = boosted(Routed())
        with Monitor(model, optimizer, log=tmp_path / f"{name}.jsonl"):
            for tokens in (TOKENS, TOKENS[4:]):
                step(booster, model, optimizer, tokens)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["experts"]["layer"]["tokens"] for line in lines] == [[0, 2, 0, 1], [0, 1, 0, 1]]
    one, other = (read_run(tmp_path / f"{name}.jsonl") for name in ("a", "b"))
    axes = panels_of(monkeypatch, [one], tmp_path / "one.png")
    (mesh,) = axes[3].collections
    assert mesh.get_array().reshape(4, 2).tolist() == [
        [0, 0],
        [pytest.approx(8 / 3), 2],
        [0, 0],
        [pytest.approx(4 / 3), 2],
    ]
    axes = panels_of(monkeypatch, [one, other], tmp_path / "both.png")
    assert [
        line.get_ydata().tolist() if hasattr(line.get_ydata(), "tolist") else list(line.get_ydata())
        for line in axes[3].lines
    ] == [[pytest.approx(8 / 3), 2]] * 2
