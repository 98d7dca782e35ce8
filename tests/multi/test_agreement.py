"""Ranks that give boost() or a plugin different things are told so, all of them, at once, and nothing was changed."""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import distributed, preload, run_ranks
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from booster import Booster, boost_agreement
from booster.boost_checks import note_boosted
from booster.comm import (
    agree,
    all_reduce_numbers,
    count_communication,
    imagine_others,
    raise_on_all_ranks,
    require_same_on_all_ranks,
    use_shared_memory,
)
from booster.errors import BoosterError, ConfigError, DesyncError, RankFailedError
from booster.mixed_precision import FP16TorchMixedPrecision
from booster.plugins import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

preload("booster", "booster.plugins")

SECONDS = 5.0  # after which every rank must have been told
PLUGINS: dict[str, Callable[..., Any]] = {
    "ddp": TorchDDPPlugin,
    "zero": lambda **more: LowLevelZeroPlugin(**{"precision": "fp32"} | more),
    "gemini": lambda **more: GeminiPlugin(**{"precision": "fp32", "chunk_config_dict": {"chunk_size": 64}} | more),
    "fsdp": TorchFSDPPlugin,
    "hybrid": lambda **more: HybridParallelPlugin(**{"precision": "fp32"} | more),
}


class Net(nn.Module):
    """Layers, a tied weight and buffers; each of the named changes makes it another model."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        names = ["lower", "upper"][:: -1 if change == "order" else 1]
        for name in names:
            self.add_module("above" if (name, change) == ("upper", "name") else name, nn.Linear(4, 4))
        if change != "missing":
            self.last = nn.Linear(4, 4, bias=change != "missing bias")
        if change == "extra":
            self.further = nn.Linear(4, 1)
        self.tied = nn.Linear(4, 4, bias=False)
        if change != "untied":
            self.tied.weight = self.lower.weight if change != "tied to another" else self.last.weight
        if change != "missing buffer":
            size, dtype = 4 + (change == "buffer shape"), torch.float64 if change == "buffer dtype" else torch.float32
            self.register_buffer("scale" if change != "buffer name" else "size", torch.ones(size, dtype=dtype))
        if change == "shape":
            self.last = nn.Linear(4, 5)
        if change == "transposed":
            self.last.weight = nn.Parameter(torch.zeros(2, 8))
        if change == "dtype":
            self.last.double()
        if change == "frozen":
            self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 4) to (batch, 4)."""
        return self.last(self.upper(torch.tanh(self.lower(self.tied(x)))) * self.scale)


def optimizer_of(model: nn.Module, change: str = "") -> torch.optim.Optimizer | None:
    parameters = list(model.parameters())
    if change == "none":
        return None
    if change == "class":
        return torch.optim.SGD(parameters, lr=0.1)
    if change == "order":
        parameters.reverse()
    if change == "fewer":
        parameters.pop()
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    if change == "groups":
        groups = [{"params": parameters}]
    if change == "order of groups":
        groups.reverse()
    if change == "lr of a group":
        groups[1]["lr"] = 0.5
    if change == "another option":
        groups[0]["no_decay"] = True
    options: dict[str, Any] = {"lr": 0.1}
    options |= {"lr": {"lr": 0.2}, "betas": {"betas": (0.8, 0.999)}, "weight_decay": {"weight_decay": 0.0}}.get(
        change, {}
    )
    return torch.optim.AdamW(groups, **options)


class Stateless(lr_scheduler.StepLR):
    """A scheduler that can't be asked."""

    def state_dict(self) -> dict[str, Any]:
        """Raises."""
        raise RuntimeError("not now")


class Holding(lr_scheduler.StepLR):
    """A scheduler with another one inside, as those of some packages are, and things that are this process's own."""

    def __init__(self, optimizer: torch.optim.Optimizer, step_size: int) -> None:
        self.after = lr_scheduler.StepLR(optimizer, step_size)
        self.log: Any = open_nothing
        self.table = torch.full((3,), float(dist.get_rank()))
        self.verbose = dist.get_rank() == 0
        self.itself = [{"log": object()}]
        super().__init__(optimizer, 2)


def open_nothing() -> None:
    """Is a function, which has an address."""


def _growing(step: int, *, total: int) -> float:
    return step / total


def _lambdas(*functions: Callable[[int], float]) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, list(functions))


def _sequence(inner: type, step_size: int) -> Callable[[torch.optim.Optimizer], Any]:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        constant = lr_scheduler.ConstantLR(optimizer, total_iters=3)
        return lr_scheduler.SequentialLR(optimizer, [constant, inner(optimizer, step_size)], [3])

    return make


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "StepLR 4": lambda optimizer: lr_scheduler.StepLR(optimizer, 4),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 5]),
    "MultiStepLR 6": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 6]),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "SequentialLR": _sequence(lr_scheduler.StepLR, 4),
    "SequentialLR 5": _sequence(lr_scheduler.StepLR, 5),
    "SequentialLR of another": _sequence(lr_scheduler.CosineAnnealingLR, 4),
    "Holding": lambda optimizer: Holding(optimizer, 4),
    "Holding 5": lambda optimizer: Holding(optimizer, 5),
    "partial": _lambdas(functools.partial(_growing, total=8), lambda _: 1.0),
    "partial 9": _lambdas(functools.partial(_growing, total=9), lambda _: 1.0),
}


def _prepared(booster: Booster, **options: Any) -> DataLoader[Any]:
    return booster.prepare_dataloader(*_ones(8, 1), **options)


def _ones(num_samples: int, batch_size: int) -> tuple[TensorDataset, int]:
    return TensorDataset(torch.ones(num_samples, 4)), batch_size


def _distributed(num_samples: int = 8, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    dataset, _ = _ones(num_samples, 1)
    return DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, **options))


LOADERS: dict[str, Callable[[Booster], DataLoader[Any]]] = {
    "plain": lambda _: DataLoader(*_ones(8, 1)),
    "longer": lambda _: DataLoader(*_ones(12, 1)),
    "larger": lambda _: DataLoader(*_ones(8, 2)),
    "dropping": lambda _: DataLoader(*_ones(8, 1), drop_last=True),
    "shuffled": lambda _: DataLoader(*_ones(8, 1), shuffle=True),
    "prepared": _prepared,
    "prepared longer": lambda booster: booster.prepare_dataloader(*_ones(12, 1)),
    "prepared larger": lambda booster: booster.prepare_dataloader(*_ones(8, 2)),
    "prepared shuffled": lambda booster: _prepared(booster, shuffle=True),
    "prepared dropping": lambda booster: _prepared(booster, drop_last=True),
    "prepared seed": lambda booster: _prepared(booster, seed=3),
    "custom": lambda booster: _prepared(booster, distributed_sampler_cls=DistributedSampler),
    "custom larger": lambda booster: booster.prepare_dataloader(
        *_ones(8, 2), distributed_sampler_cls=DistributedSampler
    ),
    "distributed": lambda _: _distributed(),
    "distributed longer": lambda _: _distributed(12),
    "distributed seed": lambda _: _distributed(seed=3),
}


@dataclass(frozen=True)
class Case:
    """What some ranks do otherwise than the rest, and what all are told.

    Attributes:
        name: For the test's id.
        told: A pattern that the message has.
        change: Arguments of `train` that differ there.
        plugin: Where only that one has such an argument; else any.
        error: What all ranks get.
        shared: Arguments that all ranks have otherwise than in other cases.
    """

    name: str
    told: str
    change: dict[str, Any]
    plugin: str = ""
    error: type[Exception] = DesyncError
    shared: dict[str, Any] = field(default_factory=dict)


def _model(name: str, told: str) -> Case:
    return Case(f"model: {name}", told, {"model": name})


def _optimizer(name: str, told: str) -> Case:
    return Case(f"optimizer: {name}", told, {"optimizer": name})


def _scheduler(name: str, told: str, usual: str = "StepLR") -> Case:
    return Case(f"scheduler: {name}", told, {"scheduler": name}, shared={"scheduler": usual})


def _loader(name: str, told: str, usual: str = "plain") -> Case:
    return Case(f"dataloader: {name}", told, {"loader": name}, shared={"loader": usual})


def _argument(plugin: str, told: str, **arguments: Any) -> Case:
    return Case(f"{plugin} with {next(iter(arguments))}", told, {"arguments": arguments}, plugin)


def _mistake(plugin: str, told: str, **arguments: Any) -> Case:
    return Case(f"{plugin} with a wrong {next(iter(arguments))}", told, {"arguments": arguments}, plugin, ConfigError)


def _version(package: str) -> Case:
    return Case(f"version of {package}", rf"{package} .*{package} 0\.0\.1", {"version": package})


CASES = [
    _model("name", r"upper\.weight: .*above\.weight: "),
    _model("shape", r"last\.weight: \(4, 4\) .*last\.weight: \(5, 4\) "),
    _model("transposed", r"last\.weight: \(4, 4\) .*last\.weight: \(2, 8\) "),
    _model("dtype", r"last\.weight: \(4, 4\) torch\.float32.*last\.weight: \(4, 4\) torch\.float64"),
    _model("frozen", r"last\.bias: [^;]*=True, [^;]*=False|last\.bias: [^;]*=False, [^;]*=True"),
    _model("order", r"lower\.weight: .*upper\.weight: "),
    _model("missing", r"last\.weight: .*tied\.weight: tied to lower\.weight"),
    _model("missing bias", r"last\.bias: .*tied\.weight: tied to"),
    _model("extra", r"further\.weight: "),
    _model("untied", r"tied\.weight: tied to lower\.weight.*tied\.weight: \(4, 4\)"),
    _model("tied to another", r"tied to lower\.weight.*tied to last\.weight"),
    _model("buffer name", r"scale: .*size: \(4,\) torch\.float32 \(a buffer\)"),
    _model("buffer shape", r"scale: \(4,\) .*scale: \(5,\)"),
    _model("buffer dtype", r"scale: \(4,\) torch\.float32.*scale: \(4,\) torch\.float64"),
    _model("missing buffer", r"scale: \(4,\) torch\.float32 \(a buffer\).*2 param groups|the optimizer AdamW"),
    _optimizer("class", "the optimizer AdamW.*the optimizer SGD"),
    _optimizer("none", "the optimizer AdamW.*no optimizer"),
    _optimizer("groups", "2 param groups.*1 param groups"),
    _optimizer("order", r"param groups with lower\.weight, lower\.bias in group 0"),
    _optimizer("order of groups", r"param groups with lower\.weight, lower\.bias in group 0"),
    _optimizer("fewer", r"last\.weight, last\.bias in group 1.*last\.weight in group 1"),
    _optimizer("lr", r"lr=0\.1 in group 0.*lr=0\.2 in group 0"),
    _optimizer("lr of a group", r"lr=0\.1 in group 1.*lr=0\.5 in group 1"),
    _optimizer("betas", r"betas=\(0\.9, 0\.999\) in group 0.*betas=\(0\.8, 0\.999\)"),
    _optimizer("weight_decay", r"weight_decay=0\.01 in group 0.*weight_decay=0\.0 in group 0"),
    _optimizer("another option", r"no_decay=True in group 0"),
    *(_version(package) for package in ("Python", "torch", "torch-booster", "numpy", "safetensors")),
    _argument("ddp", "static_graph=False.*static_graph=True", static_graph=True),
    _argument("zero", "stage=1.*stage=2", stage=2),
    _argument("zero", r"initial_scale=4294967296.*initial_scale=2\b", initial_scale=2),
    _argument("gemini", "max_prefetch=0.*max_prefetch=2", max_prefetch=2),
    _argument("fsdp", "FULL_SHARD.*SHARD_GRAD_OP", sharding_strategy="SHARD_GRAD_OP"),
    _argument("hybrid", "max_norm=0.0.*max_norm=1.0", max_norm=1.0),
    Case("a plugin of its own", "is at making a|are at making a", {"plugin": "other"}),
    Case("mixed precision", "no mixed precision.*BF16MixedPrecision", {"precision": "bf16"}, "ddp"),
    Case("loss scale", "initial_scale=65536.*initial_scale=8", {"precision": "fp16 8"}, "ddp"),
    Case("criterion", "no criterion.*a criterion", {"has_criterion": True}),
    Case("dataloader", "no dataloader.*a dataloader", {"loader": "plain"}),
    _loader("longer", "num_samples=8.*num_samples=12"),
    _loader("larger", "batch_size=1.*batch_size=2"),
    _loader("dropping", "drop_last=False.*drop_last=True"),
    _loader("shuffled", "shuffle=False.*shuffle=True"),
    _loader("prepared", "to be split.*split by its DistributedBatchSampler"),
    _loader("prepared longer", "num_samples=8.*num_samples=12", "prepared"),
    _loader("prepared larger", "batch_size=1.*batch_size=2", "prepared"),
    _loader("prepared shuffled", "shuffle=False.*shuffle=True", "prepared"),
    _loader("prepared dropping", "drop_last=False.*drop_last=True", "prepared"),
    _loader("prepared seed", "seed=1024.*seed=3", "prepared"),
    _loader("custom", "split by its DistributedBatchSampler.*split by its CustomBatchSampler", "prepared"),
    _loader("custom larger", "batch_size=1.*batch_size=2", "custom"),
    _loader("distributed longer", "num_samples=8.*num_samples=12", "distributed"),
    _loader("distributed seed", "seed=0.*seed=3", "distributed"),
    Case("scheduler", "no lr_scheduler.*the lr_scheduler StepLR|initial_lr=0.1", {"scheduler": "StepLR"}),
    _scheduler("StepLR 4", "lr_scheduler StepLR with step_size=2.*lr_scheduler StepLR with step_size=4"),
    _scheduler("ExponentialLR", "has the lr_scheduler StepLR.*has the lr_scheduler ExponentialLR"),
    _scheduler("MultiStepLR 6", r"milestones={3: 1, 5: 1}.*milestones={3: 1, 6: 1}", "MultiStepLR"),
    _scheduler("SequentialLR 5", r"_schedulers\[1\] StepLR with step_size=4.*with step_size=5", "SequentialLR"),
    _scheduler("SequentialLR of another", r"_schedulers\[1\] StepLR.*\[1\] CosineAnnealingLR", "SequentialLR"),
    _scheduler("Holding 5", r"lr_scheduler\.after StepLR with step_size=4.*after StepLR with step_size=5", "Holding"),
    _scheduler("partial 9", r"total': 8}.*total': 9}", "partial"),
    Case("a plugin again", r"at boost\(\).*at making a LowLevelZeroPlugin", {"makes_again": True}),
    Case("boost twice", "boosted already", {"boosts_again": True}, error=ConfigError),
    Case("no module", "must be a torch.nn.Module", {"model": None}, error=ConfigError),
    Case("a foreign optimizer", "are not the model's", {"optimizer": "foreign"}, error=ConfigError),
    Case("a broken model", "the tree is rotten", {"model": "broken"}, error=RankFailedError),
    _mistake("ddp", "bucket_cap_mb=-1", bucket_cap_mb=-1),
    _mistake("zero", "stage=5", stage=5),
    _mistake("gemini", "placement_policy='moon'", placement_policy="moon"),
    _mistake("fsdp", "sharding_strategy='HALF'", sharding_strategy="HALF"),
    _mistake("hybrid", "tp_size=0", tp_size=0),
]


class Broken(nn.Module):
    """A model that can't be looked at."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Raises."""
        raise ValueError("the tree is rotten")


@contextmanager
def faked_version(package: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretends that another version is installed here; "": doesn't."""
    with monkeypatch.context() as patch:
        if package:
            versions = boost_agreement.installed_versions() | {package: "0.0.1"}
            patch.setattr(boost_agreement, "installed_versions", lambda *_: versions)
        yield


def contents(model: nn.Module) -> dict[str, Any]:
    """Returns all objects that a model holds, with their numbers."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held = {name: (id(one), one.data_ptr(), one.dtype, one.tolist()) for name, one in tensors.items()}
    return held | {name: (type(module), *map(id, module._forward_hooks)) for name, module in model.named_modules()}


def boosted(
    plugin: str,
    *,
    model: str | None = "",
    optimizer: str = "",
    arguments: dict[str, Any] | None = None,
    precision: str | None = None,
    version: str = "",
    has_criterion: bool = False,
    loader: str = "",
    scheduler: str = "",
    makes_again: bool = False,
    boosts_again: bool = False,
    made: list[tuple[nn.Module, dict[str, Any]]] | None = None,
) -> tuple[Booster, Any, Any]:
    """Returns what boost() returned; notes in `made` the user's model, and what it holds, before it is called."""
    known = {"fp16 8": FP16TorchMixedPrecision(init_scale=8.0), "fp16": FP16TorchMixedPrecision()}
    booster = Booster(plugin=PLUGINS[plugin](**arguments or {}), mixed_precision=known.get(precision, precision))
    net: Any = None if model is None else Broken() if model == "broken" else Net(model)
    if made is not None and isinstance(net, Net):
        made.append((net, contents(net)))
    if makes_again:
        LowLevelZeroPlugin()
    source = Net() if not isinstance(net, Net) or optimizer == "foreign" else net
    updates = optimizer_of(source, optimizer)
    if boosts_again:
        note_boosted(net, updates)
    with pytest.MonkeyPatch.context() as patch, faked_version(version, patch):
        result = booster.boost(
            net,
            None if model == "broken" else updates,
            nn.MSELoss() if has_criterion else None,
            LOADERS[loader](booster) if loader else None,
            SCHEDULERS[scheduler](updates) if scheduler and updates is not None else None,
        )
    return booster, result[0], result[1]


def plugin_choice(case: Case, seed: int) -> tuple[str, int, list[int]]:
    """Returns a plugin, a number of ranks, and which of them do otherwise."""
    chance = random.Random(seed)
    plugin = case.plugin or chance.choice([*PLUGINS])
    world_size = chance.choice([2, 2, 3, 4])
    odd = sorted(chance.sample(range(world_size), chance.randint(1, world_size - 1)))
    return plugin, world_size, odd


def disagree(case: Case, plugin: str, odd: list[int], has_shared_memory: bool) -> tuple[str, str, float]:
    """Returns the error that this rank gets, and after how many seconds; trains a step without the difference then."""
    mine = dict(case.change) if dist.get_rank() in odd else {}
    if mine.get("plugin") == "other":
        mine["plugin"] = "zero" if plugin != "zero" else "gemini"
    if case.name == "loss scale":
        mine.setdefault("precision", "fp16")
    made: list[tuple[nn.Module, dict[str, Any]]] = []
    use_shared_memory(has_shared_memory)
    try:
        all_reduce_numbers([0.0])  # all are here
        started = time.monotonic()
        try:
            boosted(**{"plugin": plugin, "made": made} | case.shared | mine)
        except (BoosterError, ValueError) as error:
            told = type(error).__name__, str(error), time.monotonic() - started
        else:
            raise AssertionError("nothing was raised")
        for model, before in made:
            assert contents(model) == before, "the model was changed"
        train_a_step(plugin)
    finally:
        use_shared_memory(None)
    return told


def train_a_step(plugin: str) -> None:
    """Trains as if nothing had happened."""
    torch.manual_seed(0)  # models that differ have drawn more random numbers on some rank
    booster, model, optimizer = boosted(plugin)
    booster.backward(model(torch.ones(2, 4)).square().mean(), optimizer)
    optimizer.step()
    assert all(torch.isfinite(one).all() for one in model.state_dict().values())


def named(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def unlike(world_size: int, odd: list[int]) -> str:
    """Returns how a message says which ranks differ: the fewer, at a tie those without rank 0."""
    others = [rank for rank in range(world_size) if rank not in odd]
    few, many = sorted([odd, others], key=lambda ranks: (len(ranks), -ranks[0]))
    return f"{named(few)} {'differs' if len(few) == 1 else 'differ'} from {named(many)}"


SEEDS = [*range(len(CASES)), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(len(CASES), 250))]


@pytest.mark.parametrize("has_shared_memory", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed {seed}: {CASES[seed % len(CASES)].name}")
def test_every_rank_is_told_who_differs_in_what(seed, has_shared_memory):
    case = CASES[seed % len(CASES)]
    plugin, world_size, odd = plugin_choice(case, seed)
    told = run_ranks(disagree, world_size, case, plugin, odd, has_shared_memory)
    story = f"{plugin}, {world_size} ranks, other on {odd}: {told}"
    assert max(seconds for *_, seconds in told) < SECONDS, story
    for rank, (name, text, _) in enumerate(told):
        if case.error is DesyncError:
            assert name == "DesyncError", story
            assert unlike(world_size, odd) in text, story
            # whichever side is named first
            either = [case.told, ".*".join(reversed(case.told.split(".*")))]
            assert any(re.search(pattern, text) for pattern in either), story
            assert "Start every rank from the same script" in text or "start every rank from the same script" in text
        else:
            own = name if rank in odd and case.error is RankFailedError else case.error.__name__
            assert name == own, story
            assert re.search(case.told, text), story
            if rank not in odd:
                assert text.startswith(f"rank {odd[0]} failed"), story
    assert len({text for _, text, _ in told}) == 1 or case.error is not DesyncError, story


# What is said.


def compare(facts_of_rank: list[list[str]]) -> str:
    with pytest.raises(DesyncError) as caught:
        agree("lunch", facts_of_rank[dist.get_rank()])
    return str(caught.value)


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ([["a"], ["b"]], "the ranks differ in lunch: rank 0 has a, rank 1 has b; rank 1 differs from rank 0"),
        ([["a"], ["b"], ["b"]], "ranks 1, 2 have b, rank 0 has a; rank 0 differs from ranks 1, 2"),
        ([["a"], ["b"], ["c"]], "rank 0 has a, rank 1 has b, rank 2 has c; ranks 1, 2 differ from rank 0"),
        ([["a"], ["b"], ["b"], ["a"]], "ranks 0, 3 have a, ranks 1, 2 have b; ranks 1, 2 differ from ranks 0, 3"),
        ([["a", "b"], ["a"]], "rank 0 has b, rank 1 has nothing"),
        ([["a\nb"], ["a", "b"]], "rank 0 has a\nb, rank 1 has a"),
        ([["a", "b"], ["a", "x"], ["y", "b"], ["a", "b"]], "ranks 0, 1, 3 have a, rank 2 has y; ranks 1, 2 differ"),
        ([["\ud800"], ["\udfff"]], "rank 0 has \ud800, rank 1 has \udfff"),
    ],
)
def test_the_first_difference_and_all_ranks_that_differ_are_named(facts, told):
    texts = run_ranks(compare, len(facts), facts)
    assert set(texts) == {texts[0]}
    assert told in texts[0]


@distributed(world_size=3)
def test_different_calls_say_what_each_rank_is_at():
    rank = dist.get_rank()
    with pytest.raises(
        DesyncError, match="make different calls: ranks 0, 2 are at tea, rank 1 is at coffee; rank 1 diff"
    ):
        agree("coffee" if rank == 1 else "tea", ["with milk"])
    with pytest.raises(
        DesyncError, match="rank 0 is at tea, rank 1 is at coffee, rank 2 is at water; ranks 1, 2 differ"
    ):
        require_same_on_all_ranks(("tea", "coffee", "water")[rank], [str(rank)])


@distributed(world_size=3)
def test_an_error_counts_more_than_a_difference():
    rank = dist.get_rank()
    error = ConfigError("no sugar") if rank else None
    with pytest.raises(ConfigError) as caught:
        agree(f"place {rank}", [], error=error)
    expected = "no sugar" if rank else "rank 1 failed (and on 1 more ranks), so rank 0 stops too: no sugar"
    assert str(caught.value) == expected
    with pytest.raises(RankFailedError if rank else KeyError, match="salt"):
        agree("dinner", [], error=None if rank else KeyError("salt"))
    agree("dinner", ["alike"])


@distributed(world_size=3)
def test_ranks_of_a_group_have_their_numbers_of_the_world():
    group = dist.new_group([1, 2])
    rank = dist.get_rank()
    if rank:
        with pytest.raises(DesyncError, match="rank 1 has 1, rank 2 has 2; rank 2 differs from rank 1"):
            agree("numbers", [str(rank)], group)
        with pytest.raises(ConfigError, match="no" if rank == 2 else "rank 2 failed, so rank 1 stops too: no"):
            raise_on_all_ranks(ConfigError("no") if rank == 2 else None, group)


def test_one_process_agrees_with_itself():
    agree("lunch", ["alone"])
    with pytest.raises(KeyError, match="salt"):
        agree("lunch", [], error=KeyError("salt"))


@distributed(world_size=2)
def test_imagined_ranks_agree():
    with imagine_others():
        agree("lunch", [str(dist.get_rank())])


def refused_then_boosted(plugin: str) -> None:
    model = Net()
    booster = Booster(plugin=PLUGINS[plugin]())
    optimizer = torch.optim.LBFGS(model.parameters()) if dist.get_rank() == 1 else optimizer_of(model)
    before = contents(model)
    with pytest.raises(ConfigError, match="LBFGS"):
        booster.boost(model, optimizer)
    assert contents(model) == before
    booster.boost(model, optimizer_of(model))
    with pytest.raises(ConfigError, match="boosted already"):
        booster.boost(model)


@pytest.mark.parametrize("plugin", ["zero", "gemini", "hybrid"])
def test_what_was_refused_can_be_boosted_rightly(plugin):
    run_ranks(refused_then_boosted, 2, plugin)


# What may differ, and what it costs.


@pytest.mark.parametrize("plugin", PLUGINS)
@distributed(world_size=2)
def test_values_and_where_they_are_may_differ(plugin):
    torch.manual_seed(dist.get_rank())
    arguments = {"fsdp": {"sync_module_states": True}, "gemini": {"verbose": dist.get_rank() == 0}}
    _, model, _ = boosted(plugin, arguments=arguments.get(plugin))
    weights = model.state_dict()["lower.weight"]
    everyone = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(everyone, weights.contiguous())
    assert torch.equal(*everyone)


SHAREABLE_SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "functions": _lambdas(lambda step: 1.0 + dist.get_rank() * step, lambda step: 1.0),
    "things of its own": lambda optimizer: Holding(optimizer, 4),
    "a state that can't be asked": lambda optimizer: Stateless(optimizer, 1 + dist.get_rank()),
    "not torch's": lambda _: FreeScheduler(),
}


class FreeScheduler:
    """Steps, and is otherwise nobody's."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def step(self) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what differs."""
        return vars(self)


@pytest.mark.parametrize("kind", SHAREABLE_SCHEDULERS)
@distributed(world_size=2)
def test_what_is_a_ranks_own_in_a_scheduler_may_differ(kind):
    model = Net()
    optimizer = optimizer_of(model)
    scheduler = SHAREABLE_SCHEDULERS[kind](optimizer)
    assert Booster(plugin=TorchDDPPlugin()).boost(model, optimizer, lr_scheduler=scheduler)[4] is scheduler


class Portions(DistributedSampler):
    """A sampler of the user's own, with more for some ranks."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4 * (1 + dist.get_rank())))


class Portioned(BatchSampler):
    """As above, of batches."""

    num_replicas, rank = 2, 0


def _portioned_batches() -> DataLoader[Any]:
    dataset, size = _ones(8 * (1 + dist.get_rank()), 1 + dist.get_rank())
    sampler = Portioned(range(len(dataset)), size, drop_last=False)
    sampler.rank = dist.get_rank()
    return DataLoader(dataset, batch_sampler=sampler)


def _portions() -> DataLoader[Any]:
    dataset, size = _ones(8 * (1 + dist.get_rank()), 1 + dist.get_rank())
    return DataLoader(dataset, size, sampler=Portions(dataset))


SHAREABLE_LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "a sampler": _portions,
    "a sampler of batches": _portioned_batches,
    "batches of another size": lambda: _distributed(batch_size=1 + dist.get_rank()),
}


@pytest.mark.parametrize("kind", SHAREABLE_LOADERS)
@distributed(world_size=2)
def test_what_the_users_own_sampler_gives_may_differ(kind):
    loader = SHAREABLE_LOADERS[kind]()
    model = Net()
    assert Booster(plugin=TorchDDPPlugin()).boost(model, dataloader=loader)[3] is loader


@distributed(world_size=2)
def test_agreement_at_boost_is_one_small_all_gather():
    plugin = TorchDDPPlugin()
    model = Net()
    optimizer = optimizer_of(model)
    with count_communication() as count:
        boost_agreement.agree_on_boost(plugin, None, model, optimizer, None, None, None)
    assert dict(count.calls) == {"all_gather": 1}
    assert count.sent["all_gather"] == 33


@distributed(world_size=2)
def test_a_rank_without_memory_for_the_model_stops_all():
    model = Net()
    if dist.get_rank() == 1:
        model.last.weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    with pytest.raises(ConfigError, match=r"'last\.weight' is on the meta device"):
        Booster(plugin=TorchDDPPlugin()).boost(model)


@distributed(world_size=2)
def test_a_configuration_that_one_rank_alone_has_wrong():
    config = {"tensor": {"size": 2, "mode": "2d" if dist.get_rank() else "1d"}}
    with pytest.raises(ConfigError, match="2d"):
        HybridParallelPlugin.from_config(config)
