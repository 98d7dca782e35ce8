"""State of an optimizer in a checkpoint: tensors by parameter name, and plain values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.errors import CheckpointError, format_list

from .accumulation import AccumulationState
from .model_wrapper import ModelWrapper
from .precision import Fp32MasterWeights, LossScaler
from .shard_aware import StateAllocator
from .shard_spec import ShardSpec, TensorSlice, shard_spec_of

MASTER = "master"
# Hyperparameters that select an implementation and don't change the result.
_IMPLEMENTATION_CHOICES = {"foreach", "fused", "capturable", "differentiable", "maximize"}
_NAME_KEYS = ("params", "param_names")  # of a group; "param_names" exists if torch's optimizer was given names
_MAX_LISTED = 10  # differences, and names in each of them, in a message
_OWNER = "@"  # before the owner of a state that one plugin stores for itself


def own_key(key: str, owner: str) -> str:
    """Return the name of a state that only the plugin which stores it reads, such as "exp_avg@rank1"."""
    return f"{key}{_OWNER}{owner}"


def is_owned(name: str) -> bool:
    """Return whether the full name of a state is one of `own_key`."""
    return _OWNER in name.rsplit(".", 1)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of a logical tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the elements in a file."""
        return self.numel * self.dtype.itemsize


class StatefulOptimizer(Protocol):
    """What checkpoints use of `OptimizerWrapper`, which creates the views of its state and therefore imports them."""

    optim: Optimizer
    data_parallel_group: dist.ProcessGroup | None
    loss_scaler: LossScaler | None
    master_weights: Fp32MasterWeights | None
    num_skipped_steps: int

    @property
    def model(self) -> ModelWrapper: ...

    @property
    def accumulation(self) -> AccumulationState: ...

    @property
    def num_microbatches(self) -> int: ...

    def model_parameter(self, parameter: nn.Parameter) -> nn.Parameter: ...

    def checkpoint_state(self) -> OptimizerState: ...

    def restore_accumulation(self, accumulation: AccumulationState, num_microbatches: int) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


class OptimizerState:
    """Live view of an optimizer's state for a CheckpointIO.

    Tensors are named `<parameter name>.<state name>`, fp32 master weights `<parameter name>.master`. Everything else
    (hyperparameters, numbers, the loss scaler) is in `values()`. A plugin that shards states overrides the methods
    under "Overridden by plugins", which return this rank's shards of each logical parameter and its states.

    Args:
        optimizer: Optimizer to read and fill.
    """

    def __init__(self, optimizer: StatefulOptimizer) -> None:
        self.optimizer = optimizer
        own = optimizer.optim
        self._allocator = own if isinstance(own, StateAllocator) else None

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the optimizer's parameters (masters where it has them) by the user's names, in group order."""
        return {name: parameter for group in self._groups() for name, parameter in group}

    def slices(self) -> list[TensorSlice]:
        """Return this rank's slices of every state tensor and master weight; filling them loads the state.

        Raises:
            CheckpointError: A state is neither a tensor nor a plain value (LBFGS keeps lists of tensors).
        """
        named = self.named_parameters().items()
        return [part for one in named for part in self._state_slices(*one)] + self.master_slices()

    def master_slices(self) -> list[TensorSlice]:
        """Return this rank's slices of every master weight."""
        return [part for one in self.named_parameters().items() for part in self._master_slices(*one)]

    def values(self) -> dict[str, Any]:
        """Return the plain values: param groups with parameter names, shapes, numbers per parameter, the scaler.

        Collective if the ranks hold states of different parameters. A failure there is raised on all ranks.

        Raises:
            CheckpointError: A state is neither a tensor nor a plain value, or is not readable.
        """
        numbers = self._all_numbers()  # first, as a failure of what follows may occur on one rank alone
        self._check_is_storable()
        logical = self._groups()
        groups = [
            {key: value for key, value in group.items() if key not in _NAME_KEYS}
            | {"params": [name for name, _ in members]}
            for group, members in zip(self.optimizer.optim.param_groups, logical, strict=True)
        ]
        scaler = self.optimizer.loss_scaler
        return {
            "optimizer": type(self.optimizer.optim).__name__,
            "param_groups": groups,
            "shapes": {name: list(self._layout(one).logical_shape) for members in logical for name, one in members},
            "numbers": numbers,
            "loss_scaler": None if scaler is None else scaler.state_dict(),
            "num_skipped_steps": self.optimizer.num_skipped_steps,
        }

    def names_by_order(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the user's names of a torch optimizer's parameters, which are stored by numbers, in its order.

        Args:
            values: Stored plain values.

        Returns:
            Names by stored number; none if the state isn't of a torch optimizer without names, or has other groups.
        """
        theirs = [group["params"] for group in values["param_groups"]]
        ours = [[name for name, _ in group] for group in self._groups()]
        is_by_number = values.get("optimizer", "") is None and _are_numbers(
            [name for group in theirs for name in group]
        )
        if not is_by_number or [len(group) for group in theirs] != [len(group) for group in ours]:
            return {}
        return {number: name for pair in zip(theirs, ours, strict=True) for number, name in zip(*pair, strict=True)}

    def check(self, specs: Mapping[str, TensorSpec], values: Mapping[str, Any]) -> None:
        """Raise one error that lists all mismatches between a stored state and this optimizer.

        Args:
            specs: Stored tensors by name.
            values: Stored plain values.

        Raises:
            CheckpointError: Groups, parameters or shapes differ.
            ConfigError: There is not enough space for the states.
        """
        problems = list(self._differences(specs, values))
        if problems:
            listed = "".join(f"\n  - {problem}" for problem in problems[:_MAX_LISTED])
            more = f"\n  - and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
            advice = "Build the optimizer with the same param groups over the same model as the one that was saved"
            theirs = [name for group in values["param_groups"] for name in group["params"]]
            if _are_numbers(theirs) != _are_numbers(self.named_parameters()):
                advice = (
                    "One of the two was not boosted, and knows its parameters by numbers only: build that one from"
                    " names, such as AdamW(model.named_parameters())"
                )
            raise CheckpointError(
                f"the stored optimizer state does not match this optimizer, nothing was loaded:{listed}{more}\n{advice}"
            )
        if self._allocator is not None:
            self._allocator.prepare_states()

    def allocate(self, specs: Mapping[str, TensorSpec], values: Mapping[str, Any]) -> list[TensorSlice]:
        """Allocate a state of the stored names and shapes, load the plain values, and return the slices to fill.

        Call `check` first. A loss scaler keeps its values if none are stored, and masters that are not stored are
        copied from the model's weights. Not collective.

        Args:
            specs: Stored tensors by name.
            values: Stored plain values.
        """
        specs = {name: spec for name, spec in specs.items() if not is_owned(name)}
        self._refresh_masters(specs)
        scaler = self.optimizer.loss_scaler
        if scaler is not None and values["loss_scaler"] is not None:
            scaler.load_state_dict(values["loss_scaler"])  # first: it raises for a malformed state
        for group, stored in zip(self.optimizer.optim.param_groups, values["param_groups"], strict=True):
            group.update({key: value for key, value in stored.items() if key not in _NAME_KEYS})
        held = {name: self._held(name, parameter) for name, parameter in self.named_parameters().items()}
        state = self.optimizer.optim.state
        # Taken out one by one, so that memory is freed as fast as it is allocated.
        replaced = {parameter: dict(values_of) for parameter, values_of in state.items()}
        reused: set[int] = set()  # addresses: parameters may share a state, of which each is stored by itself
        state.clear()
        for full_name, spec in specs.items():
            name, key = full_name.rsplit(".", 1)
            for parameter in held[name] if key != MASTER else ():
                tensor = self._new_state_tensor(parameter, key, spec)
                before = replaced.get(parameter, {}).pop(key, None)
                if before is not None and _is_alike(before, tensor) and before.data_ptr() not in reused:
                    tensor = before
                    reused.add(tensor.data_ptr())
                state[parameter][key] = tensor
        for name, numbers in values["numbers"].items():
            for parameter in held[name]:
                state[parameter].update(numbers)
        self.optimizer.num_skipped_steps = int(values["num_skipped_steps"])
        return [_as_stored(part, specs[part.name]) for part in self.slices() if part.name in specs]

    def _check_is_storable(self) -> None:
        """Raise `CheckpointError` if the optimizer keeps what a load would lose: beside groups and states."""
        optimizer = self.optimizer.optim
        others = [repr(key) for key in optimizer.state if not isinstance(key, torch.Tensor)]
        is_plain = type(optimizer).state_dict is Optimizer.state_dict or self._allocator is not None
        if not is_plain or optimizer._optimizer_state_dict_post_hooks:
            others += [repr(key) for key in optimizer.state_dict() if key not in ("state", "param_groups")]
        if others:
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {', '.join(others)} beside the states of its parameters and its"
                " param groups, which a checkpoint would lose: keep it in the param groups, or save it in `extra`"
            )

    # Overridden by plugins.

    def _groups(self) -> list[list[tuple[str, nn.Parameter]]]:
        """Return the logical parameters of every param group by the user's names, equal on all ranks."""
        names: dict[int, str] = {}
        for name, parameter in self.optimizer.model.named_parameters():
            names.setdefault(id(parameter), name)
        working = self.optimizer.model_parameter
        return [
            [(names[id(working(parameter))], parameter) for parameter in group["params"]]
            for group in self.optimizer.optim.param_groups
        ]

    def _held(self, name: str, parameter: nn.Parameter) -> list[nn.Parameter]:
        """Return the entries of `param_groups` that are this rank's shards of a logical parameter."""
        return [parameter]

    def _state_slices(self, name: str, parameter: nn.Parameter) -> Iterator[TensorSlice]:
        """Yield this rank's slices of a logical parameter's states."""
        layout, is_primary = self._layout(parameter), self.optimizer.model.writes(name)
        for key, value in self._state_tensors(parameter):
            if self._is_elementwise(key, value, layout.local_shape, layout.logical_shape):
                yield from layout.slices(f"{name}.{key}", value, primary=is_primary)
            else:
                yield TensorSlice.full(f"{name}.{key}", value, primary=is_primary and layout.holds_first())

    def _master_slices(self, name: str, parameter: nn.Parameter) -> Iterator[TensorSlice]:
        """Yield this rank's slices of a logical parameter's master weights."""
        if self.optimizer.model_parameter(parameter) is not parameter:
            layout = self._layout(parameter)
            yield from layout.slices(f"{name}.{MASTER}", parameter.detach(), primary=self.optimizer.model.writes(name))

    def _all_numbers(self) -> dict[str, dict[str, Any]]:
        """Return the plain values among the states by logical parameter, equal on all ranks. May be collective."""
        return {
            name: numbers
            for name, parameter in self.named_parameters().items()
            if (numbers := self._numbers(name, parameter))
        }

    def _refresh_masters(self, stored: Collection[str]) -> None:
        """Copy the model's weights into the masters unless all of them are among the stored tensors."""
        masters = self.optimizer.master_weights
        if masters is not None and any(part.name not in stored for part in self.master_slices()):
            masters.refresh()

    def _new_state_tensor(self, parameter: nn.Parameter, key: str, spec: TensorSpec) -> torch.Tensor:
        """Return an empty state tensor with the device and dtype that torch's load_state_dict would use."""
        spec = self._own_spec(parameter, key, spec)
        memory = None
        if self._allocator is not None:
            memory = self._allocator.allocate_state(parameter, key, spec.shape, spec.dtype)
        if memory is None:
            floats = spec.dtype.is_floating_point and parameter.is_floating_point()
            dtype, device = parameter.dtype if floats else spec.dtype, parameter.device
            if key == "step":
                on_device = id(parameter) in self._with_steps_on_device
                dtype, device = spec.dtype, parameter.device if on_device else torch.device("cpu")
            memory = torch.empty(spec.shape, dtype=dtype, device=device)
        return memory.zero_() if self._layout(parameter).has_padding else memory

    @cached_property
    def _with_steps_on_device(self) -> frozenset[int]:
        """`id` of the parameters whose step torch keeps on their device, once the param groups are loaded."""
        groups = self.optimizer.optim.param_groups
        chosen = (group for group in groups if group.get("capturable") or group.get("fused"))
        return frozenset(id(parameter) for group in chosen for parameter in group["params"])

    def _own_spec(self, parameter: nn.Parameter, key: str, spec: TensorSpec) -> TensorSpec:
        """Return the local spec of a stored state for one of `param_groups`."""
        layout = self._layout(parameter)
        is_local = spec.shape != layout.logical_shape or layout.local_shape == layout.logical_shape
        return spec if is_local else replace(spec, shape=layout.local_shape)

    def _layout(self, parameter: nn.Parameter) -> ShardSpec:
        """Return the layout of the model's parameter that one of `param_groups` is, or is a copy of."""
        return shard_spec_of(self.optimizer.model_parameter(parameter), parameter.shape)

    def _state_tensors(self, parameter: nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
        for key, value in self.optimizer.optim.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                if not isinstance(key, str) or key == MASTER or "." in key or _OWNER in key:
                    raise CheckpointError(
                        f"{type(self.optimizer.optim).__name__} has a state {key!r}, which has another meaning in the"
                        f" names of a checkpoint: name it by a string without '.' and {_OWNER!r}, other than {MASTER!r}"
                    )
                yield key, value

    def _is_elementwise(
        self, key: str, value: torch.Tensor, local_shape: Sequence[int], logical_shape: Sequence[int]
    ) -> bool:
        """Whether a state has one value for each local element of a parameter, and is sharded like it."""
        if value.shape != torch.Size(local_shape):
            return False
        if value.numel() != 1 or math.prod(logical_shape) == 1:
            return True
        # Of a shard with one element: one value for each parameter, if other parameters have one.
        state = self.optimizer.optim.state
        one_each = (one.get(key) for parameter, one in state.items() if parameter.numel() > 1)
        return not any(isinstance(one, torch.Tensor) and one.numel() == 1 for one in one_each)

    def _numbers(self, name: str, parameter: nn.Parameter) -> dict[str, Any]:
        if self._allocator is not None:
            self._allocator.check_states()  # here, because every save reads numbers first and compares them over ranks
        state = self.optimizer.optim.state.get(parameter, {})
        numbers = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        for key, value in numbers.items():
            if value is not None and not isinstance(value, (bool, int, float, str)):
                raise CheckpointError(
                    f"{type(self.optimizer.optim).__name__} has a {type(value).__name__} as state {key!r} of"
                    f" {name!r}, and a checkpoint without pickle stores tensors and plain values: save the model alone"
                )
        return numbers

    def _other_kind(self, values: Mapping[str, Any]) -> Iterator[str]:
        # Several classes may compute the same update, such as Adam and a faster implementation: they have the same
        # hyperparameters. A class that lacks some of them computes another update.
        optimizer = self.optimizer.optim
        ours, theirs = type(optimizer).__name__, values.get("optimizer")
        stored = {key for group in values["param_groups"] for key in group}
        lost = sorted(set(optimizer.defaults) - stored - _IMPLEMENTATION_CHOICES)
        if theirs is None:  # of a torch file, of a version that may lack flags
            lost = [key for key in lost if not isinstance(optimizer.defaults[key], bool)]
        if theirs != ours and lost and values["param_groups"]:
            yield f"the state is of a {theirs or 'optimizer'}, which lacks {', '.join(lost)}, and this is a {ours}"
        elif theirs not in (None, ours) and _are_different_in_torch(theirs, ours):
            yield f"the state is of a {theirs}, and this is a {ours}, which computes another update"
        is_uncorrected = any(group.get("bias_correction") is False for group in values["param_groups"])
        if is_uncorrected and isinstance(optimizer, torch.optim.Adam):
            yield f"the state is of a {theirs} with bias_correction=False, and {ours} always corrects"

    def _differences(self, specs: Mapping[str, TensorSpec], values: Mapping[str, Any]) -> Iterator[str]:
        named = self.named_parameters()
        stored_groups, groups = values["param_groups"], self._groups()
        yield from self._other_kind(values)
        if len(stored_groups) != len(groups):
            yield f"{len(stored_groups)} param groups are stored, the optimizer has {len(groups)}"
            return
        for index, (stored, group) in enumerate(zip(stored_groups, groups, strict=True)):
            ours, theirs = {name for name, _ in group}, set(stored["params"])
            differing = {"missing in the checkpoint": ours - theirs, "not in this optimizer": theirs - ours}
            for where, names in differing.items():
                if names:
                    listed = format_list((repr(name) for name in sorted(names)), _MAX_LISTED)
                    yield f"group {index}: {listed} {'is' if len(names) == 1 else 'are'} {where}"
        known = {name: shape for name, shape in values["shapes"].items() if shape is not None}
        for name, shape in known.items():
            here = self._layout(named[name]).logical_shape if name in named else tuple(shape)
            if tuple(shape) != here:
                yield f"{name!r} has shape {tuple(shape)} in the checkpoint, {here} here"
        unknown = [full for full in specs if full.rsplit(".", 1)[0] not in values["shapes"]]
        yield from (f"tensor {full!r} belongs to no stored parameter" for full in sorted(unknown))


def _are_different_in_torch(*names: str) -> bool:
    """Return whether these are names of torch's optimizers, which compute different updates."""
    return set(names) != {"Adam", "AdamW"} and all(isinstance(getattr(torch.optim, name, None), type) for name in names)


def _are_numbers(names: Collection[str]) -> bool:
    """Return whether these are the names of a plain optimizer that was built without names."""
    return bool(names) and all(name.isdecimal() for name in names)


def _as_stored(part: TensorSlice, spec: TensorSpec) -> TensorSlice:
    """Return the slice; of a state that is stored as a whole it is one, also if it has the shape of a shard."""
    if part.global_shape == spec.shape or part.tensor.numel() != spec.numel:
        return part
    return TensorSlice.full(part.name, part.tensor.view(spec.shape), primary=part.primary)


def _is_alike(replaced: object, tensor: torch.Tensor) -> bool:
    """Return whether a host tensor may stay in place of the new one that replaces it: its pages are in memory already.

    A new page is zeroed when it is touched first, which takes longer than to fill it from a file in memory.
    """
    return (
        type(replaced) is torch.Tensor
        and tensor.device.type == "cpu"
        and replaced.device.type == "cpu"
        and (replaced.dtype, replaced.shape, replaced.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        and replaced.is_pinned() == tensor.is_pinned()
        and not replaced.is_inference()
    )
