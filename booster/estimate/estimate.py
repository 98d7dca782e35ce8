"""`booster.estimate_memory`: memory per rank under a plugin, without allocating it."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.optim import Optimizer

from booster.comm import fake_collectives, fake_world, group_size, is_initialized
from booster.core.model_wrapper import call_with_batch
from booster.errors import BoosterError, ConfigError, first_line
from booster.interface import (
    ActivationProfile,
    FusedUpdate,
    MemoryParts,
    MemoryRequest,
    MixedPrecision,
    Plugin,
    RankMemory,
)
from booster.mixed_precision import mixed_precision_from_name
from booster.mixed_precision.fp16 import cast_floats
from booster.pytree import iter_tensors, map_tensors
from booster.registry import plugin_from_name
from booster.single_device import SingleDevicePlugin
from booster.validation import is_number

from .activations import measure_activations, measure_peak


def new_fake_mode() -> FakeTensorMode:
    """Return a `FakeTensorMode` that accepts real tensors as inputs, such as constants of a model's code."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a model with fake parameters and buffers on the CPU; tied ones stay tied.

    Args:
        model: Model with real values, on the meta device, or lazily initialized. Not modified.
        mode: Result of `new_fake_mode`.

    Raises:
        ConfigError: The model can't be copied.
    """
    with mode:
        return _copy(model, "cpu")


def _copy(model: nn.Module, device: str) -> nn.Module:
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


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """Return a copy of a batch with fake tensors on the CPU."""
    with mode:
        return map_tensors(lambda tensor: _like(tensor, "cpu"), batch)


def _like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    # Dense, in the order of its strides: a view may have gaps, a copy has none.
    given: tuple[int, ...] = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-given[dim], dim))
    strides, step = [0] * tensor.dim(), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= tensor.shape[dim]
    return torch.empty_strided(tuple(tensor.shape), strides, dtype=tensor.dtype, device=device)


# Dimensions of the small parameters: a state's dimension of this size is the parameter's.
_SIZES = (7, 11, 13, 17, 19, 23)
_PROBE_NUMEL = 4096
_NEGLIGIBLE = 0.05  # fraction of a parameter: small tensors such as factors


@dataclass(frozen=True, slots=True)
class _StateShape:
    """Shape of a state tensor relative to its parameter.

    Attributes:
        dims: Dimensions that it shares with the parameter.
        constant: Product of its other dimensions.
        element_bytes: Bytes per element.
    """

    dims: tuple[int, ...]
    constant: int
    element_bytes: int


class OptimizerMemory:
    """Memory of an optimizer's states and of the temporaries of its step.

    Args:
        make: Function that creates the optimizer for a list of parameters.
    """

    def __init__(self, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self._make = make
        self._states: dict[tuple[int, torch.dtype], list[_StateShape]] = {}
        self._ratios: dict[torch.dtype, tuple[float, bool]] = {}
        self.is_fused = isinstance(make([nn.Parameter(torch.zeros(_SIZES[0]))]), FusedUpdate)

    @classmethod
    def of(cls, optimizer: Any) -> OptimizerMemory:
        """Create it from an optimizer, or from a function that creates one for a list of parameters.

        Raises:
            ConfigError: The argument is neither.
        """
        if isinstance(optimizer, Optimizer):
            return cls(lambda parameters: _copy_over(optimizer, parameters))
        if not callable(optimizer):
            raise ConfigError(
                f"optimizer={optimizer!r} is not an optimizer: give one over the model's parameters, or a function that"
                " creates one from a list of parameters, such as torch.optim.AdamW"
            )
        return cls(lambda parameters: _make_optimizer(optimizer, parameters))

    def state_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype, fraction: float = 1.0) -> int:
        """See `MemoryRequest.state_bytes`."""
        total = 0.0
        for shape in shapes:
            for state in self._state_shapes(min(len(shape), len(_SIZES)), dtype):
                numel = state.constant * math.prod(shape[dim] for dim in state.dims)
                is_elementwise = len(state.dims) == min(len(shape), len(_SIZES))
                total += numel * state.element_bytes * (fraction if is_elementwise else 1.0)
        return round(total)

    def step_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> int:
        """See `MemoryRequest.step_bytes`."""
        ratio, is_of_all = self._ratio(dtype)
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        return round(ratio * (sum(sizes) if is_of_all else max(sizes, default=0)))

    def _state_shapes(self, num_dims: int, dtype: torch.dtype) -> list[_StateShape]:
        key = (num_dims, dtype)
        if key not in self._states:
            shape = _SIZES[:num_dims]
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
            parameter.grad = torch.zeros_like(parameter)
            optimizer = self._make([parameter])
            optimizer.step()
            self._states[key] = [
                _state_shape(value, shape)
                for value in optimizer.state[parameter].values()
                if isinstance(value, torch.Tensor) and value.numel() > 1
            ]
        return self._states[key]

    def _ratio(self, dtype: torch.dtype) -> tuple[float, bool]:
        """Return temporary memory of a step relative to a parameter, and whether it scales with all or the largest."""
        if dtype not in self._ratios:
            try:
                single, double = (self._measure_step(number, dtype) for number in (1, 2))
            except (RuntimeError, NotImplementedError, TypeError):  # a compiled step, which rejects fake tensors
                single = double = 0.0
            is_of_all = double > 1.5 * single
            self._ratios[dtype] = (single if single > _NEGLIGIBLE else 0.0, is_of_all)
        return self._ratios[dtype]

    def _measure_step(self, num_parameters: int, dtype: torch.dtype) -> float:
        if self.is_fused:
            return 0.0
        with new_fake_mode():
            parameters = [nn.Parameter(torch.empty(_PROBE_NUMEL, dtype=dtype)) for _ in range(num_parameters)]
            optimizer = self._make(parameters)
            for _ in range(2):  # the first step allocates the states
                for parameter in parameters:
                    parameter.grad = torch.empty_like(parameter)
                states = [one for state in optimizer.state.values() for one in state.values()]
                state_tensors = [one for one in states if isinstance(one, torch.Tensor)]
                grads = [one.grad for one in parameters if one.grad is not None]
                taken = measure_peak(optimizer.step, [*parameters, *grads, *state_tensors])
        return taken / (_PROBE_NUMEL * dtype.itemsize)


def _state_shape(state: torch.Tensor, shape: tuple[int, ...]) -> _StateShape:
    dims: list[int] = []
    constant = 1
    for size in state.shape:
        if size in shape:
            dims.append(shape.index(size))
        else:
            constant *= size
    return _StateShape(tuple(dims), constant, state.element_size())


def _copy_over(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """Return a copy of an optimizer with the settings of its first group, over other parameters."""
    first = optimizer.param_groups[0]
    memo: dict[int, Any] = {id(optimizer.state): type(optimizer.state)(dict)}
    for group in optimizer.param_groups:
        memo[id(group["params"])] = parameters if group is first else []
        for one in group["params"]:
            memo[id(one)] = parameters[0]
    made = copy.deepcopy(optimizer, memo)
    made.param_groups = [made.param_groups[0]]
    return made


def _make_optimizer(make: Callable[..., Any], parameters: list[nn.Parameter]) -> Optimizer:
    optimizer = make(parameters)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer={make!r} returned a {type(optimizer).__name__} for a list of parameters: give a function that"
            " returns a torch.optim.Optimizer"
        )
    return optimizer


_Key = tuple[Any, ...]


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


class FakeTensorMemoryRequest(MemoryRequest):
    """Implementation of `MemoryRequest` by fake tensors.

    Args:
        model: User's model; with real values, on the meta device or lazily initialized.
        optimizer: Memory of the optimizer.
        batch: Batch of one rank, as for `execute_pipeline`; only shapes and dtypes matter.
        criterion: Function of (outputs, batch) that returns the loss.
        trained: `id`s of the parameters that the optimizer updates; optional, defaults to all that require gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerMemory,
        batch: Any,
        criterion: Callable[[Any, Any], torch.Tensor],
        trained: set[int] | None = None,
    ) -> None:
        self._mode = new_fake_mode()
        self._optimizer = optimizer
        self._batch = fake_batch(batch, self._mode)
        self._criterion = criterion
        self.model = _copy(model, "meta")
        pairs = zip(model.parameters(), self.model.parameters(), strict=True)
        is_trained = [copied for own, copied in pairs if own.requires_grad and (trained is None or id(own) in trained)]
        self.trained: Sequence[nn.Parameter] = is_trained
        self.precision: MixedPrecision | None = None
        self._profiles: dict[_Key, ActivationProfile] = {}

    @property
    def is_fused(self) -> bool:
        return self._optimizer.is_fused

    @property
    def batch_size(self) -> int:
        return max((tensor.shape[0] if tensor.dim() else 1 for tensor in iter_tensors(self._batch)), default=1)

    def prepared_model(self) -> nn.Module:
        model = fake_copy(self.model, self._mode)
        if self.precision is not None:
            with self._mode:
                self.precision.prepare(model)
        return model

    def state_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype, share: float = 1.0) -> int:
        return self._optimizer.state_bytes(shapes, dtype, share)

    def step_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> int:
        return self._optimizer.step_bytes(shapes, dtype)

    def activations(
        self,
        dtype: torch.dtype | None = None,
        *,
        shard: Callable[[nn.Module], None] | None = None,
        sharding_key: Hashable = None,
        num_microbatches: int = 1,
        outputs_fp32: bool = True,
    ) -> ActivationProfile:
        key = (dtype, sharding_key, num_microbatches, self.precision, outputs_fp32 or dtype is None)
        is_known = shard is None or sharding_key is not None
        if is_known and key in self._profiles:
            return self._profiles[key]
        profile = self._measure(dtype, shard, num_microbatches, outputs_fp32)
        if is_known:
            self._profiles[key] = profile
        return profile

    def _measure(
        self,
        dtype: torch.dtype | None,
        shard: Callable[[nn.Module], None] | None,
        num_microbatches: int,
        outputs_fp32: bool,
    ) -> ActivationProfile:
        model = fake_copy(self.model, self._mode)
        model.train()
        with self._mode, fake_collectives():
            if self.precision is not None:
                self.precision.prepare(model)
            if shard is not None:
                shard(model)
            if dtype is not None:
                for tensor in (*model.parameters(), *model.buffers()):
                    if tensor.is_floating_point():
                        tensor.data = tensor.data.to(dtype)
            batch = _largest_microbatch(self._batch, num_microbatches)
            try:
                return measure_activations(
                    model, lambda: self._loss(model, batch, dtype, outputs_fp32), existing=list(iter_tensors(batch))
                )
            except BoosterError:
                raise
            except Exception as error:
                advice = "check that it runs on a real batch of these shapes and with this criterion"
                if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
                    advice = "a forward with data-dependent control flow can't be measured; give a batch for which it"
                    advice += " has none"
                raise ConfigError(
                    f"{type(model).__name__} can't be run on fake tensors to measure its activations"
                    f" ({type(error).__name__}: {first_line(error)[:200]}): {advice}"
                ) from error

    def _loss(self, model: nn.Module, batch: Any, dtype: torch.dtype | None, outputs_fp32: bool) -> torch.Tensor:
        precision = self.precision
        inputs = batch if dtype is None else cast_floats(dtype, batch)
        if precision is None:
            outputs = call_with_batch(model, inputs)
            if dtype is not None and outputs_fp32:  # replaced, so that the uncast outputs are freed
                outputs = cast_floats(torch.float32, outputs)
            return self._criterion(outputs, batch)
        _, kwargs = precision.convert_inputs((), {"batch": inputs})
        with precision.forward_context("cpu"):
            outputs = precision.convert_outputs(call_with_batch(model, kwargs["batch"]))
        return self._criterion(outputs, batch)


def _largest_microbatch(batch: Any, num_microbatches: int) -> Any:
    """Return the largest microbatch of a batch split along dimension 0."""
    if num_microbatches == 1:
        return batch
    return map_tensors(lambda one: one[: -(-one.shape[0] // num_microbatches)].clone() if one.dim() else one, batch)


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
            yield plugin_from_name(plugin, **(settings or {})) if plugin else SingleDevicePlugin("cpu")
        return
    with fake_world(world_size):
        yield plugin_from_name(plugin, **(settings or {})) if plugin else SingleDevicePlugin("cpu")


def _precision(given: str | MixedPrecision | None) -> MixedPrecision | None:
    if given is None or given == "fp32":
        return None
    return given if isinstance(given, MixedPrecision) else mixed_precision_from_name(given)
