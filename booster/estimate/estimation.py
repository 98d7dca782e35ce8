"""`booster.estimate_memory`: what a plugin would take on each rank, without a byte of it being allocated."""

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
from booster.comm import group_size, imagine_others, imagined_world, is_initialized
from booster.errors import ConfigError
from booster.estimate.optimizer_memory import OptimizerMemory
from booster.estimate.question import Question, loss_of
from booster.interface import MemoryParts, MixedPrecision, Plugin, RankMemory
from booster.mixed_precision import mixed_precision_from_name
from booster.registry import plugin_from_name

__all__ = ["MemoryEstimate", "answer", "estimate_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What training takes on the rank that needs the most; bytes.

    Attributes:
        plugin: Name of the plugin's class.
        settings: Its arguments, where they were given by name.
        num_ranks: Of the world.
        memory: At the worst moments of a step, and between steps.
        device_memory: What there is; None: not said.
    """

    plugin: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int
    memory: RankMemory
    device_memory: int | None = None

    @property
    def peak(self) -> MemoryParts:
        """What the rank holds at the worst moment."""
        return self.memory.peak

    @property
    def total(self) -> int:
        """Bytes at the worst moment."""
        return self.peak.total

    @property
    def sent(self) -> int:
        """Bytes that the rank sends in a step."""
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
        """Whether the device has room for it; None: its memory was not said."""
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
    """Return how much memory a rank needs to train a model: parameters, gradients, states, activations, buffers.

    Nothing of that size is allocated, and nothing is communicated. Activations are measured: forward and backward run
    on tensors without values.

    Args:
        model: Real, on the meta device (`with torch.device("meta")`) or built in a `LazyInitContext`. It isn't changed.
        plugin: A name, built in or registered, with `settings` and `num_ranks`; or a `Plugin`, for the world that was
            launched. None: one device.
        batch: Of one rank: what `execute_pipeline` takes, a mapping of keyword arguments, a tuple, or a tensor. Only
            shapes and formats count, so meta tensors will do.
        optimizer: Over parameters of the model, or what makes one.
        criterion: Returns the loss of (outputs, batch); None: the model's own.
        num_ranks: Of the world to be imagined, with a plugin's name.
        settings: The plugin's arguments, with its name.
        mixed_precision: As `Booster` takes it.
        device_memory: Bytes that there are.

    Call it on any rank, on its own.

    Raises:
        ConfigError: Arguments that don't go together, a plugin that can't tell, or a model that can't be measured.

    Example:
        >>> import torch
        >>> from booster import estimate_memory
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1))
        >>> batch = torch.empty(8, 1024, device="meta")
        >>> arguments = {"batch": batch, "criterion": lambda outputs, batch: outputs.mean(), "num_ranks": 4}
        >>> estimate = estimate_memory(model, "low_level_zero", settings={"stage": 2}, **arguments)
        >>> f"{estimate.peak.parameters:,}"  # fp16 by default, with what makes the flat buffer divide
        '8,405,248'
    """
    trained = None
    if isinstance(optimizer, Optimizer):
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
    question = Question(model, OptimizerMemory.of(optimizer), batch, criterion or loss_of, trained)
    return answer(
        question,
        plugin,
        num_ranks=num_ranks,
        settings=settings,
        mixed_precision=mixed_precision,
        device_memory=device_memory,
    )


def answer(
    question: Question,
    plugin: str | Plugin | None,
    *,
    num_ranks: int | None = None,
    settings: Mapping[str, Any] | None = None,
    mixed_precision: str | MixedPrecision | None = None,
    device_memory: int | None = None,
) -> MemoryEstimate:
    """Return the estimate for a question that may be put to several plugins; see `estimate_memory`."""
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(
            f"settings={settings!r} is a {type(settings).__name__}: give the plugin's arguments by name, such as"
            " {'stage': 2}, or leave it out"
        )
    if device_memory is not None and not (is_number(device_memory) and device_memory > 0):
        raise ConfigError(
            f"device_memory={device_memory!r} is no number of bytes: give what a device has, such as 80 * 2**30, or"
            " leave it out"
        )
    with _asked(plugin, num_ranks, settings) as asked, _without_garbage_collection():
        if mixed_precision not in (None, "fp32") and asked.control_precision():
            raise ConfigError(
                f"mixed_precision={mixed_precision!r} was given with {type(asked).__name__}, which has number formats"
                " of its own: give them in settings=, such as {'precision': 'bf16'}"
            )
        question.precision = _precision(mixed_precision)
        memory = asked.estimate_memory(question)
        return MemoryEstimate(
            plugin=type(asked).__name__,
            settings=dict(settings or {}),
            num_ranks=group_size(),
            memory=memory,
            device_memory=device_memory,
        )


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep Python from looking for cycles: it finds hardly any, and would free those at any moment."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _asked(plugin: str | Plugin | None, num_ranks: int | None, settings: Mapping[str, Any] | None) -> Iterator[Plugin]:
    """Yield the plugin, in its world, or in one that is imagined for it."""
    if isinstance(plugin, Plugin):
        if settings or num_ranks not in (None, group_size()):
            raise ConfigError(
                f"plugin is a {type(plugin).__name__} of a world of {group_size()} ranks, with settings of its own, and"
                f" num_ranks={num_ranks!r}, settings={settings!r} were given too: give its name in place of the object"
            )
        with imagine_others():
            yield plugin
        return
    if plugin is not None and not isinstance(plugin, str):
        raise ConfigError(
            f"plugin={plugin!r} is a {type(plugin).__name__}: give a Plugin, or a name such as 'low_level_zero'"
        )
    wanted = group_size() if num_ranks is None else num_ranks
    if not isinstance(wanted, int) or wanted < 1:
        raise ConfigError(f"num_ranks={num_ranks!r} is no number of ranks: give 1 or more")
    if plugin is None and wanted > 1:
        raise ConfigError(f"num_ranks={wanted} without a plugin: say how they work together, such as 'torch_ddp'")
    if is_initialized() and wanted == group_size():
        with imagine_others():
            yield plugin_from_name(plugin, **(settings or {})) if plugin else _single_device()
        return
    with imagined_world(wanted):
        yield plugin_from_name(plugin, **(settings or {})) if plugin else _single_device()


def _single_device() -> Plugin:
    made: Plugin = importlib.import_module("booster.single_device").SingleDevicePlugin("cpu")
    return made


def _precision(given: str | MixedPrecision | None) -> MixedPrecision | None:
    if given is None or given == "fp32":
        return None
    return given if isinstance(given, MixedPrecision) else mixed_precision_from_name(given)
