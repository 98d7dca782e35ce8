"""Parallel plans: a plugin with its settings, found before training, and kept in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from booster.activation_checkpointing import checkpoint_activations
from booster.comm import group_size
from booster.core.activation_schedule import ActivationSchedule, ScheduleItem
from booster.errors import ConfigError
from booster.estimate.candidates import ONE_DEVICE, Candidate, format_batches, format_seconds, format_size
from booster.interface import Plugin, PluginPlan
from booster.registry import plugin_with_precision
from booster.single_device import SingleDevicePlugin

_FORMAT = "torch-booster plan"
_VERSION = 1
_TYPE = "type"  # key of a value that JSON has no type for
# Dataclasses of settings, and of results that ranks exchange, by their modules, which are imported if they occur.
_DATACLASSES = {
    "ActivationSchedule": "booster.core.activation_schedule",
    "Candidate": "booster.estimate.candidates",
    "CandidateResult": "booster.estimate.candidates",
    "CheckpointMemory": "booster.estimate.simulation",
    "MemoryEstimate": "booster.estimate.estimate",
    "MemoryParts": "booster.estimate.allocation_tracker",
    "RankMemory": "booster.estimate.simulation",
    "StepTime": "booster.estimate.step_time",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "Style": "booster.plugins.hybrid_parallel.tp_plan.plan",
    "Block": "booster.plugins.hybrid_parallel.tensor_parallel.shard_spec",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan(PluginPlan):
    """Plugin and settings for training a model on a number of ranks, with what was predicted for them.

    Attributes:
        plugin: Name of the plugin, or "none" for a single device.
        settings: Its arguments.
        mixed_precision: Mixed precision of the Booster; None if unused or controlled by the plugin.
        num_ranks: World size.
        model: Class name of the model.
        num_parameters: Number of elements of its parameters.
        activation_schedule: What each layer keeps for backward, as the items of an `ActivationSchedule`; None if all
            activations are kept.
        batches: Number of batches that a step trains with, which is the data-parallel size.
        memory: Predicted peak memory per rank in bytes.
        seconds: Predicted time of a step; None if only memory was predicted.
        machine: Machine that the time was predicted for.
    """

    plugin: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    mixed_precision: str | None = None
    num_ranks: int
    model: str
    num_parameters: int
    activation_schedule: tuple[ScheduleItem, ...] | None = None
    batches: int = 1
    memory: int = 0
    seconds: float | None = None
    machine: str = ""

    @classmethod
    def load(cls, path: str | PathLike[str]) -> ParallelPlan:
        """Return the plan in a file.

        Raises:
            ConfigError: The file can't be read, or is not a plan of this version.
        """
        advice = "give a file that `booster plan --output FILE` or ParallelPlan.save() has written"
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if values["format"] != _FORMAT or values["version"] != _VERSION:
                raise ValueError(f"{values['format']!r} of version {values['version']!r}")
            known = {one.name: decode(values[one.name]) for one in fields(cls)}
            unknown = values.keys() - known.keys() - {"format", "version"}
            if unknown:
                raise ValueError(f"the unknown entries {', '.join(sorted(unknown))}")
        except OSError as error:
            raise ConfigError(f"the plan {path} can't be read ({error.strerror}): {advice}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} is not a plan of this version ({error!r}): {advice}") from error
        return cls(**known)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON; a reader sees all of it or none. Call it on one rank.

        Raises:
            ConfigError: The file can't be written.
        """
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        values = {"format": _FORMAT, "version": _VERSION} | {name: encode(value) for name, value in given.items()}
        target = Path(path)
        temporary = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            temporary.replace(target)
        except OSError as error:
            raise ConfigError(
                f"the plan can't be written to {path} ({error.strerror}): give a path in an existing directory"
            ) from error

    @property
    def fingerprint(self) -> list[str]:
        """Text that must be equal on all ranks."""
        return [json.dumps(encode(getattr(self, one.name))) for one in fields(self)]

    def check_world(self) -> None:
        """Check that the launched world has the plan's size.

        Raises:
            ConfigError: It has another one.
        """
        if group_size() != self.num_ranks:
            raise ConfigError(
                f"the plan is for {self.num_ranks} rank(s), and {group_size()} were launched: launch {self.num_ranks},"
                f" or make another plan with `booster plan --nproc {group_size()}`"
            )

    def prepare_model(self, model: nn.Module) -> None:
        """Give the model's layers the plan's activation checkpointing, in place; see `PluginPlan.prepare_model`."""
        if self.activation_schedule is not None:
            checkpoint_activations(model, "schedule", schedule=self.activation_schedule)

    def check_model(self, model: nn.Module) -> None:
        """Check that the plan was made for a model of this class and size; see `PluginPlan.check_model`."""
        name, numel = type(model).__name__, sum(parameter.numel() for parameter in model.parameters())
        if (name, numel) != (self.model, self.num_parameters):
            raise ConfigError(
                f"the plan is for a {self.model} with {self.num_parameters:,} parameters, and boost() was given a"
                f" {name} with {numel:,}: make another plan for this model"
            )

    def make_plugin(self) -> Plugin:
        """Return a new plugin with the plan's settings; see `PluginPlan.make_plugin`. Collective."""
        self.check_world()
        if self.plugin == ONE_DEVICE:
            return SingleDevicePlugin()
        return plugin_with_precision(self.plugin, self.mixed_precision, **self.settings)

    def __str__(self) -> str:
        name = Candidate(plugin=self.plugin, settings=self.settings, mixed_precision=self.mixed_precision).name
        time = "" if self.seconds is None else f", {format_seconds(self.seconds)} a step"
        if self.activation_schedule is not None:
            name += f" {ActivationSchedule.from_json(self.activation_schedule)}"
        return f"{name}: {format_size(self.memory)} per rank{time} of {format_batches(self.batches)}"


def encode(value: Any) -> Any:
    """Return a value as JSON has it; dtypes and known dataclasses with their type."""
    if isinstance(value, torch.dtype):
        return {_TYPE: "dtype", "name": str(value).removeprefix("torch.")}
    if is_dataclass(value) and type(value).__name__ in _DATACLASSES:
        given = {one.name: getattr(value, one.name) for one in fields(value)}
        return {_TYPE: type(value).__name__, **{name: encode(one) for name, one in given.items()}}
    if isinstance(value, Mapping):
        return {str(key): encode(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(one) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(
        f"a plan can't hold {value!r} of type {type(value).__name__}: give settings of numbers, texts, dtypes and"
        " MixedPrecisionPolicy"
    )


def decode(value: Any) -> Any:
    """Return the value that `encode` was given; a list is a tuple."""
    if isinstance(value, list):
        return tuple(decode(one) for one in value)
    if not isinstance(value, dict):
        return value
    values = {key: decode(one) for key, one in value.items()}
    kind = values.pop(_TYPE, None)
    if kind is None:
        return values
    if kind == "dtype":
        dtype = getattr(torch, values["name"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"the dtype {values['name']!r}")
        return dtype
    return getattr(import_module(_DATACLASSES[kind]), kind)(**values)
