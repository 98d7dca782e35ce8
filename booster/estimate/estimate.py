"""`booster.estimate_memory`: memory per rank under a plugin, without allocating it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from booster.comm import fake, fake_collectives, fake_world, group_rank, group_size
from booster.errors import ConfigError
from booster.interface import MixedPrecision, Plugin
from booster.mixed_precision import resolve_mixed_precision
from booster.pytree import map_tensors
from booster.registry import plugin_with_precision
from booster.single_device import SingleDevicePlugin
from booster.validation import is_number

from .allocation_tracker import MemoryParts
from .machine_profile import MachineProfile
from .repeated_layers import extrapolate, find_repeated_layers, truncate_layers
from .simulation import RankMemory, SimulatedMemory, Training, note_held_shards, simulate, simulate_saves
from .step_time import StepTime

_MIN_DEPTH = 3  # see Note [Layer extrapolation]


def new_fake_mode() -> FakeTensorMode:
    """Return a `FakeTensorMode` that accepts real tensors as inputs, such as constants of a model's code."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _copy(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a model with parameters and buffers on a device, without values; tied ones stay tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_like(parameter, device), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _like(buffer, device)
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{type(model).__name__} can't be copied, which an estimate requires ({error}): remove the attributes that"
            " can't be copied from the model"
        ) from error


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Dense, in the order of its strides: a view may have gaps, a copy has none. Not by `empty_like` alone, whose result
    # in a fake mode has values if the given tensor is not fake.
    strides = torch.empty_like(tensor, device="meta").stride()
    return torch.empty_strided(tuple(tensor.shape), strides, dtype=tensor.dtype, device=device)


def default_criterion(outputs: Any, batch: Any) -> torch.Tensor:
    """Return the model's own loss: `outputs.loss`, or its output if that is a single number.

    Raises:
        ConfigError: The outputs have no loss.
    """
    loss = outputs.get("loss") if hasattr(outputs, "get") else getattr(outputs, "loss", None)
    loss = outputs if loss is None and isinstance(outputs, torch.Tensor) and outputs.numel() == 1 else loss
    if not isinstance(loss, torch.Tensor):
        type_name = "tensor" if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        raise ConfigError(
            f"the model returned a {type_name} without a loss to run backward from: give criterion=, a"
            " function of (outputs, batch) that returns the loss, as for execute_pipeline; or return (model, batch,"
            " criterion) from the function that `booster estimate` calls"
        )
    return loss


def _fake_optimizer(optimizer: Any, parameters: Mapping[int, nn.Parameter]) -> Optimizer:
    """Return a copy of an optimizer, or what a function returns, over fake parameters by the `id` of the model's."""
    if isinstance(optimizer, Optimizer):
        return _copy_over(optimizer, parameters)
    made = optimizer([one for one in parameters.values() if one.requires_grad])
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optimizer={optimizer!r} returned a {type(made).__name__} for a list of parameters: give a function that"
            " returns a torch.optim.Optimizer"
        )
    return made


def _copy_over(optimizer: Optimizer, parameters: Mapping[int, nn.Parameter]) -> Optimizer:
    """Return a copy of an optimizer without states, over other parameters; those without one are left out."""
    memo: dict[int, Any] = {id(optimizer.state): type(optimizer.state)(dict)}
    for group in optimizer.param_groups:
        memo[id(group["params"])] = [parameters[id(one)] for one in group["params"] if id(one) in parameters]
        memo |= {id(one): parameters.get(id(one)) for one in group["params"]}
    made = copy.deepcopy(optimizer, memo)
    made.param_groups = [group for group in made.param_groups if group["params"]]
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecipe:
    """What is trained, as the user gave it; never changed.

    Attributes:
        model: Model with real values, on the meta device or lazily initialized.
        batch: Batch of one rank, as for `execute_pipeline`; only shapes and dtypes matter.
        optimizer: Optimizer over parameters of the model, or a function that creates one from a list of parameters.
        criterion: Function of (outputs, batch) that returns the loss.
        change_model: Function that changes each copy of the model in place, such as `checkpoint_activations`, optional.
            The model is then simulated in full.
    """

    model: nn.Module
    batch: Any
    optimizer: Any = torch.optim.AdamW
    criterion: Callable[[Any, Any], torch.Tensor] = default_criterion
    change_model: Callable[[nn.Module], object] | None = None
    _templates: dict[tuple[str, int] | None, nn.Module] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Raise `ConfigError` if the optimizer is neither."""
        if not isinstance(self.optimizer, Optimizer) and not callable(self.optimizer):
            raise ConfigError(
                f"optimizer={self.optimizer!r} is not an optimizer: give one over the model's parameters, or a function"
                " that creates one from a list of parameters, such as torch.optim.AdamW"
            )

    def make_fake(self, mode: FakeTensorMode, device: torch.device, layers: tuple[str, int] | None = None) -> Training:
        """Return a copy of everything as fake tensors, with the first of a named list of layers only, if given."""
        if layers not in self._templates:
            is_given = layers is None and self.change_model is None
            self._templates[layers] = template = self.model if is_given else _copy(self.model, torch.device("meta"))
            if layers is not None:
                truncate_layers(template, *layers)
            if self.change_model is not None:
                self.change_model(template)
        given = dict(self.model.named_parameters())
        with mode:
            model = _copy(self._templates[layers], device)  # torch can't move a module with fake parameters
            parameters = {id(given[name]): parameter for name, parameter in model.named_parameters()}
            optimizer = _fake_optimizer(self.optimizer, parameters)
            batch = map_tensors(lambda tensor: _like(tensor, device), self.batch)
        return Training(model, optimizer, batch)


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
            f" {self.sent / 2**20:,.1f} MiB sent by a rank in a step over {self.memory.communicators} communicator(s)"
        )

    @property
    def step_time(self) -> StepTime | None:
        """Predicted time of a step; None without a machine profile."""
        return self.memory.time

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
    checkpoint: bool = False,
    profile: MachineProfile | None = None,
) -> MemoryEstimate:
    """Estimate the memory for training a model on a rank: parameters, gradients, states, activations, buffers.

    The plugin trains the model for a few steps on fake tensors: the model is not allocated, and nothing is communicated
    (Note [Simulated training]). It may be called on a single rank before the launch, or with a plugin object.

    Collective: no.

    Args:
        model: Model with real values, on the meta device (`with torch.device("meta")`) or built in a `LazyInitContext`.
            Not modified.
        plugin: Name of a plugin, with `settings` and `num_ranks`; or a `Plugin` of the launched world, for the memory
            of this rank, which communicates nothing; optional, defaults to a single device.
        batch: Batch of one rank, as for `execute_pipeline`: a mapping of keyword arguments, a tuple, or a tensor. Only
            shapes and dtypes matter, so meta tensors may be used.
        optimizer: Optimizer over parameters of the model, or a function that creates one from a list of parameters.
        criterion: Function of (outputs, batch) that returns the loss; optional, defaults to the model's own loss.
        num_ranks: World size to estimate for, with the name of a plugin; optional, defaults to the launched world.
        settings: Arguments of the plugin, with its name.
        mixed_precision: Mixed precision, as for `Booster`.
        device_memory: Available memory per rank in bytes, for `MemoryEstimate.fits`.
        checkpoint: If True, simulate saves too, for `MemoryEstimate.memory.checkpoint`. Takes two to five times as
            long, as a neighbor along each axis of the mesh is simulated as well.
        profile: Speed of the machine, for `MemoryEstimate.step_time`, such as `booster.estimate.find_profile(8)` of
            what `booster profile-mesh` measured; optional, defaults to no times.

    Raises:
        ConfigError: Arguments conflict, the plugin has no estimate, or the model can't be measured.

    Examples:
        >>> import torch
        >>> from booster import estimate_memory
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1))
        >>> batch = torch.empty(8, 1024, device="meta")
        >>> arguments = {"batch": batch, "criterion": lambda outputs, batch: outputs.mean(), "num_ranks": 4}
        >>> estimate = estimate_memory(model, "low_level_zero", mixed_precision="bf16", **arguments)
        >>> f"{estimate.peak.parameters:,}"  # with padding of the flat buffer
        '8,405,248'
    """
    recipe = TrainingRecipe(model=model, batch=batch, optimizer=optimizer, criterion=criterion or default_criterion)
    simulator = Simulator.of(
        recipe, plugin, num_ranks=num_ranks, settings=settings, mixed_precision=mixed_precision, profile=profile
    )
    return simulator.estimate(device_memory, checkpoint=checkpoint)


def check_num_bytes(name: str, value: Any) -> None:
    """Raise `ConfigError` unless an argument is None, or a positive number of bytes."""
    if value is not None and not (is_number(value) and value > 0):
        raise ConfigError(
            f"{name}={value!r} is not a positive number of bytes: give the memory of a device, such as 80 * 2**30, or"
            " omit it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    """Simulation of a recipe's training under a plugin, on one rank at a time.

    Attributes:
        make_plugin: Function that returns the plugin, in the current process group.
        settings: Arguments of the plugin that were given by name.
        plugin: Class name of the plugin.
        ranks: Ranks that differ in memory: one of each pipeline stage, or this process's own in a launched world.
        is_launched: Whether the plugin is one of the launched world, of which this process's own rank alone can be
            simulated, without communication.
        axis_sizes: As of the plugin, as `layer_divisor` and `gathers_layers` are.
    """

    recipe: TrainingRecipe
    make_plugin: Callable[[], Plugin]
    settings: Mapping[str, Any] | None
    precision: MixedPrecision | None
    profile: MachineProfile | None
    plugin: str
    num_ranks: int
    ranks: Sequence[int]
    is_launched: bool
    axis_sizes: Mapping[str, int]
    layer_divisor: int
    gathers_layers: bool

    @classmethod
    def of(
        cls,
        recipe: TrainingRecipe,
        plugin: str | Plugin | None,
        *,
        num_ranks: int | None = None,
        settings: Mapping[str, Any] | None = None,
        mixed_precision: str | MixedPrecision | None = None,
        profile: MachineProfile | None = None,
    ) -> Simulator:
        """Return the simulator of what `estimate_memory` is given.

        Raises:
            ConfigError: Arguments conflict, or a plugin of the launched world has pipeline stages.
        """
        world_size = _check_world(plugin, num_ranks, settings)
        is_launched = isinstance(plugin, Plugin)

        def make_plugin() -> Plugin:
            if isinstance(plugin, Plugin):
                return plugin
            if not plugin:
                return SingleDevicePlugin()
            return plugin_with_precision(plugin, mixed_precision, **(settings or {}))

        with fake_collectives() if is_launched else fake_world(world_size):
            made = make_plugin()
            precision, ranks = resolve_mixed_precision(mixed_precision, made), made.representative_ranks()
            if is_launched and len(ranks) > 1:
                raise ConfigError(
                    f"{type(made).__name__} of a launched world has pipeline stages, which receive what other ranks"
                    " compute: estimate by its name before the launch, such as estimate_memory(model,"
                    " 'hybrid_parallel', num_ranks=8, settings={'pp_size': 2, 'num_microbatches': 4}, batch=batch)"
                )
            fake.fake_headers.clear()
            return cls(
                recipe=recipe,
                make_plugin=make_plugin,
                settings=settings,
                precision=precision,
                profile=profile,
                plugin=type(made).__name__,
                num_ranks=world_size,
                ranks=[group_rank()] if is_launched else ranks,
                is_launched=is_launched,
                axis_sizes=made.axis_sizes(),
                layer_divisor=made.layer_divisor(),
                gathers_layers=made.gathers_layers(),
            )

    def run(self, rank: int, layers: tuple[str, int] | None = None, **options: Any) -> SimulatedMemory:
        """Return the memory of a rank, with the first of a named list of layers only, if given; see `simulate`."""
        mode = new_fake_mode()
        world = fake_collectives() if self.is_launched else fake_world(self.num_ranks, rank)
        with world, _without_garbage_collection():
            plugin = self.make_plugin()
            return simulate(
                lambda: self.recipe.make_fake(mode, plugin.device, layers),
                plugin,
                self.precision,
                mode,
                self.recipe.criterion,
                layers=layers and layers[0],
                profile=self.profile,
                **options,
            )

    def estimate(self, device_memory: int | None = None, *, checkpoint: bool = False) -> MemoryEstimate:
        """Return the estimate of the rank that needs the most; see `estimate_memory`."""
        check_num_bytes("device_memory", device_memory)
        if self.is_launched and checkpoint and self.num_ranks > 1:
            raise ConfigError(
                f"checkpoint=True was given with a {self.plugin} of a launched world of {self.num_ranks} ranks, but"
                " what a rank saves depends on what other ranks hold: estimate by the plugin's name before the launch,"
                " such as estimate_memory(model, 'low_level_zero', num_ranks=8, batch=batch, checkpoint=True)"
            )
        memories = [_estimate_rank(self, rank, checkpoint) for rank in self.ranks]
        slowest = max((one.time for one in memories if one.time is not None), key=lambda time: time.total, default=None)
        most = max(memories, key=lambda one: one.peak.total)
        return MemoryEstimate(
            plugin=self.plugin,
            settings=dict(self.settings or {}),
            num_ranks=self.num_ranks,
            memory=replace(most, sent=max(one.sent for one in memories), time=slowest),
            device_memory=device_memory,
        )


def _estimate_rank(simulator: Simulator, rank: int, checkpoint: bool) -> RankMemory:
    """Return the memory of a rank, of a deep model by that of two shallower ones; see Note [Layer extrapolation]."""
    model, unit = simulator.recipe.model, simulator.layer_divisor

    def run(num_layers: int | None = None) -> SimulatedMemory:
        layers = None if name is None or num_layers is None else (name, num_layers)
        save = partial(simulate_saves, _find_replicas(simulator, rank, layers)) if checkpoint else None
        return simulator.run(rank, layers, at_end=save)

    name = None if simulator.recipe.change_model is not None else find_repeated_layers(model)
    if name is None:
        return run().memory
    num_layers = len(model.get_submodule(name)._modules)
    least = -(-_MIN_DEPTH // unit)
    low = least + (num_layers // unit - least) % 2
    depths = (unit * low, unit * (low + 2))
    if depths[1] >= num_layers:
        return run().memory
    try:
        few, more = (run(depth) for depth in depths)
        deep: SimulatedMemory = extrapolate(few, more, (num_layers - depths[0]) / (depths[1] - depths[0]))
        peak = max(deep.segments.values(), key=lambda parts: parts.total)
        return replace(deep.memory, backward=peak, communicators=more.memory.communicators)
    except Exception:  # any error of a model that depends on its layers: the full run reports real ones
        return run().memory


def _find_replicas(simulator: Simulator, rank: int, layers: tuple[str, int] | None) -> fake.FakeReplicas:
    """Return what other ranks hold of this rank's shards, after the simulation of a neighbor along each axis."""
    replicas = fake.FakeReplicas(rank, simulator.axis_sizes)
    for axis, size in simulator.axis_sizes.items():
        if size > 1 and axis != "pp":  # other stages hold other layers
            note = partial(note_held_shards, replicas.held[axis])
            simulator.run(replicas.neighbor(axis), layers, at_end=note, num_steps=1)
    return replicas


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


def _check_world(plugin: str | Plugin | None, num_ranks: int | None, settings: Mapping[str, Any] | None) -> int:
    """Return the world size that arguments ask for."""
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(
            f"settings={settings!r} is a {type(settings).__name__}: give the plugin's arguments by name, such as"
            " {'stage': 2}, or omit it"
        )
    if isinstance(plugin, Plugin):
        if settings or num_ranks not in (None, group_size()):
            raise ConfigError(
                f"plugin is a {type(plugin).__name__} with its own settings and world of {group_size()} ranks, but"
                f" num_ranks={num_ranks!r}, settings={settings!r} were given too: give its name in place of the object"
            )
        return group_size()
    if plugin is not None and not isinstance(plugin, str):
        raise ConfigError(
            f"plugin={plugin!r} is a {type(plugin).__name__}: give a Plugin, or a name such as 'low_level_zero'"
        )
    world_size = group_size() if num_ranks is None else num_ranks
    if not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(f"num_ranks={num_ranks!r} is not a positive int: give 1 or more")
    if plugin is None and world_size > 1:
        raise ConfigError(f"num_ranks={world_size} needs a plugin: give plugin=, such as 'torch_ddp'")
    return world_size
