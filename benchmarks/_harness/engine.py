"""What is compared: an engine is a name and a function that builds a training step."""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.distributed as dist

__all__ = ["CONTROL", "MEASURED", "NOT_INSTALLED", "Build", "Engine", "Step", "build_engine", "with_control"]

# step(i) trains on batch number i and returns this rank's loss, a tensor with one element or a number.
Step: TypeAlias = Callable[[int], "torch.Tensor | float"]
Build: TypeAlias = Callable[[], Step]

CONTROL = " (control)"
MEASURED = "measured"
NOT_INSTALLED = "not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One variant to do the same training step.

    Attributes:
        name: How tables and files call it.
        build: A module's function, or a `functools.partial` of one, that returns the step. It is called on every rank,
            in a process that started for this run, with the default process group initialised if the run has one.
            It must seed what it draws, so that engines start from the same weights.
        requires: Modules to import before it is built, and before its memory is measured.
        is_optional: A peer: a run without it is a good run where a required module is not installed.
    """

    name: str
    build: Build
    requires: tuple[str, ...] = ()
    is_optional: bool = False

    @property
    def is_control(self) -> bool:
        """True for the second copy of the baseline."""
        return self.name.endswith(CONTROL)


def with_control(engines: Sequence[Engine]) -> list[Engine]:
    """Returns the engines with a second copy of the first: how far it is from the baseline is the noise.

    Raises:
        ValueError: No engine, or two of one name.
    """
    if not engines:
        raise ValueError("there is nothing to measure: give at least one engine, the baseline first")
    names = [engine.name for engine in engines]
    if len(set(names)) < len(names):
        raise ValueError(f"two engines have the same name: {names}. Give every engine a name of its own")
    return [engines[0], replace(engines[0], name=engines[0].name + CONTROL), *engines[1:]]


def build_engine(engine: Engine) -> tuple[Step | None, str]:
    """Builds on this rank; returns the step, and how it went: MEASURED, NOT_INSTALLED or the traceback.

    Collective: every rank gets the same answer, and no step where it failed on any of them.
    """
    missing = _missing_module(engine.requires)
    if missing is not None:
        # All ranks run in one environment, so they all come here.
        return None, NOT_INSTALLED if engine.is_optional else f"{engine.name} needs {missing}, which is not installed"
    try:
        step = _import_and_build(engine)
        problem = None
    except Exception:  # whatever a foreign library raises belongs into the report, where it fails the run
        step, problem = None, traceback.format_exc()
    problem = _agree(problem)
    return (step, MEASURED) if problem is None else (None, problem)


def _missing_module(modules: Sequence[str]) -> str | None:
    # Only the top-level package: what is broken inside of an installed one is an error, not an absence.
    return next((name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is None), None)


def _import_and_build(engine: Engine) -> Step:
    for module in engine.requires:
        importlib.import_module(module)
    return engine.build()


def _agree(problem: str | None) -> str | None:
    """Returns the first rank's problem on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return problem
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((found for found in problems if found is not None), None)
