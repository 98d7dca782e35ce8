"""Execution sequences: modules and functions that replace the model's own forward."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.stage_plan import StagePlan, parameters_below

__all__ = ["plan_of_sequence"]


def plan_of_sequence(model: nn.Module, sequence: Sequence[str | Callable[..., Any]]) -> StagePlan:
    """Return the stage plan of an execution sequence, whose layers are its modules.

    Functions run on the stage of the module before them, leading ones on that of the first module.

    Raises:
        ConfigError: It has no modules, unknown, repeated or nested ones, or it leaves out parameters.
    """
    if isinstance(sequence, str) or not all(isinstance(step, str) or callable(step) for step in sequence):
        raise ConfigError(
            f"execution_sequence={sequence!r} is no list of names of modules and functions: give such as"
            " ['embedding', 'layers.0', 'layers.1', torch.tanh, 'head']"
        )
    _check_steps(model, sequence)
    units = tuple(step for step in sequence if isinstance(step, str))
    _check_names(model, units)
    _check_complete(model, units)
    return StagePlan(layers=units, source="the execution sequence that was given", sequence=tuple(sequence))


def _check_steps(model: nn.Module, sequence: Sequence[str | Callable[..., Any]]) -> None:
    names = {id(module): name for name, module in model.named_modules()}
    for step in sequence:
        if isinstance(step, nn.Module):
            name = names.get(id(step))
            what = f"of the model: write its name, {name!r}" if name else "that is not in the model: put it in there"
            raise ConfigError(
                f"execution_sequence has a module itself ({type(step).__name__}) {what}, since each stage keeps only"
                " modules that are named"
            )


def _check_names(model: nn.Module, units: tuple[str, ...]) -> None:
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    if not units:
        raise ConfigError(
            "execution_sequence has no names of modules, so there is nothing to divide over stages: name the model's"
            f" modules in the order in which they run, such as {known[:3]!r}"
        )
    for name in units:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "take a name of model.named_modules()"
            raise ConfigError(f"execution_sequence names {name!r}, but the model has no such module: {hint}")
    if repeated := [name for name in dict.fromkeys(units) if units.count(name) > 1]:
        raise ConfigError(
            f"execution_sequence names {', '.join(map(repr, repeated))} more than once, but a module runs on one stage"
            " only: name each once (and give a second place a module of its own)"
        )
    for name in units:
        if around := next((other for other in units if name.startswith(f"{other}.")), None):
            raise ConfigError(
                f"execution_sequence names {name!r} and {around!r}, which holds it: name the one or the other"
            )


def _check_complete(model: nn.Module, units: tuple[str, ...]) -> None:
    held = {id(parameter) for name in units for _, parameter in parameters_below(model, name)}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if missing:
        owners = list(dict.fromkeys(name.rpartition(".")[0] or f"the model's own {name}" for name in missing))
        shown = ", ".join(owners[:5]) + (f" and {len(owners) - 5} more" if len(owners) > 5 else "")
        raise ConfigError(
            f"execution_sequence leaves out modules with parameters ({shown}), which no stage would hold: add their"
            " names where they run, or remove them from the model"
        )
