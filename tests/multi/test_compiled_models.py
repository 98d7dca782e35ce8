"""torch.compile before, after and in place of boost(): the numbers of one process, under every plugin."""

from __future__ import annotations

import copy

import pytest
import torch
from decoder_cases import LAYOUTS, LENGTH, VOCABULARY, Decoder, compute_loss, make_plugin
from harness import run_ranks
from hybrid_cases import OWN_ATTENTION, SEQUENCES, on_own_axis, on_tensor_axis
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from zoo import get_model, split_batch

from booster import Booster, checkpoint_activations, chunked_cross_entropy
from booster.device import current_device

pytestmark = pytest.mark.on_device

WAYS = ["before", "after", "in place", "boosted in place", "layers in place", "by argument"]


def train_compiled(layout, way, backend):
    """Return the losses of one process and of this rank, and the number of graphs and graph breaks, by step."""
    torch._dynamo.reset()
    counters.clear()
    name, _, arguments = LAYOUTS[layout]
    torch.manual_seed(0)
    serial = Decoder()
    model: nn.Module = copy.deepcopy(serial)
    serial.to(current_device())
    serial_optimizer = torch.optim.SGD(serial.parameters(), lr=0.5, momentum=0.9)
    if way == "before":
        model = torch.compile(model, backend=backend)
    for module in {"in place": [model], "layers in place": getattr(model, "blocks", [])}.get(way, []):
        module.compile(backend=backend)
    plugin = None if name is None else make_plugin(name, arguments)
    booster = Booster(plugin=plugin, compile=way == "by argument" and {"backend": backend})
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    called = torch.compile(model, backend=backend) if way == "after" else model
    if way == "boosted in place":
        model.compile(backend=backend)
    size, rank = (1, 0) if plugin is None else (plugin.dp_size, plugin.dp_rank)
    losses, compiled = [], []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, VOCABULARY, (2 * size, LENGTH), generator=generator).to(current_device())
        losses.append(float(compute_loss(serial, ids)))
        serial_optimizer.zero_grad()
        compute_loss(serial, ids).backward()
        serial_optimizer.step()
        own = ids[2 * rank : 2 * rank + 2]
        loss = compute_loss(called, own)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses[-1] = (losses[-1], loss.item())
        compiled.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return losses, compiled


QUICK = [("tp", "before", "eager"), ("tp", "after", "eager"), ("gemini", "by argument", "aot_eager")]
QUICK += [("tp", "boosted in place", "eager")]
QUICK += [("fsdp", "by argument", "aot_eager"), ("tp checkpointed", "by argument", "eager")]
GRID = [
    (layout, way, backend)
    for layout in LAYOUTS
    for way in WAYS
    for backend in ("eager", "aot_eager")
    if (layout, way, backend) not in QUICK
]


@pytest.mark.parametrize(
    ("layout", "way", "backend"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID)]
)
def test_a_compiled_model_trains_as_in_one_process(layout, way, backend):
    records, compiled = zip(
        *run_ranks(train_compiled, LAYOUTS[layout][1], layout, way, backend, timeout=240), strict=True
    )
    for steps in zip(*records, strict=True):
        serial = steps[0][0]
        found = sum(loss for _, loss in steps) / len(steps)  # of equal parts of the batch
        assert found == pytest.approx(serial, rel=2e-5)
    if way == "by argument":
        for counts in compiled:
            assert counts[0][0] > 0
            assert counts[1:] == [counts[-1]] * 3, "layers were compiled again after the second step"
            assert counts[-1][1] == 0, "graph breaks"


# Layers that ranks share experts in, and chunks of logits.
SHARING = ("mixtral", "Qwen2MoeForCausalLM", "Glm4MoeForCausalLM", "looping_classifier")


def train_layers(name, is_compiled):
    torch._dynamo.reset()
    entry, shares = get_model(name), name in SHARING
    model = entry.build() if shares else chunked_cross_entropy(entry.build(), 5)
    for module in model.modules() if is_compiled else ():
        if type(module).__name__.endswith(("DecoderLayer", "LoopingBlock")):
            module.compile(backend="eager")
    booster = Booster(plugin=make_plugin("hybrid_parallel", {"precision": "fp32", "ep_size": 2 if shares else 1}))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(3):
        batch = split_batch(entry.make_batch(step, 4), booster.plugin.dp_rank, booster.plugin.dp_size)
        loss = entry.loss(model, {key: value.to(current_device()) for key, value in batch.items()})
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_language_model(layout, way, has_own_criterion):
    torch._dynamo.reset()
    entry = get_model("llama")
    serial = entry.build()
    model = copy.deepcopy(serial)
    serial.to(current_device())
    plain = torch.optim.SGD(serial.parameters(), lr=0.1, momentum=0.9)
    model = torch.compile(model, backend="eager") if way == "before" else model
    booster = Booster(plugin=make_plugin("hybrid_parallel", {"precision": "fp32", **HEADS[layout]}))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    called = torch.compile(model, backend="eager") if way == "after" else model
    if way == "boosted in place":
        model.compile(backend="eager")
    losses = []
    for step in range(2):
        tokens = entry.make_batch(step, 2)["input_ids"].to(current_device())
        pair = []
        for one in (serial, called):
            if has_own_criterion:
                logits = one(input_ids=tokens).logits[:, :-1]
                pair.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=0.1))
            else:
                pair.append(one(input_ids=tokens, labels=tokens).loss)
        plain.zero_grad()
        pair[0].backward()
        plain.step()
        booster.backward(pair[1], optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in pair])
    return losses


HEADS = {
    "tp": {"tp_size": 2},
    "sp": {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"},
}


@pytest.mark.slow
@pytest.mark.parametrize("has_own_criterion", [False, True])
@pytest.mark.parametrize("way", ["before", "after", "boosted in place"])
@pytest.mark.parametrize("layout", HEADS)
def test_logits_in_parts_of_models_compiled_as_a_whole(layout, way, has_own_criterion):
    for losses in run_ranks(train_language_model, 2, layout, way, has_own_criterion, timeout=240):
        for expected, found in losses:
            assert found == pytest.approx(expected, rel=1e-5)


WITH_EXPERTS = {
    "ep": ("hybrid_parallel", {"precision": "fp32", "ep_size": 2}),
    "tp": ("hybrid_parallel", {"precision": "fp32", "tp_size": 2}),
    "zero 2": ("low_level_zero", {"precision": "fp32", "stage": 2}),
    "gemini": ("gemini", {"precision": "fp32"}),
    "fsdp": ("torch_fsdp", {}),
}


def train_experts(name, layout, is_compiled):
    torch._dynamo.reset()
    counters.clear()
    entry = get_model(name)
    plugin, arguments = WITH_EXPERTS[layout]
    booster = Booster(plugin=make_plugin(plugin, arguments), compile=is_compiled and {"backend": "aot_eager"})
    model = entry.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses, compiled = [], []
    for step in range(4):
        batch = split_batch(entry.make_batch(step, 4), booster.plugin.dp_rank, booster.plugin.dp_size)
        loss = entry.loss(model, {key: value.to(current_device()) for key, value in batch.items()})
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        compiled.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return losses, compiled


EXPERT_MODELS = (
    "mixtral",
    "Qwen2MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "widenet",
    "widenet_stacked",
    "widenet_reentrant",
)
EXPERT_CASES = [
    (name, layout)
    for name in EXPERT_MODELS
    for layout in WITH_EXPERTS
    if not (name.startswith("widenet") and layout == "tp")  # experts of classes of their own have no plan
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [("Qwen2MoeForCausalLM", "ep"), *(pytest.param(*one, marks=pytest.mark.slow) for one in EXPERT_CASES)],
)
def test_compiled_layers_with_experts(name, layout):
    expected, found = (
        run_ranks(train_experts, 2, name, layout, is_compiled, timeout=120) for is_compiled in (False, True)
    )
    for (losses, _), (other, compiled) in zip(expected, found, strict=True):
        assert other == pytest.approx(losses, rel=1e-5)
        assert compiled[0][0] > 0
        assert compiled[1:] == [compiled[-1]] * 3
        assert compiled[-1][1] == 0


MODEL_LAYOUTS = {
    "none": (1, {}),
    "tp": (2, {"tp_size": 2}),
    **{mode: on_tensor_axis(mode, 2) for mode in ("split_gather", "ring")},
    **{mode: on_own_axis(mode, 2) for mode in ("all_to_all", "ring_attn")},
}


def train_model(name, layout, is_compiled):
    torch._dynamo.reset()
    counters.clear()
    entry = get_model(name)
    plugin = make_plugin("hybrid_parallel", {"precision": "fp32", **MODEL_LAYOUTS[layout][1]})
    booster = Booster(plugin=plugin, compile=is_compiled and {"backend": "aot_eager"})
    model = entry.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(3):
        batch = entry.make_batch(step, 4)
        loss = entry.loss(model, {key: value.to(current_device()) for key, value in batch.items()})
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, sum(counters["graph_break"].values())


MODEL_CASES = [
    (name, layout)
    for name in SEQUENCES
    for layout in MODEL_LAYOUTS
    if layout != "none" and not (layout in ("all_to_all", "ring_attn") and name in OWN_ATTENTION)
]
QUICK_MODELS = [("bert", "tp"), ("t5", "all_to_all")]


@pytest.mark.parametrize(
    ("name", "layout"),
    [*QUICK_MODELS, *(pytest.param(*one, marks=pytest.mark.slow) for one in MODEL_CASES if one not in QUICK_MODELS)],
)
def test_graphs_end_where_they_do_in_one_process(name, layout):
    num_ranks = MODEL_LAYOUTS[layout][0]
    ((_, expected_breaks),) = run_ranks(train_model, 1, name, "none", True, timeout=120)
    expected, found = (run_ranks(train_model, num_ranks, name, layout, one, timeout=120) for one in (False, True))
    for (losses, _), (other, num_breaks) in zip(expected, found, strict=True):
        assert other == pytest.approx(losses, rel=1e-5)
        assert num_breaks <= expected_breaks


@pytest.mark.parametrize("name", [*SHARING, "llama"])
def test_layers_with_experts_and_chunks(name):
    expected, found = (run_ranks(train_layers, 2, name, is_compiled, timeout=120) for is_compiled in (False, True))
    for losses, other in zip(found, expected, strict=True):
        assert losses == pytest.approx(other, rel=1e-5)


def train_with_dropout(layout, length, is_compiled, backend="aot_eager", dropout=0.2):
    torch._dynamo.reset()
    counters.clear()
    name, _, arguments = LAYOUTS[layout]
    torch.manual_seed(0)
    model = Decoder(dropout=dropout)
    booster = Booster(plugin=make_plugin(name, arguments), compile=is_compiled and {"backend": backend})
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses = []
    for step in range(3):
        ids = torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(step))
        loss = compute_loss(model, ids.to(current_device()))
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


SHARDED = [layout for layout, (*_, arguments) in LAYOUTS.items() if {"tp_size", "sp_size"} & set(arguments)]


@pytest.mark.slow
@pytest.mark.parametrize("length", [LENGTH, LENGTH - 1])
@pytest.mark.parametrize(
    "layout", ["tp", "ring", "all_to_all", *(pytest.param(one, marks=pytest.mark.slow) for one in SHARDED)]
)
def test_dropout_and_uneven_numbers_of_tokens(layout, length):
    expected, found = (
        run_ranks(train_with_dropout, LAYOUTS[layout][1], layout, length, is_compiled, timeout=120)
        for is_compiled in (False, True)
    )
    for (losses, *_), (other, num_graphs, num_breaks) in zip(expected, found, strict=True):
        assert (num_graphs, num_breaks) == (1, 0)
        assert other == pytest.approx(losses, rel=1e-6)  # the masks are those of eager layers


@pytest.mark.slow
@pytest.mark.parametrize("layout", SHARDED)
def test_code_of_inductor(layout):
    """It overwrites the memory of tensors that are not used any more, also of those that operators have got."""
    expected, found = (
        run_ranks(train_with_dropout, LAYOUTS[layout][1], layout, LENGTH - 1, is_compiled, "inductor", 0.0, timeout=240)
        for is_compiled in (False, True)
    )
    for (losses, *_), (other, num_graphs, num_breaks) in zip(expected, found, strict=True):
        assert (num_graphs, num_breaks) == (1, 0)
        assert other == pytest.approx(losses, rel=1e-5)


class NoisyBlock(nn.Module):
    """A block whose region draws random numbers by a function."""

    def __init__(self, function):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.function = function

    def forward(self, x):
        return x + self.down(self.function(self.up(x)))


FUNCTIONS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x, p=0.5, training=True, inplace=True),
    "dropout by name": lambda x: F.dropout(input=x, p=0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "alpha dropout by default": lambda x: F.alpha_dropout(x, 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rand": lambda x: x + torch.rand(x.shape[-1], device=x.device),
    "rand_like": lambda x: x * torch.rand_like(x),
    "normal": lambda x: x + torch.normal(x, 0.5),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "gumbel": lambda x: F.gumbel_softmax(x, tau=2.0),
    "attention": lambda x: (
        F.scaled_dot_product_attention(*[x.unflatten(-1, (2, 4)).transpose(0, 1)] * 3, dropout_p=0.5)
        .transpose(0, 1)
        .flatten(1)
    ),
}


def draw_in_region(name, is_compiled, is_user):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(*(NoisyBlock(FUNCTIONS[name]) for _ in range(2)))
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    plugin = make_plugin("hybrid_parallel", {"tp_size": 2, "precision": "fp32", "plan": plan})
    for block in model if is_user else ():
        block.compile(backend="aot_eager")
    booster = Booster(plugin=plugin, compile=is_compiled and not is_user and {"backend": "aot_eager"})
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(2):
        loss = model(torch.ones(4, 8, device=current_device())).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    losses.append(model(torch.ones(4, 8, device=current_device())).mean().item() if name.startswith("dropout") else 0)
    return losses, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", *(pytest.param(one, marks=pytest.mark.slow) for one in FUNCTIONS)])
@pytest.mark.parametrize("is_user", [False, True])
def test_random_numbers_of_regions(name, is_user):
    """Ranks draw the numbers of eager layers, which differ between ranks."""
    expected, found = (run_ranks(draw_in_region, 2, name, is_compiled, is_user) for is_compiled in (False, True))
    for (losses, *_), (other, num_graphs, num_breaks) in zip(expected, found, strict=True):
        assert num_graphs > 0
        assert num_breaks == 0
        assert other == pytest.approx(losses, rel=1e-6)


def train_encoder(is_compiled):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    plugin = make_plugin("hybrid_parallel", {"precision": "fp32", **on_own_axis("all_to_all", 2)[1]})
    booster = Booster(plugin=plugin, compile=is_compiled and {"backend": "aot_eager"})
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(3):
        x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(step)).to(current_device())
        loss = model(x).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, sum(counters["graph_break"].values())


@pytest.mark.slow
def test_multi_head_attention_of_torch():
    expected, found = (run_ranks(train_encoder, 2, is_compiled) for is_compiled in (False, True))
    for (losses, _), (other, num_breaks) in zip(expected, found, strict=True):
        assert num_breaks == 0
        assert other == pytest.approx(losses, rel=1e-5)


class Stack(nn.Module):
    """Layers of twice 64 x 65 weights, a chunk each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Layer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def train_recomputed(compiled, plugin, arguments):
    """Return the losses of four steps, with layers that are recomputed."""
    torch._dynamo.reset()
    model = Stack()
    checkpoint_activations(model)
    if current_device().type != "cpu":  # which counts temporaries, too
        arguments.pop("device_memory_budget", None)
    booster = Booster(plugin=make_plugin(plugin, arguments), compile=compiled and {"backend": "aot_eager"})
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(4):
        batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(booster.device)
        loss = model(batch).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_compiled_layers_are_recomputed_with_weights_that_were_kept_or_evicted():
    num_weights = 2 * 64 * 65
    own_and_four_chunks = 4 * 4 * 6 * num_weights // 2 + 4 * 4 * num_weights
    evicting = {"precision": "fp32", "chunk_config_dict": {"chunk_size": num_weights}, "max_prefetch": 0}
    evicting["device_memory_budget"] = own_and_four_chunks
    expected = run_ranks(train_recomputed, 2, False, "torch_ddp", {})[0]
    for plugin, arguments in (("gemini", {"precision": "fp32"}), ("gemini", evicting), ("torch_fsdp", {})):
        for losses in run_ranks(train_recomputed, 2, True, plugin, arguments, timeout=120):
            assert losses == pytest.approx(expected, rel=1e-5)
