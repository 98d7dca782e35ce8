"""What is proved of every plugin on accelerators: simulated ones, and several ranks that share one GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness.forkserver import Device
from hybrid_cases import MODES, TP_2, TP_2_DP_2, assert_hybrid_equals_serial
from parity import assert_parallel_equals_serial
from pipeline_cases import assert_pipeline_equals_serial

_CHUNKS = {"chunk_config_dict": {"chunk_size": 512}}
_OFFLOADED = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "placement_policy": "static"}
PLUGINS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("torch_ddp", {}),
    "zero 1": ("low_level_zero", {"stage": 1}),
    "zero 1, overlapped": ("low_level_zero", {"stage": 1, "overlap_allgather": True}),
    "zero 2": ("low_level_zero", {"stage": 2}),
    "zero 2, offloaded": ("low_level_zero", {"stage": 2, "cpu_offload": True}),
    "gemini": ("gemini", _CHUNKS),
    "gemini, prefetched": ("gemini", {"max_prefetch": 2, **_CHUNKS}),
    "gemini, offloaded": ("gemini", {**_OFFLOADED, **_CHUNKS}),
    "gemini, offloaded and pinned": ("gemini", {"pin_memory": True, "max_prefetch": 1, **_OFFLOADED, **_CHUNKS}),
    "fsdp": ("torch_fsdp", {}),
    "fsdp, offloaded": ("torch_fsdp", {"cpu_offload": True}),
    "fsdp, gathered once": ("torch_fsdp", {"sharding_strategy": "SHARD_GRAD_OP"}),
}


def train(name: str, device: Device, **settings: Any) -> None:
    """Trains under one of `PLUGINS` and in one process; see `assert_parallel_equals_serial`."""
    plugin, arguments = PLUGINS[name]
    if name.startswith("gemini, offloaded"):
        settings = {"optimizer": "hybrid_adam", **settings}
    settings = {"model": "mlp_odd", "max_norm": 0.5, "device": device, **settings}
    assert_parallel_equals_serial(plugin, plugin_arguments=arguments, **settings)


def _hybrid(
    layout: tuple[int, dict[str, Any]], device: Device, model: str = "user_transformer", **settings: Any
) -> None:
    assert_hybrid_equals_serial(model, layout, max_norm=0.5, device=device, **settings)


def _pipeline(model: str, device: Device, **settings: Any) -> None:
    assert_pipeline_equals_serial(model, device=device, **settings)


# By name, with the number of ranks: functions of the device, which train in parallel and in one process.
PARALLEL: dict[str, Callable[[Device], None]] = {
    **{f"{name} 2": partial(train, name) for name in PLUGINS},
    **{f"{name} 4": partial(train, name, world_size=4) for name in ("ddp", "zero 2", "gemini", "fsdp")},
    "zero 2, fp16 2": partial(train, "zero 2", precision="fp16", optimizer="sgd"),
    "tensor 2": partial(_hybrid, TP_2),
    "tensor 2, data 2": partial(_hybrid, TP_2_DP_2, zero_stage=1),
    **{mode: partial(_hybrid, MODES[mode]) for mode in ("split_gather 2", "ring 2", "all_to_all 2", "ring_attn 2")},
    "pipeline 2": partial(_pipeline, "glued_chain"),
    "pipeline 2, zbv": partial(_pipeline, "glued_chain", schedule="zbv"),
    "pipeline 3": partial(_pipeline, "glued_chain", pp_size=3),
    "pipeline 2, tensor 2": partial(_pipeline, "user_transformer", axes="tp 2"),
    "pipeline 2, data 2": partial(_pipeline, "tied_lm", axes="dp 2 zero 1"),
    "pipeline 2, all_to_all 2": partial(_pipeline, "user_transformer", axes="all_to_all 2"),
    "experts 2": partial(_hybrid, (2, {"ep_size": 2}), model="mixtral", zero_stage=1),
    "experts 2, data 2": partial(_hybrid, (4, {"ep_size": 2}), model="mixtral", zero_stage=1),
    "grid 4": partial(_hybrid, (4, {"tp_size": 4, "tp_mode": "2d"}), model="llama"),
}


def check_collectives(device: torch.device) -> None:
    """Runs every collective on two ranks, whose tensors are on this device."""
    rank = dist.get_rank()
    mine = torch.arange(4.0, device=device) + 10 * rank
    total = mine.clone()
    dist.all_reduce(total)
    assert total.tolist() == [10.0, 12.0, 14.0, 16.0]
    dist.all_reduce(mean := mine.clone(), dist.ReduceOp.AVG)
    assert mean.tolist() == [5.0, 6.0, 7.0, 8.0]
    dist.all_reduce(highest := mine.clone(), dist.ReduceOp.MAX)
    assert highest.tolist() == [10.0, 11.0, 12.0, 13.0]
    dist.broadcast(first := mine.clone(), src=0)
    assert first.tolist() == [0.0, 1.0, 2.0, 3.0]
    joined = torch.empty(8, device=device)
    dist.all_gather_into_tensor(joined, mine)
    assert joined.tolist() == [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
    listed = [torch.empty(4, device=device) for _ in range(2)]
    dist.all_gather(listed, mine)
    assert torch.equal(torch.cat(listed), joined)
    shard = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(shard, mine)
    assert shard.tolist() == ([10.0, 12.0], [14.0, 16.0])[rank]
    dist.reduce_scatter(shard, list(mine.chunk(2)))
    assert shard.tolist() == ([10.0, 12.0], [14.0, 16.0])[rank]
    swapped = torch.empty(4, device=device)
    dist.all_to_all_single(swapped, mine)
    assert swapped.tolist() == ([0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0])[rank]
    uneven = torch.empty((2, 6)[rank], device=device)
    dist.all_to_all_single(uneven, mine, [1, 1] if rank == 0 else [3, 3], [1, 3])
    assert uneven.tolist() == ([0.0, 10.0], [1.0, 2.0, 3.0, 11.0, 12.0, 13.0])[rank]
    parts = [torch.empty(2, device=device) for _ in range(2)]
    dist.all_to_all(parts, list(mine.chunk(2)))
    assert torch.equal(torch.cat(parts), swapped)
    dist.reduce(total := mine.clone(), dst=1)
    assert total.tolist() == ([0.0, 1.0, 2.0, 3.0], [10.0, 12.0, 14.0, 16.0])[rank]
    dist.gather(mine, listed if rank == 0 else None, dst=0)
    assert torch.equal(torch.cat(listed), joined)
    dist.scatter(part := torch.empty(2, device=device), list(mine.chunk(2)) if rank == 1 else None, src=1)
    assert part.tolist() == ([10.0, 11.0], [12.0, 13.0])[rank]
    dist.barrier()
