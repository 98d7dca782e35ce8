"""The variants to do an Adam step that benchmarks/adam/run.py compares, all of them over the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from booster.kernels import adam, flat_buffers
from booster.kernels.adam import AdamSettings, adam_reference
from booster.kernels.loader import load_kernel

__all__ = [
    "BASELINES",
    "CONTROL",
    "DEEPSPEED",
    "IN_PLACE",
    "IN_PLACE_ALONE",
    "OURS",
    "OUR_PASS",
    "REFERENCE_PASS",
    "Data",
    "Variant",
    "variants_of",
]

OURS, CONTROL = "ours", "control (the baseline again)"
OUR_PASS, REFERENCE, REFERENCE_PASS = "ours, no norm", "ours, no compiler", "ours, no compiler, no norm"
BASELINES = {"fp32": "torch fused", "mixed": "torch sequence"}
DEEPSPEED = {"fp32": "DeepSpeed CPUAdam", "mixed": "DeepSpeed path (less work)"}
IN_PLACE, IN_PLACE_ALONE, TRIAD = "memory, in place", "memory, in place, 1 thread", "memory, stream triad"

LR, BETAS, EPS, WEIGHT_DECAY = 1e-5, (0.9, 0.999), 1e-8, 0.01
LOSS_SCALE, MAX_NORM = 1024.0, 1.0
_BLOCK_ELEMENTS = 512 * 1024
_SETTINGS = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One variant to do a step.

    Attributes:
        step: Does it; what it returns means nothing.
        num_bytes: That the work has to read and write, for each parameter.
    """

    step: Callable[[int], float]
    num_bytes: int


class Data:
    """Set of tensors that all variants update in turn: `num_tensors` views of flat buffers of `numel` elements."""

    def __init__(self, numel: int, num_tensors: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.numel = numel
        self.flat = torch.randn(numel, generator=random)
        self.flat_grad = torch.randn(numel, generator=random).mul_(1e-3)
        self.flat_exp_avg = torch.randn(numel, generator=random).mul_(1e-4)
        self.flat_exp_avg_sq = torch.rand(numel, generator=random).mul_(1e-6)
        size = -(-numel // num_tensors)
        self.params = [torch.nn.Parameter(part) for part in self.flat.split(size)]
        self.grads = list(self.flat_grad.split(size))
        self.exp_avgs = list(self.flat_exp_avg.split(size))
        self.exp_avg_sqs = list(self.flat_exp_avg_sq.split(size))
        self._saved_half_grad = (self.flat_grad * LOSS_SCALE).bfloat16()
        self._flat_half_grad = self._saved_half_grad.clone()
        self.half_grads = list(self._flat_half_grad.split(size))
        self.copies = list(torch.zeros(numel, dtype=torch.bfloat16).split(size))
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad

    def renew_gradients(self) -> None:
        """Undoes the zeroing of bf16 gradients, and fills the caches with something else."""
        self._flat_half_grad.copy_(self._saved_half_grad)
        self.flat_exp_avg.mul_(1.0)
        self.flat_exp_avg_sq.mul_(1.0)

    def states(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Returns parameters and moments."""
        return [param.detach() for param in self.params], self.exp_avgs, self.exp_avg_sqs

    def give_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes an optimizer update these moments."""
        optimizer.step()
        for param, exp_avg, exp_avg_sq in zip(self.params, self.exp_avgs, self.exp_avg_sqs, strict=True):
            optimizer.state[param].update(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


def variants_of(precision: str, data: Data, *, with_peers: bool = True, with_memory: bool = True) -> dict[str, Variant]:
    """Returns the variants by their names, the baseline first.

    Args:
        precision: "fp32": everything in it. "mixed": bf16 gradients, fp32 masters and states, bf16 working copies.
        data: What they update.
        with_peers: Whether those of others take part, but for the baseline.
        with_memory: Whether the memory's own speed does.
    """
    variants = _fp32_variants(data, with_peers) if precision == "fp32" else _mixed_variants(data, with_peers)
    return {**variants, **_memory_variants(data)} if with_memory else variants


def _fp32_variants(data: Data, with_peers: bool) -> dict[str, Variant]:
    num_bytes = 28  # three arrays read and written, gradients read
    fused, foreach = _torch_adamw(data, fused=True), _torch_adamw(data, foreach=True)
    variants = {
        BASELINES["fp32"]: Variant(step=fused, num_bytes=num_bytes),
        CONTROL: Variant(step=fused, num_bytes=num_bytes),
        OURS: Variant(step=_our_fp32_step(data), num_bytes=num_bytes),
    }
    if with_peers:
        variants["torch foreach"] = Variant(step=foreach, num_bytes=num_bytes)
        deepspeed = _deepspeed_adam(data)
        if deepspeed is not None:
            variants[DEEPSPEED["fp32"]] = Variant(step=deepspeed, num_bytes=num_bytes)
    return variants


def _mixed_variants(data: Data, with_peers: bool) -> dict[str, Variant]:
    # Three arrays read and written; gradients read, for the norm too, and zeroed; copies written.
    num_bytes = 24 + 2 + 2 + 2 + 2
    sequence = _torch_sequence(data)
    variants = {
        BASELINES["mixed"]: Variant(step=sequence, num_bytes=num_bytes),
        CONTROL: Variant(step=sequence, num_bytes=num_bytes),
        OURS: Variant(step=_our_mixed_step(data), num_bytes=num_bytes),
        OUR_PASS: Variant(step=_our_single_pass(data), num_bytes=num_bytes - 2),
        REFERENCE: Variant(step=_our_reference(data, with_norm=True), num_bytes=num_bytes),
        REFERENCE_PASS: Variant(step=_our_reference(data, with_norm=False), num_bytes=num_bytes - 2),
    }
    deepspeed = _deepspeed_path(data) if with_peers else None
    if deepspeed is not None:
        variants[DEEPSPEED["mixed"]] = Variant(step=deepspeed, num_bytes=num_bytes - 4)
    return variants


def _memory_variants(data: Data) -> dict[str, Variant]:
    arrays = data.flat, data.flat_exp_avg, data.flat_exp_avg_sq
    sum_of_two = torch.empty(data.numel)

    def in_place(_: int) -> float:
        for array in arrays:
            array.mul_(1.0)
        return 0.0

    def in_place_alone(index: int) -> float:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        in_place(index)
        torch.set_num_threads(num_threads)
        return 0.0

    def triad(_: int) -> float:
        torch.add(arrays[0], arrays[1], alpha=3.0, out=sum_of_two)
        return 0.0

    return {
        IN_PLACE: Variant(step=in_place, num_bytes=24),
        IN_PLACE_ALONE: Variant(step=in_place_alone, num_bytes=24),
        TRIAD: Variant(step=triad, num_bytes=12),
    }


def _our_fp32_step(data: Data) -> Callable[[int], float]:
    _require_kernel("adam")

    def step(index: int) -> float:
        params, exp_avgs, exp_avg_sqs = data.states()
        adam.adam_step(params, data.grads, exp_avgs, exp_avg_sqs, [index + 2] * len(params), **_SETTINGS)
        return 0.0

    return step


def _our_single_pass(data: Data, coefficient: Callable[[], Tensor | None] = lambda: None) -> Callable[[int], float]:
    _require_kernel("adam")

    def step(index: int) -> float:
        params, exp_avgs, exp_avg_sqs = data.states()
        adam.adam_step(
            params,
            data.half_grads,
            exp_avgs,
            exp_avg_sqs,
            [index + 2] * len(params),
            model_params=data.copies,
            grad_scale=1 / LOSS_SCALE,
            clip_coef=coefficient(),
            zero_grads=True,
            **_SETTINGS,
        )
        return 0.0

    return step


def _our_mixed_step(data: Data) -> Callable[[int], float]:
    _require_kernel("flat_buffers")
    return _our_single_pass(data, lambda: _clip_coefficient(flat_buffers.sum_of_squares(data.half_grads) ** 0.5))


def _our_reference(data: Data, *, with_norm: bool) -> Callable[[int], float]:
    def step(index: int) -> float:
        settings = AdamSettings(
            grad_scale=1 / LOSS_SCALE,
            clip_coef=_clip_coefficient(_blocked_norm(data.half_grads)) if with_norm else None,
            zero_grads=True,
            **_SETTINGS,
        )
        params, exp_avgs, exp_avg_sqs = data.states()
        steps = [index + 2] * len(params)
        adam_reference(params, data.half_grads, exp_avgs, exp_avg_sqs, data.copies, steps, settings)
        return 0.0

    return step


def _blocked_norm(tensors: list[Tensor]) -> float:
    """Returns the norm in fp32 as plain torch computes it in the caches; in one call it takes 20 times as long."""
    scratch = torch.empty(_BLOCK_ELEMENTS)
    total = 0.0
    for tensor in tensors:
        for block in tensor.split(_BLOCK_ELEMENTS):
            wide = scratch[: block.numel()].copy_(block)
            total += float(wide.dot(wide))
    return total**0.5


def _clip_coefficient(scaled_norm: float) -> Tensor:
    """Returns torch's, of the gradients without the loss scale."""
    return torch.tensor(min(1.0, MAX_NORM / (scaled_norm / LOSS_SCALE + 1e-6)))


def _torch_adamw(data: Data, **kind: bool) -> Callable[[int], float]:
    optimizer = torch.optim.AdamW(data.params, **_SETTINGS, **kind)
    data.give_states(optimizer)

    def step(_: int) -> float:
        optimizer.step()
        return 0.0

    return step


@torch.no_grad()
def _cast_gradients(data: Data) -> None:
    for grad, half in zip(data.grads, data.half_grads, strict=True):
        grad.copy_(half)


@torch.no_grad()
def _cast_parameters(data: Data) -> None:
    for copy, param in zip(data.copies, data.params, strict=True):
        copy.copy_(param)


def _torch_sequence(data: Data) -> Callable[[int], float]:
    """Cast, unscale, norm and clip, fused step, cast, zero: each a pass of its own."""
    optimizer = _torch_adamw(data, fused=True)

    def step(index: int) -> float:
        _cast_gradients(data)
        torch._foreach_mul_(data.grads, 1 / LOSS_SCALE)
        torch.nn.utils.clip_grad_norm_(data.params, MAX_NORM)
        optimizer(index)
        _cast_parameters(data)
        torch._foreach_zero_(data.half_grads)
        return 0.0

    return step


def _deepspeed_adam(data: Data) -> Callable[[int], float] | None:
    """Returns None where DeepSpeed is not installed."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    optimizer = DeepSpeedCPUAdam(data.params, **_SETTINGS, adamw_mode=True)
    data.give_states(optimizer)

    def step(_: int) -> float:
        optimizer.step()
        return 0.0

    return step


def _deepspeed_path(data: Data) -> Callable[[int], float] | None:
    """Cast, step, cast, as its offload does in fp32 masters; no norm, no unscaling, no zeroing."""
    optimizer = _deepspeed_adam(data)
    if optimizer is None:
        return None

    def step(index: int) -> float:
        _cast_gradients(data)
        optimizer(index)
        _cast_parameters(data)
        return 0.0

    return step


def _require_kernel(name: str) -> None:
    if load_kernel(name) is None:
        raise RuntimeError(f"the kernel {name!r} can't be had here: its reference would be measured in its place")
