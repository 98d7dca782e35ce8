"""The unbroken run that a soak is compared with: plain torch in one process, and how far rounding may lead away.

# Note [Tolerance of a soak]: two runs over the same samples differ where sums are rounded in another order: a batch's
# gradient is a mean over one to four ranks or microbatches. So the serial run is made in float64, and in float32 with
# the batch in one, two, three and four parts. What those four differ from the float64 run by is the effect of float32
# rounding on this very model, data and number of steps; a soak mixes layouts of the same kind, and is allowed
# `MARGIN` times the largest of the four, and no less than 16 roundings of the largest value. A step that is lost or
# done twice is far beyond that; `resolution` says how far, and the soak fails where it isn't.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from soak_plan import GLOBAL_BATCH, Settings
from soak_rank import NUM_SAMPLES, Samples, criterion, make_training, states_of

from booster.data.sampler import DistributedBatchSampler

MARGIN = 10.0
PARTS = (1, 2, 3, 4)
_ROUNDINGS = 16 * torch.finfo(torch.float32).eps


@dataclass(slots=True, kw_only=True)
class Course:
    """A run: what it saw, its losses, and its tensors at the end and before the last update; without one, none."""

    samples: list[list[int]]
    losses: list[float]
    tensors: dict[str, torch.Tensor]
    tensors_before: dict[str, torch.Tensor]


def train(settings: Settings, num_steps: int, parts: int, dtype: torch.dtype) -> Course:
    """Trains for so many batches, each in so many parts."""
    model, optimizer, scheduler = make_training(dropout=0.0)
    model.to(dtype)
    data = Samples().vectors.to(dtype)
    course = Course(samples=[], losses=[], tensors={}, tensors_before={})
    num_waiting, epoch = 0, 0
    while len(course.losses) < num_steps:
        sampler = DistributedBatchSampler(NUM_SAMPLES, GLOBAL_BATCH, 0, 1, shuffle=True, drop_last=True)
        sampler.set_epoch(epoch)
        batches = list(sampler)[: num_steps - len(course.losses)]
        for number, indices in enumerate(batches):
            loss = 0.0
            for part in data[list(indices)].chunk(parts):
                part_loss = criterion(model(part), part) / parts
                part_loss.backward()
                loss += part_loss.item()
            num_waiting += 1
            if num_waiting == settings.accumulation or number + 1 == len(sampler):
                if len(course.losses) + 1 + settings.accumulation > num_steps:  # it may be the last one
                    course.tensors_before = _tensors(model, optimizer)
                _step(model, optimizer, num_waiting)
                scheduler.step()
                num_waiting = 0
            course.losses.append(loss)
            course.samples.append(list(indices))
        epoch += 1
    course.tensors = _tensors(model, optimizer)
    return course


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_waiting: int) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    for parameter in trained:
        parameter.grad /= num_waiting
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {name: tensor.double() for name, tensor in (weights | states_of(model, optimizer)).items()}


def write_reference(settings: Settings, num_steps: int, directory: Path) -> None:
    """Writes the losses, the samples, the tensors and their tolerances after so many steps."""
    exact = train(settings, num_steps, 1, torch.float64)
    rounded = [train(settings, num_steps, parts, torch.float32) for parts in PARTS]
    tolerances = {
        name: max(
            MARGIN * max((other.tensors[name] - tensor).abs().max().item() for other in rounded),
            _ROUNDINGS * tensor.abs().max().item(),
        )
        for name, tensor in exact.tensors.items()
    }
    moved = [
        (tensor - exact.tensors_before[name]).abs().max().item() / tolerances[name]
        for name, tensor in exact.tensors.items()
        if name in exact.tensors_before and tolerances[name] > 0
    ]
    reached, loss_tolerances = 0.0, []
    for step, loss in enumerate(exact.losses):
        reached = max(reached, *(abs(other.losses[step] - loss) for other in rounded))
        loss_tolerances.append(max(MARGIN * reached, _ROUNDINGS * abs(loss)))
    document = {
        "losses": exact.losses,
        "loss_tolerances": loss_tolerances,
        "samples": exact.samples,
        "tolerances": tolerances,
        "resolution": max(moved, default=float("inf")),
    }
    (directory / "serial.json").write_text(json.dumps(document))
    torch.save(exact.tensors, directory / "serial.pt")
