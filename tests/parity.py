"""`assert_parallel_equals_serial`: the property that every plugin's tests prove."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from harness import run_ranks
from oracles.serial_training import Record, make_optimizer, train_serial
from zoo import get_model, split_batch


@dataclass(frozen=True)
class Tolerance:
    """Largest differences allowed: |a - b| <= absolute + relative * |b|."""

    loss: float
    norm: float
    weight_relative: float
    weight_absolute: float


# fp32: sums over the batch in another order, over 5 steps. A step of AdamW(lr=1e-2, eps=1e-3) turns a relative gradient
# error of 1e-6 into at most 1e-8 of a weight of order 1e-2; ten times that over the steps is still below 1e-6.
# bf16, fp16: gradients of each half of the batch are rounded to 8 (11) bits before they are averaged, those of the
# whole batch after: 2**-8 (2**-11) relative per step, and 5 AdamW steps of 1e-2 move a weight by at most 5e-2.
TOLERANCES = {
    None: Tolerance(loss=1e-5, norm=1e-4, weight_relative=1e-5, weight_absolute=2e-6),
    "bf16": Tolerance(loss=2e-2, norm=5e-2, weight_relative=1e-2, weight_absolute=1e-2),
    "fp16": Tolerance(loss=2e-3, norm=1e-2, weight_relative=2e-3, weight_absolute=2e-3),
    # e4m3 has 4 significant bits, and each rank scales by the largest value of its own part of the batch.
    "fp8": Tolerance(loss=1e-1, norm=2.5e-1, weight_relative=5e-2, weight_absolute=3e-2),
}


@dataclass(frozen=True)
class Case:
    """One training job. `synchronize` is how micro-batches are accumulated: "always", "no_sync" or "accumulate"."""

    plugin: str
    model: str
    world_size: int = 2
    precision: str | None = None
    steps: int = 5
    samples_per_rank: int = 2
    accumulation: int = 1
    synchronize: str = "always"
    max_norm: float = float("inf")
    optimizer: str = "adamw"
    plugin_arguments: dict[str, Any] = field(default_factory=dict)


def assert_parallel_equals_serial(plugin: str, model: str, *, tolerance: Tolerance | None = None, **settings) -> None:
    """Trains `model` of the zoo under `plugin` and in one process on the same global batches, and compares.

    Losses, gradient norms (before clipping) and all weights and buffers must agree; all ranks must hold the same.
    """
    case = Case(plugin=plugin, model=model, **settings)
    ranks = run_ranks(train_parallel, case.world_size, asdict(case), timeout=120)
    serial = train_reference(case)
    allowed = tolerance or TOLERANCES["fp16" if (case.precision or "").startswith("fp16") else case.precision]
    for rank, record in enumerate(ranks):
        where = f"{case}, rank {rank}"
        _assert_close(record.losses, serial.losses, allowed.loss, f"losses of {where}")
        _assert_close(record.norms, serial.norms, allowed.norm, f"gradient norms of {where}")
        assert record.weights.keys() == serial.weights.keys(), where
        for name, weight in record.weights.items():
            expected = serial.weights[name]
            assert weight.dtype == expected.dtype, f"{name} of {where}"
            torch.testing.assert_close(
                weight.double(),
                expected.double(),
                rtol=allowed.weight_relative,
                atol=allowed.weight_absolute,
                msg=lambda text, name=name, where=where: f"{name} of {where}: {text}",
            )
            assert torch.equal(weight, ranks[0].weights[name]), f"{name} differs between rank 0 and {where}"


def train_reference(case: Case) -> Record:
    """Trains in this process, on the batches that all ranks together see."""
    if case.precision == "fp8":
        return train_parallel({**asdict(case), "plugin": None, "world_size": 1, "plugin_arguments": {},
                               "samples_per_rank": case.samples_per_rank * case.world_size})  # fmt: skip
    return train_serial(
        get_model(case.model),
        precision=case.precision,
        steps=case.steps,
        batch_size=case.samples_per_rank * case.world_size,
        accumulation=case.accumulation,
        max_norm=case.max_norm,
        optimizer=case.optimizer,
    )


def train_parallel(settings: dict[str, Any]) -> Record:
    """Trains on this rank through the booster; runs on every rank."""
    case = Case(**settings)
    entry = get_model(case.model)
    booster = make_booster(case, entry)
    raw = entry.build()
    model, optimizer, *_ = booster.boost(raw, make_optimizer(case.optimizer, entry.param_groups(raw)))
    record = Record()
    size, rank = booster.plugin.dp_size, booster.plugin.dp_rank
    for step in range(case.steps):
        loss_sum = 0.0
        for index in range(case.accumulation):
            batch = entry.make_batch(step * case.accumulation + index, case.samples_per_rank * size)
            loss_sum += _micro_step(booster, case, entry, model, optimizer, split_batch(batch, rank, size), index)
        record.losses.append(_mean_over_ranks(loss_sum / case.accumulation))
        if case.synchronize != "accumulate":
            record.norms.append(float(booster.clip_grad_norm_(optimizer, case.max_norm)))
            optimizer.step()
            optimizer.zero_grad()
        else:
            record.norms.append(optimizer.get_grad_norm())
    record.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return record


def _micro_step(booster, case: Case, entry, model, optimizer, batch, index: int) -> float:
    is_last = index == case.accumulation - 1
    if case.synchronize == "accumulate":
        with booster.accumulate(model, optimizer, case.accumulation):
            loss = entry.loss(model, batch)
            booster.backward(loss, optimizer)
            booster.clip_grad_norm_(optimizer, case.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())
    skip = case.synchronize == "no_sync" and not is_last
    with booster.no_sync(model, optimizer) if skip else nullcontext():
        loss = entry.loss(model, batch)
        booster.backward(loss / case.accumulation, optimizer)
    return float(loss.detach())


def make_booster(case: Case, entry):
    from booster import Booster
    from booster.registry import plugin_from_name

    if case.plugin is None:
        return Booster(device="cpu", mixed_precision=make_precision(case.precision))
    arguments = dict(case.plugin_arguments)
    if case.plugin == "torch_ddp":
        from booster.plugins import TorchDDPPlugin

        arguments.setdefault("find_unused_parameters", entry.uses_unused_parameters)
        return Booster(plugin=TorchDDPPlugin(**arguments), mixed_precision=make_precision(case.precision))
    assert not arguments, f"say here how {case.plugin} takes {arguments}"
    return Booster(plugin=plugin_from_name(case.plugin), mixed_precision=make_precision(case.precision))


def make_precision(name: str | None):
    """Returns the object for a name; scaled formats start low enough that no step overflows."""
    from booster import (
        BF16MixedPrecision,
        FP8MixedPrecision,
        FP16ApexMixedPrecision,
        FP16NaiveMixedPrecision,
        FP16TorchMixedPrecision,
    )

    makers = {
        "bf16": BF16MixedPrecision,
        "fp8": FP8MixedPrecision,
        "fp16": FP16TorchMixedPrecision,
        "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2**8),
        "fp16_apex_o1": lambda: FP16ApexMixedPrecision(opt_level="O1", loss_scale=2**8),
        "fp16_apex_o2": lambda: FP16ApexMixedPrecision(opt_level="O2", loss_scale=2**8),
    }
    return None if name is None else makers[name]()


def _mean_over_ranks(value: float) -> float:
    if not dist.is_initialized():
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _assert_close(found: list[float], expected: list[float], relative: float, what: str) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        rtol=relative,
        atol=relative * 1e-2,
        msg=lambda text: f"{what}: {found} against {expected}: {text}",
    )
