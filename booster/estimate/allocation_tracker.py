"""Tracking of the allocations of fake tensors: which storages live, how large they are, and what they are for."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from booster.comm import fake
from booster.pytree import iter_tensors

from .operator_costs import operator_cost
from .step_time import StepClock

_MAX_BUCKETS = 64  # of bucket collectives; see `booster.comm.fake`

Category = Literal["parameters", "gradients", "optimizer_states", "activations", "buffers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Memory of a rank at one time, in bytes.

    Attributes:
        parameters: Weights that the model computes with, as the rank stores them between steps.
        gradients: Gradients of parameters.
        optimizer_states: Optimizer states and fp32 master weights.
        activations: Tensors that forward and backward save and compute; in the optimizer's step, its temporaries.
        buffers: The model's buffers, gathered weights, and communication buffers.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(getattr(self, one.name) for one in fields(self))


@dataclass(slots=True)
class _TrackedStorage:
    """Live storage of a fake tensor, on the device or in host memory beside an accelerator."""

    num_bytes: int
    category: Category
    is_on_device: bool
    finalizer: weakref.finalize


class AllocationTracker(TorchDispatchMode):
    """Dispatch mode that tracks the storages of fake tensors; see Note [Simulated training] of `simulation`.

    Operators advance the clock, if there is one.

    Attributes:
        counts: Bytes by category.
        offloaded: Bytes in host memory beside an accelerator.
        peak_offloaded: The most of them since the last `take_peak`.
        flops: Floating-point operations, if they are counted.
    """

    def __init__(self, device: torch.device, clock: StepClock | None = None, *, counts_flops: bool = False) -> None:
        super().__init__()
        self._counts_flops = counts_flops
        self.flops = 0.0
        self._device_type = device.type
        self._clock = clock
        self._live: dict[int, _TrackedStorage] = {}
        self._ignored: set[int] = set()
        self._total = self._peak_total = 0
        self.counts: dict[Category, int] = dict.fromkeys(get_args(Category), 0)
        self.offloaded = self.peak_offloaded = 0
        self._peak = dict(self.counts)

    def __enter__(self) -> AllocationTracker:
        # FSDP frees and allocates gathered weights by resizing their storage, which no dispatch mode sees.
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = self._resize(storage, num_bytes)
            if storage._cdata in self._live:
                self._set_size(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        fake.max_buckets = _MAX_BUCKETS
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        fake.max_buckets = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device
        result = run_operator(func, args, kwargs or {})
        if self._clock is not None:
            self._clock.on_operator(func, args, kwargs or {}, result)
        if self._counts_flops:
            cost = operator_cost(func, args, kwargs or {}, result)
            self.flops += 0.0 if cost is None else cost.flops
        if isinstance(result, torch.Tensor):
            self.track(result)
        elif result is not None:
            for tensor in iter_tensors(result):
                self.track(tensor)
        return result

    def ignore(self, tensor: torch.Tensor) -> None:
        """Never count a tensor's storage, which must live as long as this mode."""
        key = storage_key(tensor)
        if key in self._live:
            self._live[key].finalizer.detach()
            self._free(key)
        self._ignored.add(key)

    def track(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage from now on."""
        if not isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._live or key in self._ignored:
            return
        is_on_device = tensor.device.type == self._device_type and not fake.is_offloading
        finalizer = weakref.finalize(storage, self._free, key)
        finalizer.atexit = False
        self._live[key] = _TrackedStorage(0, "activations", is_on_device, finalizer)
        self._set_size(key, storage.nbytes() * fake.num_threads)

    def categorize_activation(self, tensor: torch.Tensor, category: Category) -> None:
        """Count a tensor's storage as `category` if it counts as an activation."""
        one = self._live.get(storage_key(tensor)) if isinstance(tensor, FakeTensor) else None
        if one is not None and one.category == "activations":
            self._set_category(one, category)

    def categorize_all(self, categories: Mapping[int, Category], default: Category) -> None:
        """Set the categories of all storages, by `storage_key`; those of others to the default."""
        for key, one in self._live.items():
            self._set_category(one, categories.get(key, default))

    def _set_category(self, one: _TrackedStorage, category: Category) -> None:
        if one.is_on_device:
            self.counts[one.category] -= one.num_bytes
            self.counts[category] += one.num_bytes
        one.category = category

    def take_peak(self) -> MemoryParts:
        """Return the peak since the last call, by category."""
        peak = MemoryParts(**self._peak)
        self._peak_total, self._peak = self._total, dict(self.counts)
        self.peak_offloaded = self.offloaded
        return peak

    def _set_size(self, key: int, num_bytes: int) -> None:
        one = self._live[key]
        change, one.num_bytes = num_bytes - one.num_bytes, num_bytes
        if not one.is_on_device:
            self.offloaded += change
            self.peak_offloaded = max(self.peak_offloaded, self.offloaded)
            return
        self.counts[one.category] += change
        self._total += change
        if self._total > self._peak_total:
            self._peak_total, self._peak = self._total, dict(self.counts)

    def _free(self, key: int) -> None:
        self._set_size(key, 0)
        del self._live[key]


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage while it lives."""
    return int(tensor.untyped_storage()._cdata)


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on fake tensors, also where torch's fake implementations have gaps."""
    if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        # Its fake implementation supports bf16 only, unlike the real one. The casts are not counted.
        return func(*(one.bfloat16() for one in args[:2]), *args[2:], **kwargs).to(args[0].dtype)
    if _has_real_integers(func, args):  # the ranks of a mesh, for example, whose values the code reads
        with _disable_current_modes():
            return func(*args, **kwargs)
    if func is torch.ops.aten._pin_memory.default:  # has no fake implementation
        return args[0].clone()
    return func(*args, **kwargs)


def _has_real_integers(func: Any, args: tuple[Any, ...]) -> bool:
    first = args[0] if args else None
    if type(first) is not torch.Tensor or first.is_floating_point() or func is torch.ops.aten._to_copy.default:
        return False
    return not any(isinstance(one, FakeTensor) for one in args)
