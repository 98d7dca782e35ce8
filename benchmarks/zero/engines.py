"""The training loops that benchmarks/zero/run.py compares: replicated, sharded by torch and DeepSpeed, and ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _harness import gpt
from _harness.gpt import GPT, MAX_NORM, SIZES, batches, make_gpt, next_token_loss, plain_step
from _harness.pair import Engine, Step
from torch.nn.parallel import DistributedDataParallel
from zero.deepspeed import build_deepspeed
from zero.manual import policy_of, shard_manual

__all__ = [
    "BASELINE",
    "FLOOR",
    "REDUNDANCY",
    "STAGES",
    "adamw",
    "boosted_step",
    "deepspeed_name",
    "engines_of",
    "our_name",
    "probe",
    "task",
]

BASELINE = "torch DDP"
FLOOR = "no communication"
REDUNDANCY = "ZeroRedundancyOptimizer"
STAGES = (1, 2)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def our_name(stage: int, *, hybrid_adam: bool = False) -> str:
    """Returns the name of our engine of a stage, with torch's fused AdamW or with HybridAdam."""
    return f"LowLevelZero {stage}" + (", HybridAdam" if hybrid_adam else "")


def deepspeed_name(stage: int) -> str:
    """Returns the name of DeepSpeed's engine of a stage."""
    return f"DeepSpeed {stage}"


def engines_of(size: str, precision: str) -> list[Engine]:
    """Returns the engines of one comparison, torch's DistributedDataParallel first.

    Args:
        size: Name of the model.
        precision: "fp32", or "bf16": weights in bf16 with fp32 masters; DDP keeps fp32 weights and runs by autocast.
    """
    torch_engines = [
        Engine(name=BASELINE, build=partial(_build_ddp, size, precision)),
        Engine(name=FLOOR, build=partial(_build_alone, size, precision)),
        Engine(name="FSDP2", build=partial(_build_fsdp, size, precision)),
    ]
    if precision == "fp32":  # it has no masters: there is no bf16 training with it
        torch_engines.append(Engine(name=REDUNDANCY, build=partial(_build_redundancy, size)))
    return [
        *torch_engines,
        *(_deepspeed_engine(size, precision, stage) for stage in STAGES),
        *(_our_engine(size, precision, stage) for stage in STAGES),
        *(_our_engine(size, precision, stage, hybrid_adam=True) for stage in STAGES),
    ]


def probe(size: str, precision: str) -> Engine:
    """Returns forward and backward without an optimizer; its gradients stay, so that the rest is activations."""
    return Engine(name="forward and backward", build=partial(_build_probe, size, precision))


def _deepspeed_engine(size: str, precision: str, stage: int) -> Engine:
    build = partial(build_deepspeed, size, precision, stage, adamw, MAX_NORM)
    return Engine(name=deepspeed_name(stage), build=build, requires=("deepspeed",), is_optional=True)


def _our_engine(size: str, precision: str, stage: int, *, hybrid_adam: bool = False) -> Engine:
    build = partial(_build_ours, size, precision, stage, _hybrid_adam if hybrid_adam else adamw)
    return Engine(name=our_name(stage, hybrid_adam=hybrid_adam), build=build, requires=("booster",))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Returns torch's fused AdamW, the optimizer of all."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True)


def _hybrid_adam(parameters: Any) -> torch.optim.Optimizer:
    from booster.optim import HybridAdam

    return HybridAdam(parameters, lr=1e-3, weight_decay=0.01)


def task(size: str) -> tuple[GPT, Callable[[int], tuple[torch.Tensor, torch.Tensor]]]:
    """Returns the model of that size and this rank's batches."""
    shape = SIZES[size]
    return make_gpt(shape), batches(shape, dist.get_rank(), dist.get_world_size())


def _build_ddp(size: str, precision: str) -> Step:
    model, batch = task(size)
    replicated = DistributedDataParallel(model)
    return plain_step(replicated, adamw(model.parameters()), batch, autocasts=precision == "bf16")


def _build_alone(size: str, precision: str) -> Step:
    """The floor: the baseline's work on each rank's own data, with nothing sent. Its losses go their own way."""
    model, batch = task(size)
    return plain_step(model, adamw(model.parameters()), batch, autocasts=precision == "bf16")


def _build_redundancy(size: str) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, batch = task(size)
    # As its documentation has it: the gradients stay in the buckets that DDP has in any case.
    replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        replicated.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3, weight_decay=0.01, fused=True
    )
    return plain_step(replicated, optimizer, batch)


def _build_fsdp(size: str, precision: str) -> Step:
    model, batch = task(size)
    shard_manual(model, policy_of(precision, torch.float32), reshard_after_forward=True)
    return plain_step(model, adamw(model.parameters()), batch)


def _build_ours(size: str, precision: str, stage: int, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> Step:
    from booster.plugins import LowLevelZeroPlugin

    return boosted_step(size, LowLevelZeroPlugin(stage=stage, precision=precision), make_optimizer)


def boosted_step(size: str, plugin: Any, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> Step:
    """Returns a step of the same loop through the booster with that plugin."""
    from booster import Booster

    model, batch = task(size)
    return gpt.boosted_step(Booster(plugin=plugin), model, make_optimizer(model.parameters()), batch)


def _build_probe(size: str, precision: str) -> Step:
    model, batch = task(size)
    model.to(_DTYPES[precision])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(index: int) -> torch.Tensor:
        tokens, targets = batch(index)
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        return loss.detach()

    return step
