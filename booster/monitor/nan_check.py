"""Detection of the origin of inf and nan in losses and gradients, on all ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from booster.comm import all_gather_bytes, any_rank
from booster.core.accumulation import any_nonfinite
from booster.errors import ConfigError, NonfiniteError, format_list
from booster.fault_tolerance.progress import StepCallback, current_progress, observe_phases
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.logger import get_dist_logger
from booster.pytree import iter_tensors

# Note [Nonfinite detection]
# In forward, each rank records the modules that computed nonfinite outputs from finite inputs, in order of completion;
# modules around a recorded one are skipped. In backward, it records the modules' outputs and parameters whose local
# gradients were nonfinite, before they are summed over ranks: afterwards all ranks have the same inf or nan, whose
# origin is lost. The records are read only if a loss or a gradient of the step is nonfinite on any rank, which costs
# one all-reduced number each time. All ranks then gather all records, and raise the same error. Masks with -inf inside
# of a forward are harmless, as the loss is finite.

_ACTIONS = ("raise", "log")
_MAX_NAMES = 5


@contextmanager
def detect_nonfinite(model: ModelWrapper, optimizer: OptimizerWrapper | None, *, action: str) -> Iterator[None]:
    """Check a model in a block; see `Booster.debug_nonfinite`."""
    if action not in _ACTIONS:
        raise ConfigError(
            f"debug_nonfinite(action={action!r}): the action is unknown: write action='raise' for an error or"
            " action='log' for a line of the log"
        )
    detector = _NonfiniteDetector(model, optimizer, raises=action == "raise")
    with detector.installed(), observe_phases(detector):
        yield


@dataclass(slots=True)
class _Records:
    """What a rank has found that is not finite; see Note [Nonfinite detection]."""

    modules: list[tuple[str, bool]] = field(default_factory=list)  # with whether their inputs were finite
    gradients_of: list[str] = field(default_factory=list)  # parameters, in order of backward
    gradients_at: str | None = None  # first module, in order of backward, by the gradient of its output


class _NonfiniteDetector(StepCallback):
    def __init__(self, model: ModelWrapper, optimizer: OptimizerWrapper | None, *, raises: bool) -> None:
        self._model = model
        self._optimizer = optimizer
        self._raises = raises
        self._records = _Records()
        self._handles: list[RemovableHandle] = []
        # Tensors with a hook by id, kept alive so that no other tensor gets their id.
        self._hooked: dict[int, torch.Tensor] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        try:
            for name, parameter in self._model.named_parameters():
                self._hook_parameter(self._model.logical_name(name), parameter)
            for name, module in self._model.named_modules():
                self._hook_module(name, module)
            yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._hooked.clear()

    def _hook_module(self, name: str, module: nn.Module) -> None:
        prefix = f"{name}." if name else ""

        def before(module: nn.Module, *_: Any) -> None:
            if torch.compiler.is_compiling():
                return
            # A plugin may bind other tensors while a module runs.
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._hook_parameter(self._model.logical_name(prefix + key), parameter)

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not torch.compiler.is_compiling() and (module.training or torch.is_grad_enabled()):
                self._record_output(name, (args, kwargs), output)

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _record_output(self, name: str, inputs: Any, output: Any) -> None:
        for tensor in iter_tensors(output):
            # Tensor subclasses that wrap other ranks' values have no local gradient to check.
            if tensor.requires_grad and type(tensor) is torch.Tensor:
                tensor.register_hook(lambda gradient: self._record_gradient_at(name, gradient))
        recorded = self._records.modules
        if len(recorded) >= _MAX_NAMES or not _has_nonfinite(output):
            return
        if any(inner == name or inner.startswith(f"{name}." if name else "") for inner, _ in recorded):
            return
        had_finite_inputs = not _has_nonfinite(inputs)
        if had_finite_inputs or not recorded:
            recorded.append((name, had_finite_inputs))

    def _record_gradient_at(self, name: str, gradient: torch.Tensor) -> None:
        if self._records.gradients_at is None and _has_nonfinite(gradient):
            self._records.gradients_at = name

    def _hook_parameter(self, name: str, parameter: torch.Tensor) -> None:
        if not parameter.requires_grad or id(parameter) in self._hooked:
            return
        self._hooked[id(parameter)] = parameter

        def note(gradient: torch.Tensor) -> None:
            if name not in self._records.gradients_of and _has_nonfinite(gradient):
                self._records.gradients_of.append(name)

        handle: RemovableHandle = parameter.register_hook(note)  # type: ignore[no-untyped-call]
        self._handles.append(handle)

    def on_loss(self, optimizer: Any, loss: Any, num_items: float | None) -> None:
        self._check_loss(optimizer, loss)

    def on_remote_loss(self, optimizer: Any) -> None:
        self._check_loss(optimizer, None)

    def _check_loss(self, optimizer: Any, loss: torch.Tensor | None) -> None:
        if self._optimizer is not None and optimizer is not self._optimizer:
            return
        value = 0.0 if loss is None else float(loss.detach())
        modules, self._records.modules = self._records.modules, []
        if not any_rank([not math.isfinite(value)])[0]:
            return
        self._records = _Records()  # a pipeline's backward has finished when the loss is known
        names = {self._model.logical_name(name) for name, _ in self._model.named_parameters()}
        nonfinite = [part.name for part in self._model.tensor_slices() if _has_nonfinite(part.tensor)]
        report = {
            "loss": None if math.isfinite(value) else str(value),
            "modules": modules,
            "parameters": list(dict.fromkeys(name for name in nonfinite if name in names)),
        }
        text = _format_loss(_all_gather_reports(report))
        self._report(optimizer, text, skips_step=optimizer.loss_scaler is not None)

    def on_gradients(self, optimizer: Any, named: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        if self._optimizer is not None and optimizer is not self._optimizer:
            return
        notes, self._records = self._records, _Records()
        has_scale = optimizer.loss_scaler is not None
        held = [name for name, gradient in named() if any_nonfinite([gradient])]
        found = optimizer.accumulation.found_nonfinite if has_scale else any_rank([len(held) > 0])[0]
        if not found:
            return
        report = {"held": held, "gradients_of": notes.gradients_of, "gradients_at": notes.gradients_at}
        text = _format_gradients(_all_gather_reports(report))
        if not has_scale:
            self._report(optimizer, f"{text}. {_ABOUT_GRADIENTS}")
            return
        scale = optimizer.loss_scaler.scale
        get_dist_logger("booster").warning(f"{text}. The step with loss scale {scale:g} is skipped", ranks=[0])

    def _report(self, optimizer: OptimizerWrapper, text: str, *, skips_step: bool = False) -> None:
        if self._raises:
            # Ends the accumulation, so that zero_grad() clears the gradients.
            optimizer.restore_accumulation(replace(optimizer.accumulation, has_stepped=True), 0)
            raise NonfiniteError(f"{text}. {_RAISED}")
        get_dist_logger("booster").warning(text if skips_step else f"{text}. {_LOGGED}", ranks=[0])


@torch.no_grad()
def _has_nonfinite(tree: Any) -> bool:
    return any(_is_nonfinite(tensor.detach()) for tensor in map(_local_values, iter_tensors(tree)))


def _local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local values of a tensor that represents those of several ranks. No communication."""
    for name in ("local", "_local_tensor"):  # vocab-parallel logits; DTensor
        held = getattr(tensor, name, None) if type(tensor) is not torch.Tensor else None
        if isinstance(held, torch.Tensor):
            return held
    return tensor


def _is_nonfinite(tensor: torch.Tensor) -> bool:
    if tensor.is_sparse:
        tensor = tensor._values()
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if tensor.dtype.itemsize == 1:  # float8 has no isfinite
        tensor = tensor.float()
    return not bool(torch.isfinite(tensor).all())


def _all_gather_reports(report: Any) -> list[Any]:
    payloads, owners = all_gather_bytes(json.dumps(report).encode())
    return [json.loads(payloads[owner]) for owner in owners]


_ABOUT_LOSSES = "Check the computation of that module with such inputs, and the batch"
_ABOUT_PARAMETERS = "Restart from a checkpoint, as parameters are not finite"
_ABOUT_GRADIENTS = (
    "Check the computation on that output (a root or a norm of zero, a quotient, an exponential), or lower the learning"
    " rate"
)
_RAISED = "Nothing was updated; to continue without this step, call optimizer.zero_grad()"
_LOGGED = "The run continues, and a step with this makes the parameters inf or nan, too"


def _format_loss(reports: Sequence[Mapping[str, Any]]) -> str:
    losses = [f"{one['loss']} on rank {rank}" for rank, one in enumerate(reports) if one["loss"] is not None]
    lines = [
        f"the loss is not finite after {current_progress().num_steps} steps: {', '.join(losses)} of {len(reports)}"
    ]
    notes = {rank: one["modules"] for rank, one in enumerate(reports) if one["modules"]}
    for rank, modules in notes.items():
        named, *others = [_format_module(*one) for one in modules]
        lines.append(f"on rank {rank} the first module with an output that is not finite was {named}")
        if others:
            lines.append(f"after it {', '.join(others)}")
    if not notes:
        lines.append("the outputs of all modules were finite, so the criterion computed it")
    names = list(dict.fromkeys(name for one in reports for name in one["parameters"]))
    lines.append(f"parameters that are not finite: {_format_names(names)}")
    return f"{'; '.join(lines)}. {_ABOUT_PARAMETERS if names else _ABOUT_LOSSES}"


def _format_module(name: str, had_finite_inputs: bool) -> str:
    inputs = "inputs were finite" if had_finite_inputs else "inputs were not finite either"
    return f"{name!r} (its {inputs})" if name else f"the model itself (its {inputs})"


def _format_gradients(reports: Sequence[Mapping[str, Any]]) -> str:
    held = list(dict.fromkeys(name for one in reports for name in one["held"]))  # what they update with
    lines = [f"gradients are not finite after {current_progress().num_steps} steps: those of {_format_names(held)}"]
    produced = [(rank, one["gradients_of"], one["gradients_at"]) for rank, one in enumerate(reports)]
    produced = [one for one in produced if one[1] or one[2] is not None]
    for rank, names, module in produced:
        output = f"the output of {module!r}" if module else "the model's output"
        first = "" if module is None else f", first at {output}"
        lines.append(f"rank {rank} computed nonfinite gradients of {_format_names(names)}{first}")
    if not produced:
        lines.append(
            "the gradients of each rank were finite: their sum over the ranks was too large, or a hook has changed them"
        )
    return "; ".join(lines)


def _format_names(names: Sequence[str]) -> str:
    return format_list(map(repr, names), _MAX_NAMES) or "none"
