"""Steps of training on the simulated device, with the numbers of waits of the host and of collectives per step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from parity import Case, _make_own_optimizer, make_booster
from simulated_cuda import device, reports
from zoo import WholeBatches, split_batch

from booster.pytree import map_tensors

WARM_UP = 3  # steps: caches are filled, the first batches compared
STEPS = 3


@dataclass(frozen=True)
class Costs:
    """What one step costs on this rank, on average.

    Attributes:
        syncs: Waits of the host for the device.
        pageable: Copies to the device from memory that is not pinned.
        collectives: Collectives and messages of the device, by name.
        places: Where the waits are.
    """

    syncs: float
    pageable: float
    collectives: dict[str, float]
    places: str


def measure(settings: dict) -> Costs:
    """Train on this rank and count."""
    case = Case(**settings)
    entry = case.entry
    booster = make_booster(case, entry)
    raw = WholeBatches(entry).build() if case.is_pipelined else entry.build()
    model, optimizer, *_ = booster.boost(raw, _make_own_optimizer(case.optimizer, entry.param_groups(raw)))
    size, rank = booster.plugin.dp_size, booster.plugin.dp_rank
    batches = [
        map_tensors(
            lambda tensor: tensor.to(booster.device),
            split_batch(entry.make_batch(step, case.samples_per_rank * size), rank, size),
        )
        for step in range(WARM_UP + STEPS)
    ]
    device.set_options(drops_avoidable_waits=True)
    for step in range(WARM_UP):
        _step(booster, case, entry, model, optimizer, batches[step])
    with reports.recording() as record:
        for step in range(STEPS):
            _step(booster, case, entry, model, optimizer, batches[WARM_UP + step])
    collectives: Counter[str] = record.collectives()
    return Costs(
        syncs=record.count("sync") / STEPS,
        pageable=record.count("pageable") / STEPS,
        collectives={name: number / STEPS for name, number in collectives.items()},
        places=record.describe("sync", "pageable"),
    )


def _step(booster, case: Case, entry, model, optimizer, batch) -> None:
    if case.is_pipelined:
        whole = WholeBatches(entry)
        booster.execute_pipeline(iter([whole.feed(batch)]), model, whole.criterion, optimizer)
    else:
        booster.backward(entry.loss(model, batch), optimizer)
    booster.clip_grad_norm_(optimizer, case.max_norm)
    optimizer.step()
    optimizer.zero_grad()
