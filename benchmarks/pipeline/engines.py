"""The steps that benchmarks/pipeline/run.py compares: a stage's share of the work, torch's schedules, and ours.

All of them go forward and backward and then drop the gradients; no weight is updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _harness.gpt import GPTSize
from _harness.pair import Engine, Step
from pipeline.model import NUM_STAGES, PIPELINE_SIZES, Stack, make_stack, next_features_loss, stack_batches
from torch.distributed import pipelining

__all__ = ["ALONE", "STYLES", "Style", "engines_of", "our_name", "torch_name"]

ALONE = "a stage's share, nothing sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """A schedule, under our name and under torch's.

    Attributes:
        name: Our `pp_style`.
        torch_class: torch's class of the same schedule.
        num_chunks: Chunks of the model on each stage.
        target: The most that a step may take of the time that the schedule allows.
        is_v: The second chunk of the first stage is the last one of the model.
        has_bubble: The allowed time has the stages' wait in it.
    """

    name: str
    torch_class: str
    num_chunks: int = 1
    target: float = 1.03
    is_v: bool = False
    has_bubble: bool = True

    def microbatches_of_time(self, num_microbatches: int, num_stages: int = NUM_STAGES) -> float:
        """Returns what a step may take, in times that a stage needs for a microbatch's forward and backward."""
        return num_microbatches + (num_stages - 1) / self.num_chunks * self.has_bubble

    def positions(self, stage: int, num_stages: int = NUM_STAGES) -> list[int]:
        """Returns which chunks of the model a stage holds, by their places in it."""
        if self.is_v:
            return [stage, 2 * num_stages - 1 - stage]
        return [chunk * num_stages + stage for chunk in range(self.num_chunks)]


STYLES = {
    style.name: style
    for style in (
        Style(name="gpipe", torch_class="ScheduleGPipe"),
        Style(name="1f1b", torch_class="Schedule1F1B", target=1.02),
        Style(name="interleaved", torch_class="ScheduleInterleaved1F1B", num_chunks=2),
        Style(name="zbv", torch_class="ScheduleZBVZeroBubble", num_chunks=2, target=1.05, is_v=True, has_bubble=False),
    )
}


def our_name(style: str) -> str:
    """Returns the name of our engine with a schedule."""
    return f"ours, {style}"


def torch_name(style: str) -> str:
    """Returns the name of torch's engine with the same schedule."""
    return f"torch, {style}"


def engines_of(size: str, styles: Sequence[str] = tuple(STYLES)) -> list[Engine]:
    """Returns the engines, the stage's share without communication first.

    Args:
        size: Name of the model.
        styles: Which schedules, by our names.
    """
    engines = [Engine(name=ALONE, build=partial(_build_alone, size))]
    for style in styles:
        engines.append(Engine(name=torch_name(style), build=partial(_build_torch, size, style)))
        engines.append(Engine(name=our_name(style), build=partial(_build_ours, size, style), requires=("booster",)))
    return engines


def _chunk(size: GPTSize, position: int, num_positions: int) -> Stack:
    """Returns one of equally long chunks of the model."""
    bounds = [size.layers * place // num_positions for place in (position, position + 1)]
    return Stack(list(make_stack(size).blocks[slice(*bounds)]))


def _build_alone(size_name: str) -> Step:
    """The floor: each rank takes all microbatches through its own half, one after the other.

    The ranks do so at the same time, as two busy cores share the memory's bandwidth. What would be sent is there.
    """
    size = PIPELINE_SIZES[size_name]
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    batch, half = stack_batches(size), _chunk(size, rank, num_ranks)
    gradient = torch.full((1, size.sequence, size.width), 1e-6)

    def step(index: int) -> torch.Tensor:
        total = torch.zeros(())
        for x in batch(index).split(1):
            outputs = half(x.detach().requires_grad_(rank > 0))  # the first stage needs no gradient of the batch
            if rank == num_ranks - 1:
                loss = next_features_loss(outputs, x) / size.samples
                loss.backward()
                total += loss.detach()
            else:
                outputs.backward(gradient)
        half.zero_grad()
        return total

    return step


def _build_torch(size_name: str, style_name: str) -> Step:
    size, style = PIPELINE_SIZES[size_name], STYLES[style_name]
    rank, num_positions = dist.get_rank(), NUM_STAGES * style.num_chunks
    positions, batch = style.positions(rank), stack_batches(size)
    chunks = [_chunk(size, position, num_positions) for position in positions]
    cpu = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(chunk, position, num_positions, cpu)
        for chunk, position in zip(chunks, positions, strict=True)
    ]

    def loss_of_microbatch(outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return next_features_loss(outputs, x) / size.samples

    # Gradients are scaled by the loss: scale_grads goes over all of them once more.
    kind = getattr(pipelining, style.torch_class)
    schedule = kind(stages if style.num_chunks > 1 else stages[0], size.samples, loss_of_microbatch, scale_grads=False)
    has_end = num_positions - 1 in positions
    rank_of_end = 0 if style.is_v else NUM_STAGES - 1

    def step(index: int) -> torch.Tensor:
        x = batch(index)
        inputs = (x,) if 0 in positions else ()
        losses: list[torch.Tensor] = []
        schedule.step(*inputs, **({"target": x, "losses": losses} if has_end else {}))
        for chunk in chunks:
            chunk.zero_grad()
        loss = torch.stack(losses).sum().detach() if has_end else torch.zeros(())
        dist.broadcast(loss, rank_of_end)  # as ours does
        return loss

    return step


def _build_ours(size_name: str, style_name: str) -> Step:
    from booster import Booster
    from booster.plugins import HybridParallelPlugin

    size, style = PIPELINE_SIZES[size_name], STYLES[style_name]
    model, batch = make_stack(size), stack_batches(size)
    plugin = HybridParallelPlugin(
        pp_size=NUM_STAGES,
        pp_style=style.name,
        num_model_chunks=style.num_chunks,
        num_microbatches=size.samples,
        precision="fp32",
    )
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, _, _ = booster.boost(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), next_features_loss
    )

    def step(index: int) -> Any:
        loss = booster.execute_pipeline(iter([batch(index)]), model, criterion, optimizer)["loss"]
        optimizer.zero_grad()
        return loss

    return step
