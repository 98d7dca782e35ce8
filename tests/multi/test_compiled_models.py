"""torch.compile before, after and in place of boost(): the numbers of one process, under every plugin."""

from __future__ import annotations

import copy

import pytest
import torch
from decoder_cases import LAYOUTS, LENGTH, VOCABULARY, Decoder, compute_loss, make_plugin
from harness import run_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from zoo import get_model, split_batch

from booster import Booster, ConfigError, chunked_cross_entropy
from booster.device import current_device

pytestmark = pytest.mark.on_device

WAYS = ["before", "after", "in place", "layers in place", "by argument"]


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
QUICK += [("fsdp", "by argument", "aot_eager"), ("tp checkpointed", "by argument", "eager")]
# Layers whose graphs end at the attention over a sharded sequence, or at overlapped chunks.
COMMUNICATING = [
    layout
    for layout, (_, _, arguments) in LAYOUTS.items()
    if arguments.get("sequence_parallelism_mode", "split_gather") != "split_gather"
]
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
            assert layout in COMMUNICATING or counts[-1][1] == 0, "graph breaks"


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


@pytest.mark.parametrize("name", [*SHARING, "llama"])
def test_layers_with_experts_and_chunks(name):
    expected, found = (run_ranks(train_layers, 2, name, is_compiled, timeout=120) for is_compiled in (False, True))
    for losses, other in zip(found, expected, strict=True):
        assert losses == pytest.approx(other, rel=1e-5)


class NoisyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.dropout(self.up(x), 0.5, self.training))


def train_with_unknown_numbers(setting):
    torch._dynamo.reset()
    model = nn.Sequential(*(NoisyBlock() for _ in range(2)))
    if setting:
        for block in model:
            block.dropout = 0.5
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    plugin = make_plugin("hybrid_parallel", {"tp_size": 2, "precision": "fp32", "plan": plan})
    booster = Booster(plugin=plugin, compile={"backend": "eager"})
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        model(torch.ones(4, 8, device=current_device()))
    except ConfigError as error:
        return str(error)
    return None


def test_random_numbers_that_no_setting_tells_of():
    for message in run_ranks(train_with_unknown_numbers, 2, False):
        assert "a compiled NoisyBlock drew random numbers" in message
    assert run_ranks(train_with_unknown_numbers, 2, True) == [None, None]
