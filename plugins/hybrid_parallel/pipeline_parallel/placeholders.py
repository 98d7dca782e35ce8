"""Placeholders of the modules of other stages: no parameters, outputs of the right shape.

Note [Placeholder modules]
A placeholder keeps the module's name, class and attributes, and drops its parameters and buffers, so that the model has
only the names of the stage's own tensors. If the forward calls it before the stage's own layers, it runs on the meta
device with parameters of the original shapes, and returns expanded scalars of nan, which take no memory. A result that
depends on one means that data bypass the layers' outputs. To detect this every placeholder has a separate leaf in the
autograd graph, which identifies the module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from booster.core.layer_stacks import subclass_of
from booster.errors import ConfigError
from booster.interface import shard_spec_of
from booster.pytree import map_tensors

from .stage_forward import ChunkContext

_ABSENT = "_pipeline_absent"  # attribute with the dropped tensors of a placeholder


@dataclass(frozen=True, eq=False)
class _DroppedTensors:
    """Dropped tensors of a module, by name: parameters on the meta device, and buffers."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]


def replace_by_meta(module: nn.Module, known: dict[int, nn.Parameter]) -> None:
    """Replace a module's direct parameters by ones of their logical shapes on the meta device.

    Args:
        module: Module of another stage.
        known: Replacements made before, by the `id` of the parameter; extended in place. Its values stay alive.
    """
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if id(parameter) not in known:
            empty = torch.empty(shard_spec_of(parameter).logical_shape, dtype=parameter.dtype, device="meta")
            known[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
        module._parameters[name] = known[id(parameter)]


def drop_tensors(module: nn.Module) -> None:
    """Drop a module's direct parameters, on the meta device already, and its buffers. In place."""
    module.__dict__[_ABSENT] = _DroppedTensors(dict(module._parameters), dict(module._buffers))
    module._parameters.clear()
    module._buffers.clear()


def cast_absent_tensors(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast dropped parameters to the dtype of the weights, which the forward may read."""
    if dtype is None:
        return
    for module in model.modules():
        absent = module.__dict__.get(_ABSENT)
        for parameter in () if absent is None else absent.parameters.values():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)


@dataclass(eq=False)
class PlaceholderModules:
    """Creates placeholders of modules, and detects results that depend on them.

    Attributes:
        context: Context of the chunk forward in progress.
        device: Device of their outputs.
        leaves: Scalar of each placeholder's outputs, by module name and dtype, and of parameters read from them.
        parameters: Names of these parameters.
        is_on_meta: Whether a placeholder is running on the meta device.
        is_trial: Whether outputs have other values; see Note [Trial forward].
    """

    context: ChunkContext
    device: torch.device
    leaves: dict[tuple[str, torch.dtype], torch.Tensor] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    is_on_meta: bool = False
    is_trial: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> PlaceholderModules:
        return self

    def install(self, module: nn.Module, name: str) -> None:
        """Turn a module, whose tensors were dropped, into a placeholder, with its submodules. In place."""
        for own_name, inner in module.named_modules():
            full = f"{name}.{own_name}" if own_name else name
            inner.__class__ = subclass_of(type(inner), "placeholder", _placeholder_members, mixin=_Placeholder)
            inner.__dict__["_pipeline_placeholder"] = (full, self)

    def values(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape and dtype that takes no memory, unless the model writes into it."""
        if self.is_trial:  # rows of zeros, as of padding, and others
            generator = torch.Generator(self.device).manual_seed(0)  # the forward's random numbers stay as they are
            rows = torch.rand(like.shape[:-1], generator=generator, device=self.device) < 0.5
            values: Any = 1
            if like.is_floating_point():
                values = torch.randn(like.shape, generator=generator, device=self.device)
            chosen = torch.where(rows.unsqueeze(-1) if like.dim() else rows, values, 0)
            return chosen.to(like.dtype).expand(like.shape).contiguous()
        if not like.is_floating_point():
            return torch.zeros((), dtype=like.dtype, device=self.device).expand(like.shape)
        key = (name, like.dtype)
        if key not in self.leaves:
            self.leaves[key] = torch.full((), math.nan, dtype=like.dtype, device=self.device, requires_grad=True)
        expanded = self.leaves[key].expand(like.shape)
        return expanded.clone() if self.context.plan.overwrites_embeddings else expanded

    def check_independent(self, tensors: Sequence[torch.Tensor]) -> None:
        """Check that tensors do not depend on outputs of placeholders.

        Raises:
            ConfigError: A tensor depends on one; the message has the module's name.
        """
        names = {id(leaf): name for (name, _), leaf in self.leaves.items()}
        for node in _nodes_behind(tensors):
            name = names.get(id(getattr(node, "variable", None)))
            if name in self.parameters:
                raise ConfigError(
                    f"this pipeline stage computes with the parameter {name!r}, which the forward reads and an earlier"
                    " stage holds: let a module behind the layers have it, too, before boost(), as in head ="
                    " nn.Linear(..., bias=False); head.weight = embedding.weight, and call that module. Both stages"
                    " then hold it, with one gradient"
                )
            if name is not None:
                raise ConfigError(
                    f"what this pipeline stage computes depends on {name!r}, which an earlier stage holds, by a way"
                    " around the layers between: only the output of the layer before travels from stage to stage. Let"
                    " the layers hand it on with their output, or choose split= so that both are in one stage"
                )

    def run(self, name: str, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return placeholder outputs of a module's shapes and dtypes.

        Raises:
            ConfigError: The stage's own layers have run already, so the actual values would be needed.
        """
        run = self.context.require_run()
        if run.is_computing:
            raise ConfigError(
                f"the model ran {name!r} on the stage that has {self.context.plan.layers[run.chunk.start]!r}, while the"
                " pipeline's plan has it on another: it was taken for a module that runs before or after all layers by"
                " the place where it is registered. Give execution_sequence= to say how your model runs"
            )
        dropped = [(one, one.__dict__[_ABSENT]) for one in module.modules() if _ABSENT in one.__dict__]
        self.is_on_meta = True
        try:
            for one, absent in dropped:
                one._parameters.update(absent.parameters)
                one._buffers.update(map_tensors(lambda tensor: tensor.to("meta"), absent.buffers))
            args, kwargs = map_tensors(lambda tensor: tensor.detach().to("meta"), (args, kwargs))
            outputs = call(*args, **kwargs)
        finally:
            self.is_on_meta = False
            for one, _ in dropped:
                one._parameters.clear()
                one._buffers.clear()
        return map_tensors(lambda tensor: self.values(name, tensor), outputs)


class _Placeholder(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name, placeholders = self.__dict__["_pipeline_placeholder"]
        if placeholders.is_on_meta:
            return super().__call__(*args, **kwargs)
        return placeholders.run(name, super().__call__, self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            absent = self.__dict__.get(_ABSENT)
            if absent is None or name not in {**absent.parameters, **absent.buffers}:
                raise
            if name in absent.buffers:
                return absent.buffers[name]
            parameter = absent.parameters[name]
            if parameter is None:
                return None
            own_name, placeholders = self.__dict__["_pipeline_placeholder"]
            placeholders.parameters.add(f"{own_name}.{name}")
            return placeholders.values(f"{own_name}.{name}", parameter)

    def __setattr__(self, name: str, value: Any) -> None:
        absent = self.__dict__.get(_ABSENT)
        if absent is not None and name in absent.parameters:
            raise ConfigError(
                f"{name!r} of {self.__dict__['_pipeline_placeholder'][0]!r} was set after boost(), and another pipeline"
                " stage holds this module: tie or replace parameters before boost()"
            )
        super().__setattr__(name, value)


def _placeholder_members(base: type[nn.Module]) -> dict[str, Any]:
    # Models of transformers return the device and dtype of their first parameter.
    return {
        name: property(getter)
        for name, getter in (("device", _device_of_placeholder), ("dtype", _dtype_of_placeholder))
        if isinstance(getattr(base, name, None), property)
    }


def _device_of_placeholder(module: nn.Module) -> torch.device:
    placeholders: PlaceholderModules = module.__dict__["_pipeline_placeholder"][1]
    return torch.device("meta") if placeholders.is_on_meta else placeholders.device


def _dtype_of_placeholder(module: nn.Module) -> torch.dtype:
    dropped: list[_DroppedTensors] = [one.__dict__[_ABSENT] for one in module.modules() if _ABSENT in one.__dict__]
    parameters = (parameter for absent in dropped for parameter in absent.parameters.values())
    return next(one.dtype for one in parameters if one is not None and one.is_floating_point())


def _nodes_behind(tensors: Sequence[torch.Tensor]) -> list[Node]:
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return list(seen)
