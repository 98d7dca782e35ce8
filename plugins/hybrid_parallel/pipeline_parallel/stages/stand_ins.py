"""Modules that a stage does not hold: they have no parameters, and return tensors of the right shape without meaning.

Note [Stand-ins]
A module keeps its place, its class and its attributes, and loses its parameters and buffers, so that the model's names
are those of what the stage holds. Where the forward calls it before the stage's own units, it runs on the meta device,
with parameters of the shapes that it had, and its outputs come back as tensors of nan that take up no memory. If a
result depends on one of them the pipeline was cut where more than the units' outputs goes across: every stand-in has a
leaf of its own in the graph, and whoever finds it behind a piece's output knows the module's name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from booster.errors import ConfigError
from booster.interface import layout_of
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.running import PieceContext
from booster.tensor_tree import map_tensors

__all__ = ["StandIns", "cast_absent_tensors", "show_stand_ins", "take_tensors"]

_ABSENT = "_pipeline_absent"  # of a module without its tensors: what it had


class _AbsentTensors:
    """What a module had itself: parameters on the meta device, and buffers, by their names."""

    def __init__(self) -> None:
        self.parameters: dict[str, nn.Parameter | None] = {}
        self.buffers: dict[str, torch.Tensor | None] = {}


def show_stand_ins(module: nn.Module, known: dict[int, nn.Parameter]) -> None:
    """Puts parameters on the meta device, of the logical shapes, in the place of a module's own, whose memory goes.

    Args:
        module: One that this stage does not hold.
        known: By the parameter's `id` the stand-ins made before; is added to. Parameters in there stay alive.
    """
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if id(parameter) not in known:
            empty = torch.empty(layout_of(parameter).logical_shape, dtype=parameter.dtype, device="meta")
            known[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
        module._parameters[name] = known[id(parameter)]


def take_tensors(module: nn.Module) -> None:
    """Takes a module's own parameters, on the meta device already, and its buffers away. In place."""
    absent = _AbsentTensors()
    absent.parameters, absent.buffers = dict(module._parameters), dict(module._buffers)
    module.__dict__[_ABSENT] = absent
    module._parameters.clear()
    module._buffers.clear()


def cast_absent_tensors(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Gives what was taken away the number format of the weights, as the forward around it may ask for it."""
    if dtype is None:
        return
    for module in model.modules():
        absent = module.__dict__.get(_ABSENT)
        for parameter in () if absent is None else absent.parameters.values():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)


class StandIns:
    """Makes stand-ins of modules, and finds what depends on them.

    Args:
        context: Says whether what runs counts.
        device: Of the tensors that they return.
    """

    def __init__(self, context: PieceContext, device: torch.device) -> None:
        self.context = context
        self.device = device
        self.leaves: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self.is_on_meta = False

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIns:
        return self

    def put(self, module: nn.Module, name: str) -> None:
        """Makes a stand-in of a module whose tensors, and its descendants', were taken. In place."""
        for own_name, inner in module.named_modules():
            full = f"{name}.{own_name}" if own_name else name
            base = type(inner)
            if base not in _classes:
                _classes[base] = type(base.__name__, (_Absent, base), {"__module__": base.__module__})
            inner.__class__ = _classes[base]
            inner.__dict__["_pipeline_stand_in"] = (full, self)

    def values(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same shape and format that takes up no memory."""
        if not like.is_floating_point():
            return torch.zeros((), dtype=like.dtype, device=self.device).expand(like.shape)
        key = (name, like.dtype)
        if key not in self.leaves:
            self.leaves[key] = torch.full((), math.nan, dtype=like.dtype, device=self.device, requires_grad=True)
        return self.leaves[key].expand(like.shape)

    def require_independent(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises if tensors depend on what a stand-in returned.

        Raises:
            ConfigError: It names the module.
        """
        names = {id(leaf): name for (name, _), leaf in self.leaves.items()}
        for node in _nodes_behind(tensors):
            name = names.get(id(getattr(node, "variable", None)))
            if name is not None:
                raise ConfigError(
                    f"what this pipeline stage computes depends on {name!r}, which an earlier stage holds, by a way"
                    " around the layers between: only the output of the layer before travels from stage to stage. Let"
                    " the layers hand it on with their output, or choose split= so that both are in one stage"
                )

    def run(self, name: str, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns what a module would, as far as shapes and formats go.

        Raises:
            ConfigError: The stage's own units run already, so that its values would be needed.
        """
        run = self.context.require_run()
        if run.is_live:
            raise ConfigError(
                f"the model ran {name!r} on the stage that has {self.context.plan.units[run.piece.start]!r}, while the"
                " pipeline's plan has it on another: it was taken for a module that runs before or after all layers by"
                " the place where it is registered. Give execution_sequence= to say how your model runs"
            )
        inside = list(module.modules())
        self.is_on_meta = True
        try:
            for one in inside:
                _show(one)
            outputs = call(*_to_meta(args), **_to_meta(kwargs))
        finally:
            self.is_on_meta = False
            for one in inside:
                _hide(one)
        return map_tensors(lambda tensor: self.values(name, tensor), outputs)


class _Absent(nn.Module):
    """What is put before the class of a module that the stage does not hold."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name, stand_ins = self.__dict__["_pipeline_stand_in"]
        if stand_ins.is_on_meta:
            return super().__call__(*args, **kwargs)
        return stand_ins.run(name, super().__call__, self, args, kwargs)

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
            own_name, stand_ins = self.__dict__["_pipeline_stand_in"]
            return None if parameter is None else stand_ins.values(own_name, parameter)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _show(module: nn.Module) -> None:
    """Puts what was taken from a module back, on the meta device."""
    absent = module.__dict__.get(_ABSENT)
    if absent is not None:
        module._parameters.update(absent.parameters)
        module._buffers.update({name: None if one is None else one.to("meta") for name, one in absent.buffers.items()})


def _hide(module: nn.Module) -> None:
    if _ABSENT in module.__dict__:
        module._parameters.clear()
        module._buffers.clear()


def _to_meta(tree: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach().to("meta"), tree)


def _nodes_behind(tensors: Sequence[torch.Tensor]) -> list[Node]:
    """Returns the nodes of the graph that tensors were computed by."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return list(seen)
