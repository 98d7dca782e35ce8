"""`booster.estimate_memory`: memory per rank under a plugin, without allocating it."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.argument_checks import is_number
from booster.comm import fake_collectives, fake_world, group_size, is_initialized
from booster.errors import ConfigError
from booster.estimate.optimizer_memory import OptimizerMemory
from booster.estimate.question import FakeTensorMemoryRequest, default_criterion
from booster.interface import MemoryParts, MixedPrecision, Plugin, RankMemory
from booster.mixed_precision import mixed_precision_from_name
from booster.registry import plugin_from_name

__all__ = ["MemoryEstimate", "estimate_memory", "estimate_request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Estimated memory of the rank that needs the most, in bytes.

    Attributes:
        plugin: Class name of the plugin.
        settings: Arguments of the plugin that were given by name.
        num_ranks: World size.
        memory: Peak memory in backward and the optimizer step, and memory between steps.
        device_memory: Available memory per rank; None if not given.
    """

    plugin: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int
    memory: RankMemory
    device_memory: int | None = None

    @property
    def peak(self) -> MemoryParts:
        """Memory at the peak, by category."""
        return self.memory.peak

    @property
    def total(self) -> int:
        """Peak memory in bytes."""
        return self.peak.total

    @property
    def sent(self) -> int:
        """Bytes sent by the rank in a step."""
        return self.memory.sent

    def __str__(self) -> str:
        parts = ", ".join(
            f"{one.name.replace('_', ' ')} {getattr(self.peak, one.name) / 2**20:,.1f}" for one in fields(self.peak)
        )
        return (
            f"{self.plugin} on {self.num_ranks} rank(s): {self.total / 2**20:,.1f} MiB at most ({parts}),"
            f" {self.sent / 2**20:,.1f} MiB sent by a rank in a step"
        )

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into the device memory; None if that was not given."""
        return None if self.device_memory is None else self.total <= self.device_memory


def estimate_memory(
    model: nn.Module,
    plugin: str | Plugin | None = None,
    *,
    batch: Any,
    optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] = torch.optim.AdamW,
    criterion: Callable[[Any, Any], torch.Tensor] | None = None,
    num_ranks: int | None = None,
    settings: Mapping[str, Any] | None = None,
    mixed_precision: str | MixedPrecision | None = None,
    device_memory: int | None = None,
) -> MemoryEstimate:
    """Estimate the memory for training a model on a rank: parameters, gradients, states, activations, buffers.

    The model is not allocated, and nothing is communicated. Activations are measured by a forward and backward on fake
    tensors. Not a collective: may be called on a single rank.

    Args:
        model: Model with real values, on the meta device (`with torch.device("meta")`) or built in a `LazyInitContext`.
            Not modified.
        plugin: Name of a plugin, with `settings` and `num_ranks`; or a `Plugin` of the launched world; optional,
            defaults to a single device.
        batch: Batch of one rank, as for `execute_pipeline`: a mapping of keyword arguments, a tuple, or a tensor. Only
            shapes and dtypes matter, so meta tensors may be used.
        optimizer: Optimizer over parameters of the model, or a function that creates one from a list of parameters.
        criterion: Function of (outputs, batch) that returns the loss; optional, defaults to the model's own loss.
        num_ranks: World size to estimate for, with the name of a plugin; optional, defaults to the launched world.
        settings: Arguments of the plugin, with its name.
        mixed_precision: Mixed precision, as for `Booster`.
        device_memory: Available memory per rank in bytes, for `MemoryEstimate.fits`.

    Raises:
        ConfigError: Arguments conflict, the plugin has no estimate, or the model can't be measured.

    Example:
        >>> import torch
        >>> from booster import estimate_memory
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1))
        >>> batch = torch.empty(8, 1024, device="meta")
        >>> arguments = {"batch": batch, "criterion": lambda outputs, batch: outputs.mean(), "num_ranks": 4}
        >>> estimate = estimate_memory(model, "low_level_zero", settings={"stage": 2}, **arguments)
        >>> f"{estimate.peak.parameters:,}"  # fp16 by default, with padding of the flat buffer
        '8,405,248'
    """
    trained = None
    if isinstance(optimizer, Optimizer):
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
    request = FakeTensorMemoryRequest(
        model, OptimizerMemory.of(optimizer), batch, criterion or default_criterion, trained
    )
    return estimate_request(
        request,
        plugin,
        num_ranks=num_ranks,
        settings=settings,
        mixed_precision=mixed_precision,
        device_memory=device_memory,
    )


def estimate_request(
    request: FakeTensorMemoryRequest,
    plugin: str | Plugin | None,
    *,
    num_ranks: int | None = None,
    settings: Mapping[str, Any] | None = None,
    mixed_precision: str | MixedPrecision | None = None,
    device_memory: int | None = None,
) -> MemoryEstimate:
    """Return the estimate for a request that is reused for several plugins; see `estimate_memory`."""
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(
            f"settings={settings!r} is a {type(settings).__name__}: give the plugin's arguments by name, such as"
            " {'stage': 2}, or omit it"
        )
    if device_memory is not None and not (is_number(device_memory) and device_memory > 0):
        raise ConfigError(
            f"device_memory={device_memory!r} is not a positive number of bytes: give the memory of a device, such as"
            " 80 * 2**30, or omit it"
        )
    with _plugin_in_world(plugin, num_ranks, settings) as plugin_object, _without_garbage_collection():
        if mixed_precision not in (None, "fp32") and plugin_object.control_precision():
            raise ConfigError(
                f"mixed_precision={mixed_precision!r} was given with {type(plugin_object).__name__}, which has its own"
                " precision: give it in settings=, such as {'precision': 'bf16'}"
            )
        request.precision = _precision(mixed_precision)
        memory = plugin_object.estimate_memory(request)
        return MemoryEstimate(
            plugin=type(plugin_object).__name__,
            settings=dict(settings or {}),
            num_ranks=group_size(),
            memory=memory,
            device_memory=device_memory,
        )


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection of cycles, which would free tensors at arbitrary times and so change the peak."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _plugin_in_world(
    plugin: str | Plugin | None, num_ranks: int | None, settings: Mapping[str, Any] | None
) -> Iterator[Plugin]:
    """Yield the plugin, with its process group or a fake one."""
    if isinstance(plugin, Plugin):
        if settings or num_ranks not in (None, group_size()):
            raise ConfigError(
                f"plugin is a {type(plugin).__name__} with its own settings and world of {group_size()} ranks, but"
                f" num_ranks={num_ranks!r}, settings={settings!r} were given too: give its name in place of the object"
            )
        with fake_collectives():
            yield plugin
        return
    if plugin is not None and not isinstance(plugin, str):
        raise ConfigError(
            f"plugin={plugin!r} is a {type(plugin).__name__}: give a Plugin, or a name such as 'low_level_zero'"
        )
    world_size = group_size() if num_ranks is None else num_ranks
    if not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(f"num_ranks={num_ranks!r} is not a positive int: give 1 or more")
    if plugin is None and world_size > 1:
        raise ConfigError(f"num_ranks={world_size} needs a plugin: give plugin=, such as 'torch_ddp'")
    if is_initialized() and world_size == group_size():
        with fake_collectives():
            yield plugin_from_name(plugin, **(settings or {})) if plugin else _single_device()
        return
    with fake_world(world_size):
        yield plugin_from_name(plugin, **(settings or {})) if plugin else _single_device()


def _single_device() -> Plugin:
    plugin: Plugin = importlib.import_module("booster.single_device").SingleDevicePlugin("cpu")
    return plugin


def _precision(given: str | MixedPrecision | None) -> MixedPrecision | None:
    if given is None or given == "fp32":
        return None
    return given if isinstance(given, MixedPrecision) else mixed_precision_from_name(given)
