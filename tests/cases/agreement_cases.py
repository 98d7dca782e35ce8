"""What ranks may be given that differs, what they are told of it then, and boosts with such differences."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from booster import Booster, boost_checks
from booster.boost_checks import mark_boosted
from booster.comm import (
    all_reduce_numbers,
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


def lambda_schedule(*functions: Callable[[int], float]) -> Callable[[torch.optim.Optimizer], Any]:
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
    "partial": lambda_schedule(functools.partial(_growing, total=8), lambda _: 1.0),
    "partial 9": lambda_schedule(functools.partial(_growing, total=9), lambda _: 1.0),
}


def _prepared(booster: Booster, **options: Any) -> DataLoader[Any]:
    return booster.prepare_dataloader(*ones(8, 1), **options)


def ones(num_samples: int, batch_size: int) -> tuple[TensorDataset, int]:
    return TensorDataset(torch.ones(num_samples, 4)), batch_size


def distributed_loader(num_samples: int = 8, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    dataset, _ = ones(num_samples, 1)
    return DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, **options))


LOADERS: dict[str, Callable[[Booster], DataLoader[Any]]] = {
    "plain": lambda _: DataLoader(*ones(8, 1)),
    "longer": lambda _: DataLoader(*ones(12, 1)),
    "larger": lambda _: DataLoader(*ones(8, 2)),
    "dropping": lambda _: DataLoader(*ones(8, 1), drop_last=True),
    "shuffled": lambda _: DataLoader(*ones(8, 1), shuffle=True),
    "shuffled seed": lambda _: DataLoader(*ones(8, 1), shuffle=True, generator=torch.Generator().manual_seed(3)),
    "prepared": _prepared,
    "prepared longer": lambda booster: booster.prepare_dataloader(*ones(12, 1)),
    "prepared larger": lambda booster: booster.prepare_dataloader(*ones(8, 2)),
    "prepared shuffled": lambda booster: _prepared(booster, shuffle=True),
    "prepared dropping": lambda booster: _prepared(booster, drop_last=True),
    "prepared seed": lambda booster: _prepared(booster, seed=3),
    "custom": lambda booster: _prepared(booster, distributed_sampler_cls=DistributedSampler),
    "custom larger": lambda booster: booster.prepare_dataloader(
        *ones(8, 2), distributed_sampler_cls=DistributedSampler
    ),
    "distributed": lambda _: distributed_loader(),
    "distributed longer": lambda _: distributed_loader(12),
    "distributed seed": lambda _: distributed_loader(seed=3),
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
    _loader("shuffled seed", "seed=1024.*seed=3", "shuffled"),
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
            versions = boost_checks.installed_versions() | {package: "0.0.1"}
            patch.setattr(boost_checks, "installed_versions", lambda *_: versions)
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
        mark_boosted(net, updates)
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
