"""Who trains large models in benchmarks/gpu_suite.py: in bf16, with fp32 masters, in one process alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from _harness.engine import Step
from _harness.gpt import GPT, SIZES, GPTSize, batches, plain_step
from gpu.cases import SizedBuild, boosted, gemini, plain_half
from zero.manual import policy_of

__all__ = ["LADDER", "LARGE", "PLAIN", "TINY_LADDER", "LargeEngine", "large_engine"]

PLAIN = "plain torch"
_CPU_CHUNK_SIZE_M = 1  # in a dry run
# Larger ones are built lazily, where the host draws all random numbers: that takes 10 seconds a billion weights.
_EAGER_BYTES = 8e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeEngine:
    """One variant to train a large model.

    Attributes:
        name: How tables and files call it.
        build: Returns the step for a size on a device.
        device_bytes: What its method keeps of each weight on the device: the physical limit of its memory.
        host_bytes: The same on the host.
        is_pooled: It puts them where memory allows.
        climbs: It is one of those whose largest model is searched for.
    """

    name: str
    build: SizedBuild
    device_bytes: float
    host_bytes: float
    is_pooled: bool = False
    climbs: bool = True

    def limit(self, device_free: float, host_free: float) -> float:
        """Returns the most weights for which so many bytes could do, with nothing else in them."""
        if self.is_pooled:
            return (device_free + host_free) / (self.device_bytes + self.host_bytes)
        limits = [(self.device_bytes, device_free), (self.host_bytes, host_free)]
        return min(free / needed for needed, free in limits if needed > 0)

    def host_needed(self, weights: int, device_free: float) -> float:
        """Returns the bytes that the host must have at least."""
        if self.is_pooled:
            return max(0.0, (self.device_bytes + self.host_bytes) * weights - device_free)
        return self.host_bytes * weights


def _hybrid_adam(parameters: Any) -> torch.optim.Optimizer:
    from booster.optim import HybridAdam

    return HybridAdam(parameters, lr=1e-4, weight_decay=0.01)


def _zero(stage: int) -> Any:
    from booster.plugins import LowLevelZeroPlugin

    return LowLevelZeroPlugin(stage=stage, precision="bf16")


def _gemini_step(size: GPTSize, device: torch.device, *, arguments: Mapping[str, Any]) -> Step:
    from booster import LazyInitContext

    chunks: dict[str, Any] = {}
    if device.type == "cpu":
        chunks = {"min_chunk_size_m": _CPU_CHUNK_SIZE_M, "search_range_m": _CPU_CHUNK_SIZE_M}
    plugin = partial(gemini, "bf16", **{**chunks, **arguments})
    build = partial(boosted, size, device, plugin=plugin, make_optimizer=_hybrid_adam)
    if size.num_matmul_parameters * 4 < _EAGER_BYTES:
        return build()
    torch.manual_seed(0)
    with LazyInitContext():
        model = GPT(size)
    return build(model=model)


def _fsdp(size: GPTSize, device: torch.device, *, offloads: bool) -> Step:
    """fp32 weights, cast to bf16 where they are gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    with torch.device("meta"):
        model = GPT(size)
    arguments: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "reshard_after_forward": True,
        "mp_policy": policy_of("bf16", torch.float32),
        "offload_policy": CPUOffloadPolicy() if offloads and device.type != "cpu" else OffloadPolicy(),
    }
    for module in (*model.blocks, model.head, model):
        fully_shard(module, **arguments)
    model.to_empty(device="cpu" if offloads else device)
    for name, parameter in model.named_parameters():
        _initialize(name, parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    batch = batches(size, device=device)
    return plain_step(model, optimizer, batch)


def _fsdp_plugin(size: GPTSize, device: torch.device, *, offloads: bool) -> Step:
    """The same through the booster: units, policy and optimizer are those of `_fsdp`."""
    from torch.distributed.fsdp import CPUOffloadPolicy
    from torch.distributed.fsdp.wrap import CustomPolicy

    from booster import LazyInitContext
    from booster.plugins import TorchFSDPPlugin

    torch.manual_seed(0)
    with LazyInitContext():
        model = GPT(size)
    units = {id(module) for module in (*model.blocks, model.head)}
    plugin = partial(
        TorchFSDPPlugin,
        cpu_offload=CPUOffloadPolicy() if offloads and device.type != "cpu" else None,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
        mixed_precision=policy_of("bf16", torch.float32),
        reshard_after_forward=True,
    )
    return boosted(size, device, plugin=plugin, model=model)


def _initialize(name: str, parameter: Any) -> None:
    """As `make_gpt` does, but where the shard is."""
    shard = parameter.detach().to_local()
    if shard.dim() > 1:
        shard.normal_(0.0, 0.02)
    else:
        shard.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)


def _gemini_engine(
    name: str,
    device_bytes: float,
    host_bytes: float,
    *,
    is_pooled: bool = False,
    climbs: bool = False,
    **arguments: Any,
) -> LargeEngine:
    return LargeEngine(
        name=f"Gemini {name}",
        build=partial(_gemini_step, arguments=arguments),
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        is_pooled=is_pooled,
        climbs=climbs,
    )


# 16 bytes a weight: 2 of the weight, 2 of its gradient, 4 of its master, 8 of its moments; FSDP2's 4, 4 and 8.
LARGE: Sequence[LargeEngine] = (
    LargeEngine(  # and the masters' own gradients
        name=PLAIN, build=partial(plain_half, dtype=torch.bfloat16, scale=1.0), device_bytes=18, host_bytes=0
    ),
    LargeEngine(name="FSDP2", build=partial(_fsdp, offloads=False), device_bytes=16, host_bytes=0),
    LargeEngine(name="FSDP2, CPU offload", build=partial(_fsdp, offloads=True), device_bytes=0, host_bytes=16),
    LargeEngine(name="TorchFSDPPlugin", build=partial(_fsdp_plugin, offloads=False), device_bytes=16, host_bytes=0),
    LargeEngine(
        name="TorchFSDPPlugin, CPU offload", build=partial(_fsdp_plugin, offloads=True), device_bytes=0, host_bytes=16
    ),
    LargeEngine(
        name="LowLevelZero 2",
        build=partial(boosted, plugin=partial(_zero, 2), make_optimizer=_hybrid_adam),
        device_bytes=18,  # sums of gradients are fp32
        host_bytes=0,
    ),
    _gemini_engine("static", 16, 0, climbs=True),
    _gemini_engine("static, half of the states", 10, 6, offload_optim_frac=0.5, pin_memory=True),
    _gemini_engine("static, all states", 4, 12, climbs=True, offload_optim_frac=1.0, pin_memory=True),
    _gemini_engine("static, half of all", 8, 8, offload_optim_frac=0.5, offload_param_frac=0.5, pin_memory=True),
    _gemini_engine("static, all", 0, 16, offload_optim_frac=1.0, offload_param_frac=1.0, pin_memory=True),
    _gemini_engine("auto", 4, 12, is_pooled=True, climbs=True, placement_policy="auto", pin_memory=True),
    _gemini_engine("cpu", 0, 16, climbs=True, placement_policy="cpu", pin_memory=True),
)


def _rung(width: int, layers: int, heads: int) -> GPTSize:
    return replace(SIZES["1.3b"], width=width, layers=layers, heads=heads, samples=1)


# 1.3, 2.0, 2.7, 4.3, 6.7, 9.9, 13 and 22 billion weights; one sample each: weights are to fill the memory.
LADDER: Sequence[GPTSize] = (
    _rung(2048, 24, 16),
    _rung(2560, 24, 20),
    _rung(2560, 32, 20),
    _rung(3072, 36, 24),
    _rung(4096, 32, 32),
    _rung(4096, 48, 32),
    _rung(5120, 40, 40),
    _rung(6144, 48, 48),
)
TINY_LADDER: Sequence[GPTSize] = tuple(replace(SIZES["tiny"], layers=layers) for layers in (2, 4))


def large_engine(name: str) -> LargeEngine:
    """Returns the engine of that name."""
    return next(engine for engine in LARGE if engine.name == name)
