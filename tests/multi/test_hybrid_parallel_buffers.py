"""HybridParallelPlugin and buffers of every kind: trained, saved and loaded as in one process, whatever the layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import RanksFailed, run_ranks
from safetensors.torch import load_file
from torch import nn

from booster import Booster
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin

pytestmark = pytest.mark.on_device

NUM_MICROBATCHES, SAMPLES, STEPS = 2, 8, 2
PP_2 = {"pp_size": 2, "num_microbatches": NUM_MICROBATCHES}
ZBV = {"pp_style": "zbv", "num_model_chunks": 2}
INTERLEAVED = {"pp_style": "interleaved", "num_model_chunks": 2}
LAYOUTS = {
    "one": (1, {}),
    "tp 2": (2, {"tp_size": 2}),
    "pp 2": (2, PP_2),
    "pp 2 zbv": (2, {**PP_2, **ZBV}),
    "pp 2 interleaved": (2, {**PP_2, **INTERLEAVED}),
    "tp 2 dp 2": (4, {"tp_size": 2}),
    "tp 2 dp 2 zero 1": (4, {"tp_size": 2, "zero_stage": 1}),
    "tp 2 dp 2 zero 2": (4, {"tp_size": 2, "zero_stage": 2}),
    "tp 2 pp 2": (4, {"tp_size": 2, **PP_2}),
    "pp 2 dp 2 zero 1": (4, {**PP_2, "zero_stage": 1}),
    "pp 2 dp 2 zbv": (4, {**PP_2, **ZBV}),
    "sp 2": (2, {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}),
}
WAYS = {
    "sharded": {"shard": True},
    "sharded bin": {"shard": True, "use_safetensors": False},
    "one.safetensors": {},
    "one.bin": {"use_safetensors": False},
    "async": {"shard": True, "use_async": True},
}
TIED = "layers.0.table"


class Layer(nn.Module):
    """Buffers without dimensions, bool, integer, that count, shared by all layers, and not persistent."""

    def __init__(self, width: int, table: torch.Tensor) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("gain", torch.tensor(0.5))
        self.register_buffer("table", table)
        self.register_buffer("is_even", torch.tensor([True, False] * (width // 2)))
        self.register_buffer("offset", torch.randn(width), persistent=False)
        self.register_buffer("num_calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        heads = self.norm(x).unsqueeze(1)
        x = x + F.scaled_dot_product_attention(heads, heads, heads).squeeze(1)
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.gain + self.table * self.is_even + self.offset


class Buffered(nn.Module):
    """Statistics before, behind and without parameters, and buffers of the model itself, beside those of its layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        table = torch.randn(width)
        self.stem_norm = nn.BatchNorm1d(5, affine=False)
        self.embed = nn.Linear(5, width)
        self.layers = nn.ModuleList([Layer(width, table) for _ in range(4)])
        self.tail_norm = nn.BatchNorm1d(width, affine=False)
        self.head_norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 3)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("num_outputs", torch.zeros((), dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, length, 5) to (batch, length, 3)."""
        self.num_batches += 1
        x = self.embed(self.stem_norm(x.mT).mT) * self.scale
        for layer in self.layers:
            x = layer(x)
        self.num_outputs = self.num_outputs + 1
        return self.head(self.head_norm(self.tail_norm(x.mT)).mT)


def build(kind: type[nn.Module], *, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind()


def criterion(outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (outputs - x.sum(dim=-1, keepdim=True)).square().mean()


def boosted(layout: str, kind: type[nn.Module] = Buffered, *, seed: int = 0):
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **LAYOUTS[layout][1]))
    raw = build(kind, seed=seed)
    return booster, *booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.05))[:2]


def train(layout: str, booster, model, optimizer, num_steps: int = STEPS) -> None:
    """Every layout computes the same microbatches, of which each data-parallel rank has its part."""
    plugin = booster.plugin
    for step in range(num_steps):
        whole = torch.randn(SAMPLES, 4, 5, generator=torch.Generator().manual_seed(step)).to(booster.device)
        parts = [one.chunk(plugin.dp_size)[plugin.dp_rank] for one in whole.chunk(NUM_MICROBATCHES)]
        if "pp" in layout:
            booster.execute_pipeline(iter([torch.cat(parts)]), model, criterion, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            continue
        for part in parts:
            with booster.accumulate(model, optimizer, NUM_MICROBATCHES):
                booster.backward(criterion(model(part), part), optimizer)
                optimizer.step()
                optimizer.zero_grad()


def own_buffers(model) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}


def save_in_every_way(layout: str, path: str):
    booster, model, optimizer = boosted(layout)
    at_first = own_buffers(model)
    train(layout, booster, model, optimizer)
    for way, arguments in WAYS.items():
        booster.save_model(model, Path(path) / way, **arguments)
    booster.save(Path(path) / "training", model, optimizer)
    booster.wait_for_checkpoints()
    return at_first


def load_in_every_way(layout: str, path: str):
    found = {}
    for way in (*WAYS, "training"):
        booster, model, optimizer = boosted(layout, seed=1)
        if way == "training":
            booster.load(Path(path) / way, model, optimizer)
        else:
            booster.load_model(model, Path(path) / way)
        found[way] = own_buffers(model)
    return found


def serial_buffers() -> dict[str, torch.Tensor]:
    """The buffers that one process has after the same training, in plain torch."""
    model = build(Buffered)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        whole = torch.randn(SAMPLES, 4, 5, generator=torch.Generator().manual_seed(step))
        for part in whole.chunk(NUM_MICROBATCHES):
            (criterion(model(part), part) / NUM_MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return own_buffers(model)


def assert_equals_serial(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, buffer in found.items():
        if buffer.is_floating_point():
            # Sums of products in another order: some units of the last place of values around 1.
            torch.testing.assert_close(buffer, expected[name], rtol=1e-5, atol=1e-5, msg=name)
        else:
            assert torch.equal(buffer, expected[name]), name


QUICK = [("tp 2", ["one", "pp 2"]), ("pp 2 zbv", ["one", "tp 2"]), ("tp 2 dp 2 zero 2", ["one"])]
QUICK += [("pp 2 dp 2 zero 1", ["one"]), ("one", ["tp 2", "pp 2"])]
ALL = [(saved, [one for one in LAYOUTS if "dp" not in one]) for saved in LAYOUTS]


@pytest.mark.parametrize(
    ("saved", "loaded"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL)], ids=str
)
def test_a_save_has_the_buffers_of_one_process_and_loads_into_every_layout(tmp_path, saved, loaded):
    raw, serial = build(Buffered), serial_buffers()
    persistent = raw.state_dict().keys() & serial.keys()
    for at_first in run_ranks(save_in_every_way, LAYOUTS[saved][0], saved, str(tmp_path)):
        values = dict(raw.named_buffers(remove_duplicate=False))
        assert all(torch.equal(buffer, values[name]) for name, buffer in at_first.items())
    stored = {name: tensor for name, tensor in load_file(tmp_path / "one.safetensors").items() if name in serial}
    assert stored.keys() == {name for name in persistent if not name.endswith(".table")} | {TIED}
    assert_equals_serial(stored, serial)
    expected = stored | {f"layers.{index}.table": stored[TIED] for index in range(4)}
    expected |= {name: buffer for name, buffer in build(Buffered, seed=1).named_buffers() if name not in persistent}
    for layout in loaded:
        for found in run_ranks(load_in_every_way, LAYOUTS[layout][0], layout, str(tmp_path)):
            for way, buffers in found.items():
                assert buffers
                for name, buffer in buffers.items():
                    assert torch.equal(buffer, expected[name]), f"{name} of {saved}, {way}, as {layout}"


def train_and_tell(layout: str, kind: type[nn.Module]):
    booster, model, optimizer = boosted(layout, kind)
    at_first = own_buffers(model)
    train(layout, booster, model, optimizer)
    return at_first, own_buffers(model)


@pytest.mark.parametrize("layout", ["pp 2", "pp 2 zbv", pytest.param("pp 2 interleaved", marks=pytest.mark.slow)])
def test_stages_hold_the_same_of_buffers_that_they_share(layout):
    serial = serial_buffers()
    for at_first, trained in run_ranks(train_and_tell, 2, layout, Buffered):
        assert at_first["num_batches"] == 0  # to plan the stages the forward was recorded, with other buffers
        assert trained["num_batches"] == trained["num_outputs"] == STEPS * NUM_MICROBATCHES
        assert_equals_serial(trained, serial)


class CountsTogether(Buffered):
    """Layers that change one buffer, each in its turn."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.num_calls = self.layers[0].num_calls


def test_a_buffer_that_layers_of_several_stages_change_is_refused():
    with pytest.raises(RanksFailed, match=r"'layers\.0\.num_calls' = .* was changed in a forward by 0, 1: .*pp_size=1"):
        run_ranks(train_and_tell, 2, "pp 2", CountsTogether)


class Watched(nn.Module):
    """Keeps the largest value that a layer computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return x


class WatchedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.watched, self.down = nn.Linear(5, 16), Watched(), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.watched(self.up(x).relu()))


class WatchedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([WatchedLayer() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def save_what_differs(path: str):
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    plugin = HybridParallelPlugin(tp_size=2, precision="fp32", plan=plan, broadcast_buffers=False)
    booster = Booster(plugin=plugin)
    raw = build(WatchedModel)
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.05))
    train("tp 2", booster, model, optimizer)
    messages = []
    for save in (lambda: booster.save_model(model, path), lambda: booster.save(path, model, optimizer)):
        with pytest.raises(Exception, match=r"layers\.0\.watched\.largest") as caught:
            save()
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    return messages


def test_a_buffer_of_which_each_rank_has_another_value_is_not_saved(tmp_path):
    for messages in run_ranks(save_what_differs, 4, str(tmp_path / "c")):
        for message in messages:
            assert message.startswith("CheckpointError: ")
            assert "ranks that share layers or sequences have different values of the buffer" in message
    assert not list(tmp_path.iterdir())


class Observed(nn.Module):
    """An MLP that observes the largest of its hidden features, or of its tokens."""

    def __init__(self, observes: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.observes = observes
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, length, 8) to (batch, length, 8)."""
        heads = x.unsqueeze(1)
        x = x + F.scaled_dot_product_attention(heads, heads, heads).squeeze(1)
        hidden = F.gelu(self.up(x))
        if self.training:
            seen = hidden if self.observes == "features" else x
            self.largest.copy_(torch.maximum(self.largest, seen.detach().amax()))
        return self.down(hidden)


@pytest.mark.parametrize(("layout", "observes"), [("tp 2", "features"), ("sp 2", "tokens")])
def test_a_buffer_of_a_ranks_own_features_or_tokens_is_an_error(layout, observes):
    with pytest.raises(RanksFailed, match=r"different values of the buffer '0\.largest'"):
        run_ranks(train_observed, 2, layout, observes)
    run_ranks(train_observed, 2, "tp 2", "tokens")


def train_observed(layout: str, observes: str) -> None:
    torch.manual_seed(0)
    raw = nn.Sequential(Observed(observes), Observed(observes))
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **LAYOUTS[layout][1]))
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.05))
    x = torch.randn(2, 8, 8).to(booster.device)
    booster.backward(model(x).square().mean(), optimizer)
    optimizer.step()
