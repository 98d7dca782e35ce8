"""Arguments of the plugin: validation before anything is allocated, and conversion to those of FSDP2."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, cast

import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import _Policy

from booster.comm import group_size
from booster.errors import ConfigError
from booster.interface import MixedPrecision as BoosterPrecision
from booster.mixed_precision.loss_scaler import LossScaleConfig
from booster.plugins.base import PluginConfig
from booster.plugins.sharding.config import GradClipConfig
from booster.plugins.sharding.elementwise import find_coupling, sharding_obstacle
from booster.validation import check_flag, check_replicas

from .mesh import check_process_group, describe_process_group

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionDtypes(BoosterPrecision):
    """Dtypes of FSDP's mixed precision: shards keep theirs, and weights are gathered, and inputs cast, in another.

    Attributes:
        param_dtype: Dtype of gathered weights and of computation; optional, defaults to that of the shards.
        reduce_dtype: Dtype of gradients in the reduce-scatter; optional, defaults to that of gathered weights.
        buffer_dtype: Dtype that floating-point buffers are cast to once; optional, by default they are not cast.
        output_dtype: Dtype of the root's floating-point outputs; optional, by default they are not cast.
        casts_root_inputs: If True, floating-point inputs of the model are cast to `param_dtype`.
        casts_module_inputs: If True, floating-point inputs of wrapped modules are cast to `param_dtype`.
        own_dtype_classes: Classes of modules that compute in the dtype of their weights.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    casts_root_inputs: bool = True
    casts_module_inputs: bool = True
    own_dtype_classes: tuple[type[nn.Module], ...] = ()

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self.param_dtype

    def describe(self) -> str:
        return f"weights gathered as {str(self.param_dtype).removeprefix('torch.')}"

    def fsdp2_policy(self, *, is_root: bool) -> MixedPrecisionPolicy:
        """Return FSDP2's policy of the root, or of a wrapped module outside of `own_dtype_classes`."""
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            output_dtype=self.output_dtype if is_root else None,
            cast_forward_inputs=self.casts_root_inputs if is_root else self.casts_module_inputs,
        )


def _check_mixed_precision(given: Any) -> None:
    if given is None:
        return
    if isinstance(given, (str, BoosterPrecision)):
        raise ConfigError(
            f"mixed_precision={given!r} is an argument of the Booster, not of this plugin: write"
            " Booster(plugin=..., mixed_precision=...), or give the plugin torch's MixedPrecisionPolicy"
        )
    if not isinstance(given, (MixedPrecision, MixedPrecisionPolicy)):
        raise ConfigError(
            f"mixed_precision={given!r} is not supported: give MixedPrecisionPolicy or MixedPrecision of"
            " torch.distributed.fsdp, or write Booster(plugin=..., mixed_precision='bf16')"
        )
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
        dtype = getattr(given, name, None)
        if dtype is not None and dtype not in _DTYPES:
            raise ConfigError(
                f"mixed_precision with {name}={dtype!r}: FSDP casts to this dtype and computes or reduces in it, so it"
                f" must be one of {', '.join(map(str, _DTYPES))}; for float8 write Booster(..., mixed_precision='fp8')"
            )
    for name in ("cast_forward_inputs", "cast_root_forward_inputs"):
        check_flag(f"mixed_precision.{name}", getattr(given, name, True))
    keeps = getattr(given, "keep_low_precision_grads", False)
    if keeps is not False:
        raise ConfigError(
            f"mixed_precision with keep_low_precision_grads={keeps!r}: FSDP2 casts gradients to the dtype of the"
            " shards: leave it out"
        )
    classes = getattr(given, "_module_classes_to_ignore", ())
    is_valid = isinstance(classes, (tuple, list)) and all(
        isinstance(one, type) and issubclass(one, nn.Module) for one in classes
    )
    if not is_valid:
        raise ConfigError(
            f"mixed_precision with _module_classes_to_ignore={classes!r}: give a tuple of classes of modules, () for"
            " none"
        )


_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
_NO_RESHARD_STRATEGIES = ("SHARD_GRAD_OP", "NO_SHARD", "_HYBRID_SHARD_ZERO2")
_FLAGS = ("sync_module_states", "verbose", "sync_batch_norm", "broadcast_buffers")
_POLICY_CALL = "policy(module=..., recurse=..., nonwrapped_numel=...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPConfig(PluginConfig):
    """Options of `TorchFSDPPlugin`, which documents them."""

    process_group: Any
    sharding_strategy: Any
    cpu_offload: Any
    auto_wrap_policy: Any
    mixed_precision: Any
    ignored_modules: Any
    param_init_fn: Any
    sync_module_states: bool
    reshard_after_forward: bool | int | None
    extra_dp_size: int | None
    verbose: bool
    sync_batch_norm: bool
    broadcast_buffers: bool
    clip: GradClipConfig
    loss_scale: LossScaleConfig

    def __post_init__(self) -> None:
        given = () if self.ignored_modules is None else self.ignored_modules
        if isinstance(given, Iterable):  # it may be a generator, and is read more than once
            object.__setattr__(self, "ignored_modules", tuple(given))

    @property
    def fingerprint(self) -> list[str]:
        dtypes = [getattr(self.precision_dtypes, field.name) for field in fields(PrecisionDtypes)]
        described = {
            "process_group": describe_process_group(self.process_group),
            "sharding_strategy": self._strategy_name,
            "cpu_offload": self.offloads,
            "auto_wrap_policy": _describe(self.auto_wrap_policy),
            "mixed_precision": _describe(None if self.mixed_precision is None else dtypes),
            "ignored_modules": _describe(self.ignored_modules),
            "param_init_fn": _describe(self.param_init_fn),
        }
        plain = [name for name in self.__slots__ if name not in ("verbose", "clip", "loss_scale")]
        lines = [f"{name}={described[name] if name in described else repr(getattr(self, name))}" for name in plain]
        return [*lines, *self.clip.fingerprint, *self.loss_scale.fingerprint]

    @property
    def precision_dtypes(self) -> PrecisionDtypes:
        """Dtypes of FSDP's mixed precision; by default nothing is cast."""
        given = self.mixed_precision
        if given is None:
            return PrecisionDtypes()
        return PrecisionDtypes(  # of torch's `MixedPrecision` or `MixedPrecisionPolicy`
            param_dtype=given.param_dtype,
            reduce_dtype=given.reduce_dtype or given.param_dtype,
            buffer_dtype=getattr(given, "buffer_dtype", None),
            output_dtype=getattr(given, "output_dtype", None),
            casts_root_inputs=getattr(given, "cast_root_forward_inputs", given.cast_forward_inputs),
            casts_module_inputs=given.cast_forward_inputs,
            own_dtype_classes=tuple(getattr(given, "_module_classes_to_ignore", ())),
        )

    @property
    def offloads(self) -> bool:
        """Whether shards, gradients and optimizer states are kept in host memory."""
        given = self.cpu_offload
        if isinstance(given, CPUOffload):
            return given.offload_params
        return given is True or isinstance(given, CPUOffloadPolicy)

    def offload_policy(self, device: torch.device) -> OffloadPolicy:
        """Return FSDP2's offload policy; none on the CPU."""
        if device.type == "cpu" or not self.offloads:
            return OffloadPolicy()
        return self.cpu_offload if isinstance(self.cpu_offload, CPUOffloadPolicy) else CPUOffloadPolicy()

    def check(self, world_size: int) -> None:
        """Validate the arguments, except against the number of hosts, which `mesh_shape` does.

        Raises:
            ConfigError: An argument is invalid.
        """
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        self.clip.check()
        self._check_strategy()
        self._check_group(world_size)
        _check_offload(self.cpu_offload)
        _check_mixed_precision(self.mixed_precision)
        _check_policy(self.auto_wrap_policy)
        _check_module_arguments(self.ignored_modules, self.param_init_fn)
        num_replicas = self._given_replicas(world_size)
        if num_replicas is not None:
            check_reshard_after_forward(self.reshard_after_forward, world_size // num_replicas)
        self.loss_scale.check()

    def mesh_shape(self, world_size: int, num_hosts: int) -> tuple[int, int]:
        """Return the number of replicas, and the number of ranks that share the shards of each.

        Args:
            world_size: Number of ranks.
            num_hosts: Number of hosts; by default HYBRID_SHARD has one replica on each.

        Raises:
            ConfigError: The ranks do not divide evenly over the hosts, or `reshard_after_forward` does not divide the
                shard axis.
        """
        num_replicas = self._given_replicas(world_size)
        if num_replicas is None:
            num_replicas = _one_replica_per_host(world_size, num_hosts)
        shard_size = world_size // num_replicas
        check_reshard_after_forward(self.reshard_after_forward, shard_size)
        return num_replicas, shard_size

    @property
    def default_reshard(self) -> bool | int | None:
        """Argument `reshard_after_forward` of `fully_shard`, where the policy gives none."""
        return False if self._strategy_name in _NO_RESHARD_STRATEGIES else self.reshard_after_forward

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the strategy."""
        if self._strategy_name == "NO_SHARD":
            return 0
        return 2 if self._strategy_name in _NO_RESHARD_STRATEGIES else 3

    @property
    def _strategy_name(self) -> str:
        given = self.sharding_strategy
        return given.name if isinstance(given, ShardingStrategy) else given

    @property
    def _is_hybrid(self) -> bool:
        return self._strategy_name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

    def _given_replicas(self, world_size: int) -> int | None:
        """Return the number of replicas, or None for one per host."""
        given = self.process_group
        if self._strategy_name == "NO_SHARD":
            return world_size
        if not self._is_hybrid:
            return 1
        if isinstance(given, tuple):
            return group_size(given[1])
        return given.size(0) if isinstance(given, DeviceMesh) else self.extra_dp_size

    def _check_strategy(self) -> None:
        given = self.sharding_strategy
        if not isinstance(given, ShardingStrategy) and not (isinstance(given, str) and given in _STRATEGIES):
            raise ConfigError(
                f"sharding_strategy={given!r} is not known: choose one of {', '.join(_STRATEGIES)}, or a member of"
                " torch's ShardingStrategy"
            )
        reshards, name = self.reshard_after_forward, self._strategy_name
        if name in _NO_RESHARD_STRATEGIES and not (reshards is None or reshards is False):
            raise ConfigError(
                f"reshard_after_forward={reshards!r} frees weights after forward, and sharding_strategy={name!r} keeps"
                " them until backward is done: leave it out, or choose FULL_SHARD or HYBRID_SHARD"
            )
        if self.extra_dp_size is not None and not self._is_hybrid:
            raise ConfigError(
                f"extra_dp_size={self.extra_dp_size!r} is a number of replicas, which sharding_strategy={name!r} does"
                " not take: leave it out, or choose HYBRID_SHARD"
            )

    def _check_group(self, world_size: int) -> None:
        check_process_group(self.process_group, world_size, is_hybrid=self._is_hybrid)
        if self.extra_dp_size is None:
            return
        if isinstance(self.process_group, (tuple, DeviceMesh)):
            raise ConfigError(
                f"extra_dp_size={self.extra_dp_size!r} is given with a process_group that already determines the number"
                " of replicas: give one of the two"
            )
        check_replicas(self.extra_dp_size, world_size)


def check_reshard_after_forward(value: Any, shard_size: int) -> None:
    """Validate `reshard_after_forward`.

    Args:
        value: Argument of `fully_shard`.
        shard_size: Size of the shard axis.

    Raises:
        ConfigError: It does not divide the shard axis.
    """
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int) or value < 1 or shard_size % value:
        raise ConfigError(
            f"reshard_after_forward={value!r} does not divide the {shard_size} ranks that share the shards: give True,"
            " False, a divisor of that number above 1, or None"
        )
    if value == 1:
        raise ConfigError(
            "reshard_after_forward=1 would keep weights unsharded on every rank after forward: write False for that,"
            " or True to free them"
        )


def _one_replica_per_host(world_size: int, num_hosts: int) -> int:
    if num_hosts > 1 and world_size % num_hosts == 0:
        return num_hosts
    choices = ", ".join(str(size) for size in range(2, world_size + 1) if world_size % size == 0)
    if num_hosts > 1:
        why = f"the {world_size} ranks do not divide evenly over {num_hosts} hosts"
    else:
        why = "on a single host that would be FULL_SHARD"
    raise ConfigError(
        f"sharding_strategy='HYBRID_SHARD' replicates over hosts and shards within each, and {why}: give"
        f" extra_dp_size=, the number of replicas, as one of {choices}, or choose FULL_SHARD"
    )


def _check_offload(given: Any) -> None:
    if isinstance(given, CPUOffload):
        check_flag("cpu_offload.offload_params", given.offload_params)
    is_known = given is None or isinstance(given, (bool, CPUOffload, CPUOffloadPolicy)) or type(given) is OffloadPolicy
    if not is_known:
        raise ConfigError(
            f"cpu_offload={given!r} is not supported: pass True, False, torch's CPUOffload(offload_params=True) or"
            " CPUOffloadPolicy(), or leave it out"
        )


def _check_policy(given: Any) -> None:
    if given is None or isinstance(given, _Policy):
        return
    is_module_class = isinstance(given, type) and issubclass(given, nn.Module)  # callable, but not a policy
    if is_module_class or not callable(given):
        raise ConfigError(
            f"auto_wrap_policy={given!r} is not a policy: give ModuleWrapPolicy({{Block}}) or another policy of"
            f" torch.distributed.fsdp.wrap, a function that is called as {_POLICY_CALL}, or leave it out"
        )
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # C functions may have no signature
        return
    try:
        signature.bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as error:
        raise ConfigError(
            f"auto_wrap_policy={_describe(given)} is not callable as {_POLICY_CALL}: {error}. Pass a callable of"
            " these arguments, made with functools.partial if it has further ones"
        ) from error


def _check_module_arguments(ignored_modules: Any, param_init_fn: Any) -> None:
    if not isinstance(ignored_modules, tuple) or not all(isinstance(one, nn.Module) for one in ignored_modules):
        raise ConfigError(
            f"ignored_modules={ignored_modules!r} is not a list of modules: give modules of the model, as in"
            " [model.head], or leave it out"
        )
    if param_init_fn is not None and not callable(param_init_fn):
        raise ConfigError(
            f"param_init_fn={param_init_fn!r} is not callable: give a function that takes a module and initializes its"
            " own parameters and buffers, or leave it out for each module's reset_parameters()"
        )


def _describe(value: Any) -> str:
    """Return a text that is equal on all ranks for equal policies or functions: no addresses."""
    if isinstance(value, functools.partial):
        arguments = [*map(_describe, value.args), *(f"{name}={_describe(one)}" for name, one in value.keywords.items())]
        return f"{_describe(value.func)}({', '.join(arguments)})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_describe, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_describe, value))}]"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, _Policy):
        inside = getattr(value, "_module_classes", getattr(value, "_lambda_fn", None))
        return f"{type(value).__qualname__}({_describe(inside)})"
    named = cast(Callable[..., Any], value) if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


# Known classes of torch, covered by tests. A subclass may behave differently, so it is probed.
_PER_PARAM_CLASSES = frozenset({optim.Adafactor, optim.Muon})


class OptimizerKind(IntEnum):
    """Unit of data that an optimizer's update depends on. A larger kind is valid for all smaller ones."""

    ELEMENTWISE = 0  # any elements of parameters
    PER_PARAM = 1  # one full parameter


def kind_of(optimizer: optim.Optimizer) -> OptimizerKind:
    """Return the kind of an optimizer; copies of unknown classes are probed on small tensors.

    The optimizer and the process's state do not change. The result is local, so the ranks should take the maximum.

    Args:
        optimizer: The user's optimizer, before its parameters are sharded.

    Raises:
        ConfigError: The optimizer can't run on sharded parameters, as its updates need all of them at once.
    """
    obstacle = sharding_obstacle(optimizer)
    if obstacle is None:
        return OptimizerKind.ELEMENTWISE
    if isinstance(optimizer, optim.SparseAdam):
        raise ConfigError(
            f"{type(optimizer).__name__} takes sparse gradients, but gradients of sharded parameters are dense: use"
            " torch.optim.AdamW, and embeddings without sparse=True"
        )
    if type(optimizer) in _PER_PARAM_CLASSES:
        return OptimizerKind.PER_PARAM
    coupling = obstacle if isinstance(optimizer, optim.LBFGS) else find_coupling(optimizer)
    if coupling is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} needs all parameters at once, and each rank has a shard of them: {coupling}."
            " Use an optimizer that updates each parameter by itself, such as torch.optim.AdamW or Muon, or"
            " TorchDDPPlugin, under which every rank has all parameters"
        )
    return OptimizerKind.PER_PARAM
