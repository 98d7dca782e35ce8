"""HybridParallelPlugin in stages: saves are those of the user's model, and every stage writes what is its own.

Pairs with all other plugins are in test_any_to_any.py, runs that stop and start again in test_resume_sharded.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import distributed, preload, run_ranks
from oracles.joined_slices import copied_slices, gathered_over_ranks, join_slices, joined_over_ranks
from oracles.serial_training import make_optimizer, train_serial
from parity import EXACT, _assert_same_move
from pipeline_cases import SCHEDULES
from safetensors.torch import load_file
from zoo import TRANSFORMERS_MODULES, WholeBatches, get_model, split_batch

from booster import Booster
from booster.lazy_init import LazyInitContext
from booster.plugins import LowLevelZeroPlugin, TorchDDPPlugin
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin
from booster.pytree import map_tensors

preload(*TRANSFORMERS_MODULES)

pytestmark = pytest.mark.on_device

SAMPLES = 4
LAYERS = 4


def staged(schedule: str = "1f1b", **arguments):
    return {"pp_size": 2, "num_microbatches": 2, **SCHEDULES[schedule], **arguments}


# Ranks, and the arguments of our plugin or the name of another.
LAYOUTS = {
    "pp 2": (2, staged()),
    "pp 4": (4, staged(pp_size=4)),
    "pp 2 interleaved": (2, staged("interleaved")),
    "pp 2 zbv": (2, staged("zbv")),
    "pp 2 uneven": (2, staged(num_layers_per_stage=[3, 1])),
    "pp 2 tp 2": (4, staged(tp_size=2)),
    "pp 2 zero 1": (4, staged(zero_stage=1)),
    "pp 2 zbv zero 1": (4, staged("zbv", zero_stage=1)),
    "tp 2": (2, {"tp_size": 2}),
    "ddp": (2, "ddp"),
    "zero 2": (3, "zero 2"),
}
STAGED = [name for name in LAYOUTS if name.startswith("pp")]


def make_plugin(layout: str):
    given = LAYOUTS[layout][1]
    if given == "ddp":
        return TorchDDPPlugin()
    if given == "zero 2":
        return LowLevelZeroPlugin(stage=2, precision="fp32", reduce_bucket_size_in_m=0.004)
    return HybridParallelPlugin(**{"precision": "fp32", "zero_bucket_size_in_m": 0.004, **given})


class Job:
    """A model of the zoo under a layout, which takes batches of all ranks."""

    def __init__(self, layout: str, name: str, *, is_lazy: bool = False) -> None:
        self.entry = get_model(name, 2 if name in ("t5", "whisper") else LAYERS)
        self.whole = WholeBatches(self.entry)
        self.plugin = make_plugin(layout)
        self.booster = Booster(plugin=self.plugin)
        with LazyInitContext() if is_lazy else nullcontext():
            raw = self.entry.construct() if is_lazy else self.whole.build()
        self.model, self.optimizer, *_ = self.booster.boost(raw, make_optimizer("adamw", self.entry.param_groups(raw)))

    def backward(self, step: int, samples: int = SAMPLES) -> None:
        size = self.plugin.dp_size
        part = split_batch(self.entry.make_batch(step, samples), self.plugin.dp_rank, size)
        part = map_tensors(lambda tensor: tensor.to(self.booster.device), part)
        self.booster.execute_pipeline(iter([self.whole.feed(part)]), self.model, self.whole.criterion, self.optimizer)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        if isinstance(self.plugin, HybridParallelPlugin):
            return joined_over_ranks(self.model)
        return {name: tensor.clone().cpu() for name, tensor in self.model.state_dict().items()}


def train_and_save(layout: str, name: str, path: str):
    """Returns weights and states, and which of both this rank writes."""
    job = Job(layout, name)
    for step in range(2):
        job.backward(step)
        job.step()
    job.booster.save_model(job.model, Path(path) / "model", shard=True, size_per_shard=1)
    job.booster.save_optimizer(job.optimizer, Path(path) / "optimizer", shard=True)
    states = copied_slices(job.optimizer.checkpoint_state().slices())
    written = {one.name for one in job.model.tensor_slices() if one.primary}
    written_states = {one.name.rpartition(".")[0] for one in states if one.primary}
    return job.weights(), join_slices(gathered_over_ranks(states)), written, written_states


MODELS = ["llama", "gpt2", "gemma", "t5", "bert", "whisper", "mixtral", "tied_lm", "glued_chain", "partly_frozen_chain"]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("model", MODELS)
def test_a_save_has_the_tensors_of_the_users_model(tmp_path, model, schedule):
    layout = "pp 2" if schedule == "1f1b" else "pp 2 zbv"
    weights, states, *_ = run_ranks(train_and_save, 2, layout, model, str(tmp_path), timeout=120)[0]
    entry = get_model(model, 2 if model in ("t5", "whisper") else LAYERS)
    plain = entry.build().state_dict()
    assert weights.keys() == plain.keys()
    stored = {}
    for file in sorted((tmp_path / "model").glob("*.safetensors")):
        stored |= load_file(file)
    assert set(stored) <= set(plain)
    assert {name for name in plain if name not in stored} <= {name for tie in entry.tied for name in tie}
    for name, tensor in stored.items():
        assert torch.equal(tensor, weights[name]), name
    for name, tensor in states.items():
        assert tensor.shape in (plain[name.rsplit(".", 1)[0]].shape, ()), name


@pytest.mark.parametrize("layout", ["pp 2", "pp 4", "pp 2 zbv", "pp 2 uneven"])
def test_every_stage_writes_what_it_has_and_none_twice(tmp_path, layout):
    world_size, _ = LAYOUTS[layout]
    for model in ("glued_chain", "tied_lm"):
        ranks = run_ranks(train_and_save, world_size, layout, model, str(tmp_path / model))
        for index in (2, 3):
            of_ranks = [found[index] for found in ranks]
            assert all(of_ranks)  # no stage leaves it to another
            assert sum(map(len, of_ranks)) == len(set.union(*of_ranks))
            assert len(set.union(*of_ranks)) == len(dict(get_model(model, LAYERS).build().named_parameters()))


@pytest.mark.parametrize("layout", STAGED)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_a_save_opens_in_transformers(tmp_path, model, layout):
    weights, *_ = run_ranks(train_and_save, LAYOUTS[layout][0], layout, model, str(tmp_path), timeout=120)[0]
    found = type(get_model(model, LAYERS).build()).from_pretrained(tmp_path / "model")
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def load_pretrained(layout: str, path: str, is_lazy: bool):
    job = Job(layout, "llama", is_lazy=is_lazy)
    job.booster.load_model(job.model, path)
    loaded = job.weights()
    job.backward(0)
    job.step()
    return loaded


@pytest.mark.parametrize("is_lazy", [False, True], ids=["built", "lazy"])
@pytest.mark.parametrize("layout", ["pp 2", "pp 2 zbv", "pp 2 tp 2"])
def test_pretrained_weights_arrive_on_their_stage(tmp_path, layout, is_lazy):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        pretrained = get_model("llama", LAYERS).construct()
    pretrained.save_pretrained(tmp_path / "model", max_shard_size="4KB")
    expected = {name: tensor.clone() for name, tensor in pretrained.state_dict().items()}
    for found in run_ranks(load_pretrained, LAYOUTS[layout][0], layout, str(tmp_path / "model"), is_lazy):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


JOURNEY = ["pp 2", "ddp", "pp 2 zbv", "pp 2 tp 2", "tp 2", "pp 4", "zero 2", "pp 2 zero 1", "pp 2 interleaved"]


def one_stage(name: str, layout: str, step: int, path: str):
    job = Job(layout, name)
    if step > 0:
        job.booster.load(Path(path) / f"{step - 1}", job.model, job.optimizer)
    job.backward(step, 12)
    job.step()
    job.booster.save(Path(path) / f"{step}", job.model, job.optimizer)
    return job.weights()


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.slow
def test_a_run_that_changes_its_layout_at_every_step_is_that_of_one_process(tmp_path, model):
    found = None
    for step, layout in enumerate(JOURNEY):
        found = run_ranks(one_stage, LAYOUTS[layout][0], model, layout, step, str(tmp_path))[0]
    assert_is_serial(found, model, steps=len(JOURNEY), batch_size=12, accumulation=1)


def assert_is_serial(found, model: str, **settings) -> None:
    entry = get_model(model, LAYERS)
    serial = train_serial(entry, precision=None, parts=1, max_norm=float("inf"), optimizer="adamw", **settings)
    _assert_same_move(found, serial.weights, entry.build().state_dict(), EXACT.update, str(settings))


def half_a_step(layout: str, name: str, is_second: bool, path: str):
    """Saves in the middle of a step, or ends it."""
    job = Job(layout, name)
    if is_second:
        job.backward(7, 12)  # gradients of another history, to be replaced
        job.step()
        job.booster.load(Path(path), job.model, job.optimizer)
        assert job.optimizer.num_microbatches == 1
    with job.booster.accumulate(job.model, job.optimizer, 2):
        job.backward(int(is_second), 12)
        job.step()
    if not is_second:
        job.booster.save(Path(path), job.model, job.optimizer)
    return job.weights()


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("pp 2", "pp 2"),
        ("pp 2 zbv", "pp 2 zbv"),
        ("pp 2", "pp 2 interleaved"),
        ("pp 2 zero 1", "pp 2"),
        ("pp 2", "pp 2 zero 1"),
        ("pp 2 tp 2", "pp 4"),
        ("pp 2", "ddp"),
        ("ddp", "pp 2"),
        ("pp 2 zbv zero 1", "zero 2"),
        ("zero 2", "pp 2 zbv"),
        ("tp 2", "pp 2 tp 2"),
        ("pp 4", "tp 2"),
    ],
)
def test_a_step_may_begin_in_some_stages_and_end_in_others(tmp_path, saved, loaded):
    for model in ("tied_lm", "glued_chain") if "tp" not in saved + loaded else ("gpt2",):
        path = str(tmp_path / model)
        run_ranks(half_a_step, LAYOUTS[saved][0], saved, model, False, path)
        found = run_ranks(half_a_step, LAYOUTS[loaded][0], loaded, model, True, path)[0]
        assert_is_serial(found, model, steps=1, batch_size=12, accumulation=2)


@distributed(world_size=2)
def test_a_state_dict_of_a_stage_loads_again():
    job = Job("pp 2 zbv", "gpt2")
    before = {name: tensor.clone().cpu() for name, tensor in job.model.state_dict().items()}
    expected = get_model("gpt2", LAYERS).build().state_dict()
    assert before.keys() < expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in before.items())
    job.backward(0)
    job.step()
    assert any(not torch.equal(tensor.cpu(), before[name]) for name, tensor in job.model.state_dict().items())
    job.model.load_state_dict(before)
    after = joined_over_ranks(job.model)
    assert all(torch.equal(after[name], expected[name]) for name in expected)


@distributed(world_size=2)
def test_files_of_other_layers_are_not_read_as_ones_own(tmp_path):
    """A stage whose layers are missing in a checkpoint says so on all ranks."""
    from booster.errors import CheckpointError

    job = Job("pp 2", "tied_lm")
    if dist.get_rank() == 0:
        small = get_model("tied_lm", 2).build()
        torch.save(small.state_dict(), tmp_path / "small.bin")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"blocks\.[23]"):
        job.booster.load_model(job.model, tmp_path / "small.bin")
