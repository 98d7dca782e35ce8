"""Checkpoints under GeminiPlugin: what is saved is whole, wherever its shards are, and loads into any other layout."""

from __future__ import annotations

import copy
import ctypes
import itertools
import os
import resource
import sys
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from harness import distributed, run_ranks
from safetensors.torch import load_file
from torch import nn

from booster import Booster, CheckpointError, RankFailedError
from booster.checkpoint_io.loading import fill
from booster.comm import count_communication
from booster.device import current_device
from booster.optim import HybridAdam
from booster.plugins import GeminiPlugin

pytestmark = pytest.mark.on_device

MIB = 2**20


def slow(*values):
    """Returns a case that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


POLICIES = {
    "static": {},
    "prefetch": {"max_prefetch": 2},
    "kept": {"shard_param_frac": 0.0},
    "half kept": {"shard_param_frac": 0.5},
    "on disk": {"placement_policy": "cpu"},
    "states on disk": {"offload_optim_frac": 1.0},
    "half on disk": {"offload_optim_frac": 0.5, "offload_param_frac": 0.5},
}
SOME_POLICIES = ["static", "kept", "half kept", "on disk"]


class Net(nn.Module):
    """Tied weights, buffers of several formats, a scalar, an empty parameter, a frozen layer, odd sizes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.wide = nn.Linear(6, 37)
        self.narrow = nn.Linear(37, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("mask", torch.rand(11) > 0.5)
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.frozen(self.embed(tokens)))
        x = self.narrow(torch.relu(self.wide(x)))
        return self.head(x) * self.scale + self.none.sum() + self.mask


def param_groups(net: Net, with_frozen: bool = False) -> list[dict]:
    chosen = [net.embed.weight, net.scale, net.none]
    rest = [one for one in net.parameters() if all(one is not other for other in chosen)]
    if not with_frozen:
        rest = [one for one in rest if one.requires_grad]
    return [{"params": chosen, "lr": 0.02}, {"params": rest, "weight_decay": 0.1}]


def chunks(size: int) -> dict:
    return {"chunk_config_dict": {"chunk_size": size}}


class Job:
    """A small training run."""

    def __init__(self, policy="static", *, seed=0, net=None, make=torch.optim.AdamW, **arguments) -> None:
        settings = {"precision": "fp32", "initial_scale": 2**8} | chunks(64) | POLICIES[policy] | arguments
        self.booster = Booster(plugin=GeminiPlugin(**settings))
        raw = Net(seed) if net is None else net
        groups = param_groups(raw, with_frozen=net is not None)
        self.model, self.optimizer, *_ = self.booster.boost(raw, make(groups, lr=0.01))

    def train(self, *steps: int) -> Job:
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            tokens = torch.randint(11, (5,), generator=generator)
            scores = self.model(tokens.to(self.booster.device))
            self.booster.backward(scores.float().square().mean(), self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def save(self, path: Path, **options) -> Path:
        self.booster.save(path, self.model, self.optimizer, **options)
        return path

    def load(self, path: Path) -> Job:
        self.booster.load(path, self.model, self.optimizer)
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint's files but random states."""
    found = {}
    for file in path.glob("*.safetensors"):
        if "random" not in file.name:
            found |= load_file(file)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].cpu(), tensor.cpu()), name


# Any layout into any other.


def train_and_save(policy: str, path: Path, arguments: dict) -> None:
    Job(policy, **arguments).train(0, 1, 2).save(path)


def load_and_save(policy: str, source: Path, arguments: dict) -> None:
    Job(policy, seed=1, **arguments).train(7).load(source).save(source.with_name("trained before"))
    Job(policy, seed=1, **arguments).load(source).save(source.with_name("fresh"))


LAYOUTS = {
    "static x1": ("static", 1, {}),
    "static x2": ("static", 2, {}),
    "large chunks x3": ("static", 3, chunks(1024)),
    "prefetch x4": ("prefetch", 4, chunks(128)),
    "kept x2": ("kept", 2, {}),
    "half kept x3": ("half kept", 3, {}),
    "on disk x2": ("on disk", 2, chunks(100)),
    "on disk x1": ("on disk", 1, {}),
    "states on disk x3": ("states on disk", 3, {}),
    "half on disk x2": ("half on disk", 2, {}),
    "replicated x4": ("half on disk", 4, {"extra_dp_size": 2}),
    "hybrid on disk x2": ("on disk", 2, {"make": HybridAdam}),
}


# By default every layout in bf16, which has masters, both as source and as target, and a few in fp32.
SOME_LAYOUTS = ("static x2", "on disk x1", "states on disk x3")


@pytest.mark.parametrize(
    ("source", "precision"),
    [
        case if case[1] == "bf16" or (case[1] == "fp32" and case[0] in SOME_LAYOUTS) else slow(*case)
        for case in itertools.product(LAYOUTS, ["fp32", "bf16", "fp16"])
    ],
)
def test_every_layout_loads_what_another_wrote_and_writes_the_same(tmp_path, source, precision):
    names = list(LAYOUTS)
    target = names[(names.index(source) + {"fp32": 5, "bf16": 1, "fp16": 8}[precision]) % len(names)]
    (policy, size, arguments), (other, other_size, other_arguments) = LAYOUTS[source], LAYOUTS[target]
    precise = {"precision": precision}
    run_ranks(train_and_save, size, policy, tmp_path / "c", arguments | precise)
    run_ranks(load_and_save, other_size, other, tmp_path / "c", other_arguments | precise)
    expected = stored(tmp_path / "c")
    assert any(name.endswith(".master") for name in expected) == (precision != "fp32")
    assert_same(stored(tmp_path / "trained before"), expected)
    assert_same(stored(tmp_path / "fresh"), expected)


@distributed(world_size=2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_masters_become_the_weights_of_a_model_that_keeps_none(tmp_path, policy, precision):
    expected = stored(Job(policy, precision=precision).train(0, 1, 2).save(tmp_path / "c"))
    masters = {name: tensor for name, tensor in expected.items() if name.endswith(".master")}
    weights = Job(policy, seed=1).load(tmp_path / "c").weights()
    assert len(masters) == 8
    assert_same({name: weights[name.removesuffix(".master")] for name in masters}, masters)


# What a save and a load take.


def stepped_layers(policy: str, width: int, depth: int, **arguments):
    settings = chunks(width**2) | POLICIES[policy] | arguments
    booster = Booster(plugin=GeminiPlugin(precision="fp32", **settings))
    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), foreach=False))
    booster.backward(model(torch.ones(1, width, device=booster.device)).mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return booster, model, optimizer


@distributed(world_size=[slow(2), 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_neither_saves_nor_loads_send_weights(tmp_path, policy):
    booster, model, optimizer = stepped_layers(policy, 128, 4)
    with count_communication() as count:
        booster.save_model(model, tmp_path / "m.safetensors")
        booster.save_model(model, tmp_path / "m", shard=True)
        booster.save_optimizer(optimizer, tmp_path / "o", shard=True)
        booster.save(tmp_path / "c", model, optimizer)
        booster.load_model(model, tmp_path / "m")
        booster.load(tmp_path / "c", model, optimizer)
    # The ranks tell each other what they hold. One of the four layers alone has 64 KiB.
    assert sum(count.received.values()) < 6 * 8 * 2**10


def limited(action, num_bytes: int) -> None:
    """Runs something that may take so much memory of its own, however short: mapped files do not count."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + num_bytes, limits[1]))
    try:
        action()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is the Linux kernel's")
@distributed(world_size=2, fresh=True, timeout=120)
def test_what_is_on_disk_is_not_brought_to_memory_by_a_save_or_a_load(tmp_path):
    mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(mmap_threshold, 256 * 1024)  # what is freed is not reused by what follows
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(256 * 1024)  # boost() leaves it so
    booster, model, optimizer = stepped_layers("on disk", 2048, 8, offload_dir=tmp_path)
    held = sum(part.tensor.nbytes for part in optimizer.checkpoint_state().slices())
    bound = 96 * MIB
    assert held > 1.3 * bound
    limited(lambda: booster.save(tmp_path / "c", model, optimizer), bound)
    limited(lambda: booster.load(tmp_path / "c", model, optimizer), bound)
    with pytest.raises(RuntimeError, match="memory"):  # the limit is one
        limited(lambda: [part.tensor.clone() for part in optimizer.checkpoint_state().slices()], bound)


# Loads into a run.


@distributed(world_size=[2, slow(3)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_a_load_between_steps_is_seen_by_the_next_forward(tmp_path, policy, precision):
    job = Job(policy, precision=precision).train(0, 1)
    job.save(tmp_path / "c")
    other = Job(policy, precision=precision, seed=1).train(5, 6, 7).load(tmp_path / "c")
    tokens = torch.arange(11, device=current_device())
    for one in (job, other):
        one.model.eval()
    with torch.no_grad():
        assert torch.equal(other.model(tokens), job.model(tokens))
    for one in (job, other):
        one.model.train()
        one.train(2, 3)
    assert_same(other.weights(), job.weights())


@distributed(world_size=[slow(2), 3])
@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_a_read_that_fails_on_one_rank_fails_on_all(tmp_path, policy):
    job = Job(policy).train(0)
    job.booster.save_model(job.model, tmp_path / "m", shard=True)
    real = fill._read

    def failing(*arguments, **options):
        if dist.get_rank() == 1:
            raise CheckpointError("the disk is gone")
        real(*arguments, **options)

    with patch.object(fill, "_read", failing), pytest.raises(CheckpointError, match="the disk is gone"):
        job.booster.load_model(job.model, tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"this model is incomplete.*the disk is gone"):
        job.train(1)
    job.booster.load_model(job.model, tmp_path / "m")
    job.train(1)


@distributed(world_size=2)
@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_a_save_in_the_background_is_of_the_moment_of_the_call(tmp_path, policy):
    job = Job(policy, precision="bf16").train(0, 1)
    job.save(tmp_path / "now")
    job.save(tmp_path / "later", use_async=True)
    job.booster.save_model(job.model, tmp_path / "m", shard=True, use_async=True)
    job.train(2, 3, 4)
    job.booster.wait_for_checkpoints()
    assert_same(stored(tmp_path / "later"), stored(tmp_path / "now"))
    dist.barrier()
    other = Job(policy, precision="bf16", seed=1)
    other.booster.load_model(other.model, tmp_path / "m")
    job.load(tmp_path / "now")
    assert_same(other.weights(), job.weights())


@distributed(world_size=2)
@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_files_hold_the_whole_model_under_the_users_names(tmp_path, policy, shard):
    job = Job(policy).train(0, 1)
    path = tmp_path / ("m" if shard else "m.safetensors")
    job.booster.save_model(job.model, path, shard=shard)
    found = load_file(path / "model.safetensors" if shard else path)
    weights = job.weights()
    assert set(weights) - set(found) == {"head.weight"}
    assert all(torch.equal(found[name], weights[name].cpu()) for name in found)
    assert found["none"].shape == (0, 3)


# Whole states in memory.


@distributed(world_size=[slow(1), slow(2), 3])
@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_state_dict_is_the_users_models_own(policy):
    expected, job = Net(0).state_dict(), Job(policy)
    found = job.weights()
    assert_same(found, expected)
    assert found._metadata == expected._metadata
    assert found["head.weight"] is found["embed.weight"]
    for tensor in found.values():
        tensor.zero_()
    assert_same(job.weights(), expected)
    into = {"mine": 1}
    given = job.model.state_dict(destination=into, prefix="net.")
    assert given is into
    assert list(given) == ["mine", *(f"net.{name}" for name in expected)]


@distributed(world_size=[2, slow(3)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_load_state_dict_is_seen_by_the_optimizer(tmp_path, policy, precision):
    other = Net(1).to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    job = Job(policy, precision=precision).train(0, 1)
    result = job.model.load_state_dict(other.state_dict())
    assert result.missing_keys == result.unexpected_keys == []
    assert_same(job.weights(), other.state_dict())
    for group in job.optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    job.train(2)
    trained = {name: one for name, one in job.weights().items() if not name.startswith("norm.")}
    assert_same(trained, {name: other.state_dict()[name] for name in trained})


def add_doubled(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    state[f"{prefix}doubled"] = 2 * state[f"{prefix}wide.weight"]


@distributed(world_size=2)
@pytest.mark.parametrize("policy", ["static", "on disk"])
def test_what_a_hook_computes_of_weights_is_right(tmp_path, policy):
    net = Net()
    net.register_state_dict_post_hook(add_doubled)
    job = Job(policy, net=net)
    expected = 2 * Net().wide.weight
    assert torch.equal(job.weights()["doubled"].cpu(), expected)
    job.booster.save_model(job.model, tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found["doubled"], expected)
    assert torch.equal(found["wide.weight"], expected / 2)


def spoiled(state: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    found = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    if how == "missing":
        del found["wide.bias"]
    elif how == "unexpected":
        found["further"] = torch.ones(1)
    elif how == "shape":
        found["narrow.weight"] = torch.ones(2, 2)
    return found


@distributed(world_size=[2, slow(3)])
@pytest.mark.parametrize("wrong_ranks", ["all", "one"])
@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_what_does_not_fit_changes_nothing_on_any_rank(policy, wrong_ranks):
    job = Job(policy, precision="bf16").train(0)
    before = job.weights()
    is_wrong = wrong_ranks == "all" or dist.get_rank() == 1
    error = RuntimeError if is_wrong else RankFailedError
    for how, text in (("missing", "Missing"), ("unexpected", "Unexpected"), ("shape", "size mismatch")):
        with pytest.raises(error, match=text):
            job.model.load_state_dict(spoiled(before, how if is_wrong else "none"))
        assert_same(job.weights(), before)
    found = job.model.load_state_dict(spoiled(before, "missing"), strict=False)
    assert found.missing_keys == ["wide.bias"]
    changed = job.weights()
    assert torch.equal(changed["wide.bias"], before["wide.bias"])
    assert torch.equal(changed["wide.weight"], before["wide.weight"] + 1)
    job.train(1)


class Stopped(Exception):
    """What a user's own code raises."""


@distributed(world_size=[2, slow(3)])
@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_changes_inside_of_gathered_are_kept(policy):
    job = Job(policy, precision="bf16").train(0)
    before = job.weights()
    tokens = torch.arange(11, device=current_device())
    with job.model.gathered() as net, torch.no_grad():
        assert net is job.booster.unwrap_model(job.model)
        assert_same(net.state_dict(), before)
        net.wide.weight.mul_(2)
        net.narrow.bias.data = torch.zeros(6, dtype=torch.bfloat16)
        with job.model.gathered():
            net.scale.fill_(3)
        job.model.eval()
        inside = job.model(tokens)
    with torch.no_grad():
        assert torch.equal(job.model(tokens), inside)
    job.model.train()
    expected = {"wide.weight": 2 * before["wide.weight"], "narrow.bias": torch.zeros(6), "scale": torch.tensor(3.0)}
    expected = before | {name: tensor.bfloat16() for name, tensor in expected.items()}
    assert_same(job.weights(), expected)
    with pytest.raises(Stopped), job.model.gathered():
        raise Stopped
    job.train(1, 2)


@distributed(world_size=2)
def test_an_error_inside_of_gathered_on_one_rank_is_that_ranks_own():
    job = Job().train(0)
    try:
        with job.model.gathered():
            if dist.get_rank() == 1:
                raise Stopped
    except Stopped:
        assert dist.get_rank() == 1
    job.train(1)


@distributed(world_size=[2, slow(3)])
@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_a_copy_averages_weights(policy):
    job = Job(policy).train(0)
    average = copy.deepcopy(job.model).requires_grad_(False)
    expected = job.weights()
    assert_same(average.state_dict(), expected)
    for step in (1, 2):
        with job.train(step).model.gathered() as net, torch.no_grad():
            for mean, weight in zip(average.parameters(), net.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
        now = job.weights()
        expected = {name: torch.lerp(old, now[name], 0.1) for name, old in expected.items() if old.is_floating_point()}
    for name, parameter in average.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    if dist.get_rank() == 0:  # nothing of the copy communicates
        plain = Net(1).eval()
        plain.load_state_dict(average.state_dict())
        tokens = torch.arange(11, device=current_device())
        assert torch.equal(average.eval()(tokens), plain.to(current_device())(tokens))
    job.train(3)


# Parameters that join later.


def with_late_parameters(policy: str, precision: str) -> Job:
    """A job that froze and left out much, and took it in after some steps."""
    net = Net(0)
    for one in net.wide.parameters():
        one.requires_grad_(False)
    job = Job(policy, net=net, precision=precision).train(0, 1)
    net.wide.requires_grad_(True)
    net.frozen.requires_grad_(True)
    return job.train(2)


@distributed(world_size=[2, slow(3)])
@pytest.mark.parametrize("precision", [slow("fp32"), "bf16"])
@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_an_unfrozen_layer_is_saved_and_loaded(tmp_path, policy, precision):
    job = with_late_parameters(policy, precision)
    expected = stored(job.save(tmp_path / "a"))
    assert any("frozen.weight.exp_avg" in name for name in expected)
    fresh = Net(1)
    fresh.frozen.requires_grad_(True)
    other = Job("static", net=fresh, precision=precision, **chunks(1024)).load(tmp_path / "a")
    assert_same(stored(other.save(tmp_path / "b")), expected)
    job.train(5).load(tmp_path / "b").train(3)
    other.train(3)
    torch.testing.assert_close(dict(job.weights()), dict(other.weights()))  # other shards are summed in another order
    assert_same(stored(with_late_parameters(policy, precision).load(tmp_path / "a").save(tmp_path / "d")), expected)


@distributed(world_size=[slow(2), 3])
@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_a_group_that_joins_later_is_saved_and_loaded(tmp_path, policy):
    def build() -> Job:
        job = Job(policy)
        net = job.booster.unwrap_model(job.model)
        net.frozen.requires_grad_(True)
        job.train(0)
        job.optimizer.add_param_group({"params": list(net.frozen.parameters()), "lr": 0.5})
        return job

    job = build().train(1, 2)
    expected = stored(job.save(tmp_path / "a"))
    assert any("frozen.weight.exp_avg" in name for name in expected)
    other = build().load(tmp_path / "a")
    assert_same(stored(other.save(tmp_path / "b")), expected)
    assert_same(other.train(3).weights(), job.train(3).weights())
    other.train(4)
