"""Monitor's loads of experts: tokens, drops and entropies equal those counted by hand; plots of them."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import get_model
from zoo.experts import ListedExperts, LoopingClassifier

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
    load = monitor.record["experts"]["layer.experts"]
    assert load["tokens"] == [0, 4, 0, 2]
    assert load["dropped"] == 6
    expected = (5 * entropy([0.0, 3.0, 0.0, 0.0]) + entropy([0.0, 0.0, 0.0, 2.0])) / 6
    assert load["entropy"] == pytest.approx(expected, rel=1e-6)
    modules = list(model.modules())
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in modules)


def test_a_record_has_the_steps_since_the_last_one():
    booster, model, optimizer = boosted(Routed())
    found = []
    with Monitor(model, optimizer) as monitor:
        for tokens in (TOKENS, TOKENS[4:]):
            step(booster, model, optimizer, tokens)
            found.append(monitor.record["experts"]["layer.experts"])
    assert [load["tokens"] for load in found] == [[0, 2, 0, 1], [0, 1, 0, 1]]
    assert [load["dropped"] for load in found] == [3, 0]


def test_a_block_that_loops_over_experts():
    torch.manual_seed(0)
    booster, model, optimizer = boosted(LoopingClassifier())
    vectors = torch.randn(7, 16)
    block = model.unwrap().blocks[0]
    scores = block.gate(vectors).detach().softmax(-1)
    expected = scores.topk(2)[1].flatten().bincount(minlength=5).tolist()
    entropy = -(scores * scores.log()).sum(-1).mean().item()
    with Monitor(model, optimizer) as monitor:
        step(booster, model, optimizer, vectors)
    assert list(monitor.record["experts"]) == ["blocks.0.experts", "blocks.1.experts"]
    load = monitor.record["experts"]["blocks.0.experts"]
    assert load == {"tokens": expected, "dropped": 0, "entropy": pytest.approx(entropy, rel=1e-6)}


class Listed(nn.Module):
    """Layers of different numbers of experts in one list, called by keywords in another order."""

    def __init__(self):
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(WIDTH, number) for number in (4, 5))
        self.experts = nn.ModuleList(ListedExperts(number, WIDTH) for number in (4, 5))

    def forward(self, x):
        for router, experts in zip(self.routers, self.experts, strict=True):
            weights, index = router(x).softmax(-1).topk(2)
            x = x + experts(x, weights=weights, expert_index=index)
        return x


def test_layers_in_one_list_are_apart():
    torch.manual_seed(0)
    booster, model, optimizer = boosted(Listed())
    with Monitor(model, optimizer) as monitor:
        step(booster, model, optimizer, TOKENS)
    loads = monitor.record["experts"]
    assert {name: len(load["tokens"]) for name, load in loads.items()} == {"experts.0": 4, "experts.1": 5}
    assert [sum(load["tokens"]) for load in loads.values()] == [2 * len(TOKENS)] * 2
    expected = model.unwrap().routers[0](TOKENS).topk(2)[1].flatten().bincount(minlength=4).tolist()
    assert loads["experts.0"]["tokens"] == expected
    assert loads["experts.0"]["entropy"] is None  # several routers around it


class Stacked(nn.Module):
    """Experts with stacked parameters, in operations that torch.compile puts into one graph."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x, index, weights):
        weights = x.new_zeros(len(x), EXPERTS).scatter(1, index, weights)
        return torch.einsum("td,edf,te->tf", x, self.weight, weights)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Stacked()

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, index, weights)


@pytest.mark.parametrize("is_compiled_before", [False, True])
def test_a_layer_compiled_into_one_graph(is_compiled_before):
    torch._dynamo.reset()
    torch.manual_seed(0)
    raw = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
    raw[0].compile(fullgraph=True, backend="aot_eager")
    booster, model, optimizer = boosted(raw)
    if is_compiled_before:
        step(booster, model, optimizer, TOKENS)
    with Monitor(model, optimizer, every=2) as monitor:
        for _ in range(2):
            step(booster, model, optimizer, TOKENS)
    expected = raw[0].gate(TOKENS).topk(2)[1].flatten().bincount(minlength=EXPERTS).tolist()
    loads = monitor.record["experts"]
    if is_compiled_before:  # torch leaves out hooks that are added later
        assert loads == {}
    else:
        assert loads["0.experts"]["tokens"] == [2 * count for count in expected]
        assert loads["0.experts"]["entropy"] > 0
    torch._dynamo.reset()


# By model: experts per token, whether probabilities are sigmoids, and the place of the logits in a router's output.
OF_TRANSFORMERS = {
    "mixtral": (2, False, 0),
    "deepseek_v3": (2, True, 0),
    "Llama4ForCausalLM": (2, True, 1),
    "GptOssForCausalLM": (2, False, 0),
    "Cohere2MoeForCausalLM": (2, False, 0),  # its forward calls both, as the configuration says
    "MiniMaxM2ForCausalLM": (2, True, 0),  # the block has the correction bias
    "Inkling2ForCausalLM": (2, True, 0),  # a module computes the sigmoid
    "switch": (1, False, 2),
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_models_of_transformers(name):
    top_k, is_sigmoid, position = OF_TRANSFORMERS[name]
    entry = get_model(name)
    booster, model, optimizer = boosted(entry.build())
    entropies = {}

    def compute_entropy(layer, output):
        logits = output[position].detach()
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
        probabilities = scores / scores.sum(-1, keepdim=True)
        entropies[layer] = -(probabilities * probabilities.log()).sum(-1).mean().item()

    for key, module in model.unwrap().named_modules():
        if type(module).__name__.endswith("Router"):
            layer = f"{key.rpartition('.')[0]}.experts"
            module.register_forward_hook(lambda module, args, output, layer=layer: compute_entropy(layer, output))
    batch = entry.make_batch(0, 2)
    with Monitor(model, optimizer) as monitor:
        booster.backward(entry.loss(model, batch), optimizer)
        optimizer.step()
    loads = monitor.record["experts"]
    assert loads.keys() == entropies.keys()
    inputs = {top_k * one.numel() for one in (batch["input_ids"], batch["labels"])}
    for layer, load in loads.items():
        assert load["dropped"] + sum(load["tokens"]) in inputs
        assert load["entropy"] == pytest.approx(entropies[layer], rel=1e-5)


def test_a_model_without_experts_has_no_loads(tmp_path):
    booster, model, optimizer = boosted(nn.Linear(2, 2))
    with Monitor(model, optimizer, log=tmp_path / "a.jsonl") as monitor:
        step(booster, model, optimizer, torch.ones(1, 2))
    assert "experts" not in monitor.record
    with pytest.raises(ConfigError, match="no log has loads of experts"):
        draw_runs([read_run(tmp_path / "a.jsonl")], tmp_path / "a.png", ["experts"])
    draw_runs([read_run(tmp_path / "a.jsonl")], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0


def panels_of(monkeypatch, runs, path, *panels):
    """Returns the axes of a figure that is drawn."""
    from matplotlib.figure import Figure

    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: figures.append(self) or savefig(self, *args))
    draw_runs(runs, path, *panels)
    return figures[0].axes


def test_plots_draw_the_load(tmp_path, monkeypatch):
    for name in ("a", "b"):
        booster, model, optimizer = boosted(Routed())
        with Monitor(model, optimizer, log=tmp_path / f"{name}.jsonl"):
            for tokens in (TOKENS, TOKENS[4:]):
                step(booster, model, optimizer, tokens)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["experts"]["layer.experts"]["tokens"] for line in lines] == [[0, 2, 0, 1], [0, 1, 0, 1]]
    one, other = (read_run(tmp_path / f"{name}.jsonl") for name in ("a", "b"))
    axes = panels_of(monkeypatch, [one], tmp_path / "one.png")
    (image,) = axes[3].images
    assert image.get_array().tolist() == [[0, 0], [pytest.approx(8 / 3), 2], [0, 0], [pytest.approx(4 / 3), 2]]
    (dropped,) = axes[5].lines  # beside the panel; before it, the color bar
    assert list(dropped.get_xdata()) == [1, 2]
    assert list(dropped.get_ydata()) == [0.5, 0]
    axes = panels_of(monkeypatch, [one, other], tmp_path / "both.png")
    assert [
        line.get_ydata().tolist() if hasattr(line.get_ydata(), "tolist") else list(line.get_ydata())
        for line in axes[3].lines
    ] == [[pytest.approx(8 / 3), 2]] * 2


def test_a_plot_of_layers_that_some_records_lack(tmp_path, monkeypatch):
    records = [
        {"step": 10, "steps": 10, "seconds": 0.1, "experts": {"a": {"tokens": [1, 3], "dropped": 0, "entropy": None}}},
        {"step": 20, "steps": 10, "seconds": 0.1, "experts": {}},
        {"step": 30, "steps": 10, "seconds": 0.1, "experts": {"b": {"tokens": [2], "dropped": 0, "entropy": None}}},
    ]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    axes = panels_of(monkeypatch, [read_run(tmp_path / "a.jsonl")], tmp_path / "a.png", ["experts"])
    (image,) = axes[0].images
    assert image.get_array().filled(-1).tolist() == [[0.5, -1], [1.5, -1], [-1, 1]]
    assert axes[0].get_xlim() == (0, 30)
    assert len(axes) == 2  # the color bar; no token is dropped
