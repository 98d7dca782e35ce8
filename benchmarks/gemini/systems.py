"""Who trains the largest GPT in little memory, for benchmarks/gemini/run.py --largest: each at its most frugal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness.gpt import GPT, GPTSize, batches, make_gpt, plain_step
from _harness.pair import Step
from gemini.engines import BASELINE, FSDP, adamw, boosted_step, hybrid_adam
from gemini.limit import HeldMeter, confine, release
from torch.nn.parallel import DistributedDataParallel

__all__ = ["OURS", "SYSTEMS", "System", "Trained", "num_parameters", "shape_of", "train_confined"]

OURS = "Gemini, all on disk, HybridAdam"

_HEAD_WIDTH = 64
_VOCABULARY = 8192
_SEQUENCE = 64  # few tokens: weights are to fill the memory, not activations
_CHUNK_SIZE_M = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came of one rank's steps.

    Attributes:
        peak_bytes: The most that the process held of private and shared memory.
        build_seconds: Until the first step.
        step_seconds: Of the last step.
        loss: Of the last step.
    """

    peak_bytes: int
    build_seconds: float
    step_seconds: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One variant to train.

    Attributes:
        name: How tables and files call it.
        build: Returns the step for a shape; the directory is for what is offloaded.
        weight_bytes: What a weight takes on each of P ranks, for the first guess; None: no limit.
    """

    name: str
    build: Callable[[GPTSize, Path], Step]
    weight_bytes: Callable[[int], float] | None = None


def shape_of(width: int, layers: int) -> GPTSize:
    """Returns the GPT of that many layers, with a batch of one short sample."""
    heads = max(1, width // _HEAD_WIDTH)
    return GPTSize(width=width, layers=layers, heads=heads, vocabulary=_VOCABULARY, sequence=_SEQUENCE, samples=1)


def num_parameters(shape: GPTSize) -> int:
    """Returns the number of weights: that of the model with one layer, and that of more layers."""
    with torch.device("meta"):
        model = GPT(shape_of(shape.width, 1))
    of_layer = sum(parameter.numel() for parameter in model.blocks.parameters())
    return sum(parameter.numel() for parameter in model.parameters()) + (shape.layers - 1) * of_layer


def train_confined(
    build: Callable[[GPTSize, Path], Step],
    shape: GPTSize,
    directory: Path,
    limit_bytes: int | None,
    groups: Sequence[Path | None],
    steps: int,
) -> Trained:
    """Trains in this process, which gets so many bytes.

    Collective: every rank must call it with the same arguments.

    Args:
        build: Of a system.
        shape: Of the model.
        directory: For what is offloaded.
        limit_bytes: Of the process; None: all that there are.
        groups: The memory cgroup of every rank, or None.
        steps: To train.

    Raises:
        MemoryError: More was held than the limit, which shared memory can reach that is in no RLIMIT_DATA.
        RuntimeError: The loss is not finite.
    """
    import booster.optim  # noqa: F401 -- its code is in memory for all systems alike

    group = groups[dist.get_rank()]
    with HeldMeter() as meter:
        if limit_bytes is None:
            return _train(build, shape, directory, steps, meter)
        confine(limit_bytes, group)
        try:
            trained = _train(build, shape, directory, steps, meter)
        finally:
            release(group)  # what went wrong has to be told, and that takes memory
    if trained.peak_bytes > limit_bytes:
        raise MemoryError(f"out of memory: {trained.peak_bytes} bytes were held, above the limit of {limit_bytes}")
    return trained


def _train(
    build: Callable[[GPTSize, Path], Step], shape: GPTSize, directory: Path, steps: int, meter: HeldMeter
) -> Trained:
    times = [time.perf_counter()]
    step = build(shape, directory)
    times.append(time.perf_counter())
    loss = math.nan
    for index in range(steps):
        loss = float(step(index))
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss of step {index} is {loss}")
        times.append(time.perf_counter())
    return Trained(
        peak_bytes=meter.peak_bytes,
        build_seconds=times[1] - times[0],
        step_seconds=times[-1] - times[-2],
        loss=loss,
    )


def _build_ddp(shape: GPTSize, directory: Path) -> Step:
    model = make_gpt(shape)
    # Gradients live in the buckets: without it DDP holds them twice.
    replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain_step(replicated, adamw(model.parameters()), _own_batches(shape))


def _build_fsdp(shape: GPTSize, directory: Path) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = GPT(shape)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # The head apart from the root: else both tables are gathered at the same time.
    for module in (*model.blocks, model.head, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    for name, parameter in model.named_parameters():
        _initialize(name, parameter)
    return plain_step(model, adamw(model.parameters()), _own_batches(shape))


def _initialize(name: str, parameter: Any) -> None:
    """As `make_gpt` does, but where the shard is: the whole model would not fit."""
    shard = parameter.detach().to_local()
    if shard.dim() > 1:
        shard.normal_(0.0, 0.02)
    else:
        shard.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)


def _own_batches(shape: GPTSize) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return batches(shape, dist.get_rank(), dist.get_world_size())


def _build_ours(shape: GPTSize, directory: Path) -> Step:
    from booster import LazyInitContext

    with LazyInitContext():
        model = make_gpt(shape)
    batch = batches(shape, dist.get_rank(), dist.get_world_size())
    arguments = {"placement_policy": "cpu", "precision": "fp32", "offload_dir": str(directory)}
    return boosted_step(model, batch, _CHUNK_SIZE_M, arguments, hybrid_adam)


SYSTEMS: Sequence[System] = (
    System(name=BASELINE, build=_build_ddp, weight_bytes=lambda P: 16.0),
    System(name=FSDP, build=_build_fsdp, weight_bytes=lambda P: 16.0 / P),
    System(name=OURS, build=_build_ours),
)
