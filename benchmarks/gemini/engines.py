"""The training loops that benchmarks/gemini/run.py compares: torch's, DeepSpeed's stage 3, and Gemini's placements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness import gpt
from _harness.gpt import GPT, MAX_NORM, SIZES, batches, make_gpt
from _harness.pair import Engine, Step
from zero.deepspeed import build_deepspeed
from zero.engines import BASELINE, FLOOR
from zero.engines import engines_of as zero_engines_of

__all__ = [
    "ALL_ON_DISK",
    "AUTO",
    "BASELINE",
    "DEEPSPEED",
    "FLOOR",
    "FSDP",
    "GEMINI",
    "KEPT",
    "PREFETCH",
    "STATES_ON_DISK",
    "STATIC",
    "STATIC_HYBRID",
    "Placement",
    "adamw",
    "boosted_step",
    "engines_of",
    "hybrid_adam",
]

FSDP = "FSDP2"
DEEPSPEED = "DeepSpeed 3"
STATIC = "Gemini static"
STATIC_HYBRID = "Gemini static, HybridAdam"
KEPT = "Gemini kept gathered"
PREFETCH = "Gemini prefetch 1"
AUTO = "Gemini auto, HybridAdam"
STATES_ON_DISK = "Gemini states on disk, HybridAdam"
ALL_ON_DISK = "Gemini all on disk, HybridAdam"

_DEEPSPEED_STAGE = 3

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Returns torch's fused AdamW, the optimizer of all peers."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True)


def hybrid_adam(parameters: Any) -> torch.optim.Optimizer:
    """Returns HybridAdam with the same hyperparameters."""
    from booster.optim import HybridAdam

    return HybridAdam(parameters, lr=1e-3, weight_decay=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One variant to run the GeminiPlugin.

    Attributes:
        arguments: Of the plugin, beside precision and chunk size.
        make_optimizer: From the parameters.
        is_on_disk: The plugin gets a directory to offload to.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    make_optimizer: MakeOptimizer = adamw
    is_on_disk: bool = False


# With AdamW where the step is compared with peers' steps that have it too; offloaded states need HybridAdam.
GEMINI: Mapping[str, Placement] = {
    STATIC: Placement(),
    STATIC_HYBRID: Placement(make_optimizer=hybrid_adam),
    KEPT: Placement(arguments={"shard_param_frac": 0.0}),
    PREFETCH: Placement(arguments={"max_prefetch": 1}),
    AUTO: Placement(arguments={"placement_policy": "auto"}, make_optimizer=hybrid_adam),
    STATES_ON_DISK: Placement(arguments={"offload_optim_frac": 1.0}, make_optimizer=hybrid_adam, is_on_disk=True),
    ALL_ON_DISK: Placement(arguments={"placement_policy": "cpu"}, make_optimizer=hybrid_adam, is_on_disk=True),
}


def engines_of(size: str, precision: str, chunk_size_m: float, directory: Path) -> list[Engine]:
    """Returns the engines of one comparison, torch's DistributedDataParallel first.

    Args:
        size: Name of the model.
        precision: "fp32", or "bf16": weights in bf16 with fp32 masters; DDP keeps fp32 weights and runs by autocast.
        chunk_size_m: Least elements of a chunk, in units of 2**20; chunks are at most twice that, if a parameter is
            not larger.
        directory: For what is offloaded; who calls removes it.
    """
    peers = [engine for engine in zero_engines_of(size, precision) if engine.name in (BASELINE, FLOOR, FSDP)]
    deepspeed = partial(build_deepspeed, size, precision, _DEEPSPEED_STAGE, adamw, MAX_NORM)
    return [
        *peers,
        Engine(name=DEEPSPEED, build=deepspeed, requires=("deepspeed",), is_optional=True),
        *(_our_engine(name, size, precision, chunk_size_m, directory) for name in GEMINI),
    ]


def _our_engine(name: str, size: str, precision: str, chunk_size_m: float, directory: Path) -> Engine:
    build = partial(_build_ours, name, size, precision, chunk_size_m, directory)
    return Engine(name=name, build=build, requires=("booster",))


def _build_ours(name: str, size: str, precision: str, chunk_size_m: float, directory: Path) -> Step:
    placement, shape = GEMINI[name], SIZES[size]
    arguments = {**placement.arguments, "precision": precision}
    if placement.is_on_disk:
        arguments["offload_dir"] = str(directory)
    batch = batches(shape, dist.get_rank(), dist.get_world_size())
    return boosted_step(make_gpt(shape), batch, chunk_size_m, arguments, placement.make_optimizer)


def boosted_step(
    model: GPT,
    batch: Callable[[int], Sequence[torch.Tensor]],
    chunk_size_m: float,
    arguments: Mapping[str, Any],
    make_optimizer: MakeOptimizer,
) -> Step:
    """Returns a step of the booster with a GeminiPlugin of these arguments.

    Args:
        model: With weights, or lazy.
        batch: Gives the inputs and targets of step i.
        chunk_size_m: Least elements of a chunk, in units of 2**20.
        arguments: Of the plugin, beside those of its chunks.
        make_optimizer: From the model's parameters.
    """
    from booster import Booster
    from booster.plugins import GeminiPlugin

    chunks = {"min_chunk_size_m": chunk_size_m, "search_range_m": chunk_size_m}
    booster = Booster(plugin=GeminiPlugin(**{**chunks, **arguments}))
    return gpt.boosted_step(booster, model, make_optimizer(model.parameters()), batch)
