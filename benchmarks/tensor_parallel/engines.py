"""The training steps that benchmarks/tensor_parallel/run.py compares: half the work, all of it, DTensor's, and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _harness.gpt import batches, next_token_loss
from _harness.llama import LLAMA_SIZES, make_llama
from _harness.pair import Engine, Step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

__all__ = [
    "DTENSOR",
    "HALF",
    "OURS",
    "PLAN",
    "SEQUENCE_MODES",
    "SQUARE",
    "WHOLE",
    "engines_of",
    "grid_engines",
    "sequence_name",
]

HALF = "a rank's share, nothing sent"
WHOLE = "one process, the whole model"
DTENSOR = "DTensor parallelize_module"
OURS = "HybridParallel"
SQUARE = "HybridParallel, 2d"
SEQUENCE_MODES = ("split_gather", "ring")

# What is split how, by DTensor and by ours; ours is also told that heads stay whole, which they do with DTensor as long
# as the ranks divide them.
PLAN = {
    "token": "vocab",
    **{f"layers.*.attention.{name}": "colwise" for name in ("q", "k", "v")},
    "layers.*.attention.o": "rowwise",
    **{f"layers.*.network.{name}": "colwise" for name in ("gate", "up")},
    "layers.*.network.down": "rowwise",
    "head": "vocab_head",
}


def sequence_name(mode: str) -> str:
    """Returns the name of our engine with a sequence mode."""
    return f"{OURS}, {mode}"


def engines_of(size: str, *, has_sequence_modes: bool = False) -> list[Engine]:
    """Returns the engines, the rank's share of the work without communication first.

    Args:
        size: Name of the model.
        has_sequence_modes: With ours in the modes that divide the sequence among the tensor parallel ranks.
    """
    modes = SEQUENCE_MODES if has_sequence_modes else ()
    return [
        Engine(name=HALF, build=partial(_build_half, size)),
        Engine(name=WHOLE, build=partial(_build_whole, size)),
        Engine(name=DTENSOR, build=partial(_build_dtensor, size)),
        Engine(name=OURS, build=partial(_build_ours, size), requires=("booster",)),
        *(
            Engine(name=sequence_name(mode), build=partial(_build_ours, size, mode), requires=("booster",))
            for mode in modes
        ),
    ]


def grid_engines(size: str) -> list[Engine]:
    """Returns ours in one dimension and on a square, for as many ranks as form one."""
    return [
        Engine(name=OURS, build=partial(_build_ours, size), requires=("booster",)),
        Engine(name=SQUARE, build=partial(_build_ours, size, tp_mode="2d"), requires=("booster",)),
    ]


def _adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True)


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, size: str, num_tokens: int | None = None) -> Step:
    """Returns a step in plain torch; tokens are taken modulo `num_tokens` where the vocabulary is a share."""
    batch = _batches(size)

    def step(index: int) -> torch.Tensor:
        tokens, targets = batch(index)
        if num_tokens is not None:
            tokens, targets = tokens % num_tokens, targets % num_tokens
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _batches(size: str) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Returns the batches, the same ones on all ranks: they hold parts of one model."""
    return batches(LLAMA_SIZES[size])


def _build_half(size: str) -> Step:
    """The floor: a rank's heads, inner features and tokens, with nothing sent; it learns something else."""
    share = LLAMA_SIZES[size].share(dist.get_world_size())
    model = make_llama(share)
    return _plain_step(model, _adamw(model.parameters()), size, share.vocabulary)


def _build_whole(size: str) -> Step:
    """The same step without tensor parallelism; all ranks do it beside each other."""
    model = make_llama(LLAMA_SIZES[size])
    return _plain_step(model, _adamw(model.parameters()), size)


def _build_dtensor(size: str) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = make_llama(LLAMA_SIZES[size])
    parallelize_module(model, mesh, _dtensor_plan())
    # A kernel of the optimizer takes tensors of one kind: norms stay plain ones.
    split = [one for one in model.parameters() if isinstance(one, DTensor)]
    whole = [one for one in model.parameters() if not isinstance(one, DTensor)]
    step = _plain_step(model, _adamw([{"params": split}, {"params": whole}]), size)

    def split_loss_step(index: int) -> torch.Tensor:
        with loss_parallel():  # backward belongs into it
            loss = step(index)
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    return split_loss_step


def _dtensor_plan() -> dict[str, ParallelStyle]:
    # Both vocabularies as in ours: rows of the embedding, and logits that stay split until the loss.
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "vocab": partial(RowwiseParallel, input_layouts=Replicate()),
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "vocab_head": partial(ColwiseParallel, use_local_output=False),
    }
    return {name: styles[style]() for name, style in PLAN.items()}


def _build_ours(size: str, sequence_mode: str | None = None, tp_mode: str = "1d") -> Step:
    from booster import Booster
    from booster.plugins import HybridParallelPlugin
    from booster.plugins.hybrid_parallel.tp_plan.plan import Style

    shape = LLAMA_SIZES[size]
    model, batch = make_llama(shape), _batches(size)
    heads = {
        name: Style(style, num_heads=shape.heads) for name, style in PLAN.items() if name.endswith((".q", ".k", ".v"))
    }
    plugin = HybridParallelPlugin(
        tp_size=dist.get_world_size(),
        tp_mode=tp_mode,
        precision="fp32",
        plan=PLAN | heads,
        enable_sequence_parallelism=sequence_mode is not None,
        sequence_parallelism_mode=sequence_mode,
    )
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, _, _ = booster.boost(model, _adamw(model.parameters()), next_token_loss)

    def step(index: int) -> torch.Tensor:
        tokens, targets = batch(index)
        loss = criterion(model(tokens), targets)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
