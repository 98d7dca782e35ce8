"""DeepSpeed's ZeRO stages 1 and 2 as engines of benchmarks/zero/run.py: on the CPU, over gloo, without its launcher."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _harness.gpt import SIZES, batches, make_gpt, next_token_loss
from _harness.pair import Step

__all__ = ["ENVIRONMENT", "build_deepspeed"]

# Read when deepspeed is imported. LOCAL_SIZE, which its launcher sets too, stays unset: with it every rank keeps 66 MiB
# of shared memory for inference, which training never uses, and leaves the file behind.
ENVIRONMENT = {"DS_ACCELERATOR": "cpu"}


def build_deepspeed(
    size: str, precision: str, stage: int, make_optimizer: Callable[[Any], torch.optim.Optimizer], max_norm: float
) -> Step:
    """Returns a step of DeepSpeed's engine, with the defaults of its configuration.

    The first build on a machine compiles C++ for a minute.
    """
    import deepspeed

    shape = SIZES[size]
    model, batch = make_gpt(shape), batches(shape, dist.get_rank(), dist.get_world_size())
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it compiles
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=make_optimizer(model.parameters()),
            config=_configuration(shape.samples, precision, stage, max_norm),
        )

    def step(index: int) -> torch.Tensor:
        tokens, targets = batch(index)
        loss = next_token_loss(engine(tokens), targets)
        engine.backward(loss)
        engine.step()  # clips, and makes the gradients zero
        return loss.detach()

    return step


def _configuration(samples: int, precision: str, stage: int, max_norm: float) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_clipping": max_norm,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
    }
