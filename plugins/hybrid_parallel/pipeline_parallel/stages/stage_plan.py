"""What a plan of stages says: between which modules a model may be cut, and where all others run. Data only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

__all__ = ["StagePlan", "parameters_below", "shared_parameter_names"]

# Note [Units and gaps]
# *Units* are the modules between two of which a piece of the model may end, usually the layers of a transformer. They
# run one after the other, and all that a unit needs of those before is the output of the last one. A module outside of
# them has a *gap*: the number of units that have run before it, so 0 is before the first and len(units) after the last.
# Modules that hold units can't be in a gap, since they are half run: the parameters that they hold themselves are
# *shared*, held by all stages, as are those of a module that runs in several gaps. Modules without parameters are held
# by all stages, too, and are not listed.
# What a *carried* module returns is needed in places behind later units: its output travels on from piece to piece.


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Where a model may be cut into pieces, and what belongs to which; see Note [Units and gaps].

    Attributes:
        units: Names of modules, in the order in which they run.
        gaps: The outermost modules without units that hold parameters, and their gaps. A module with two names is here
            with both, each at its place.
        carried: Modules whose output travels on, and the gap at which it is complete.
        source: Where the plan comes from, as a sentence.
        sequence: What takes the place of the model's own forward: names of modules and functions, each of which gets
            what the one before returns; None: the forward stays.
        bounds: Position p has the units bounds[p] to bounds[p + 1] - 1, by the user's split; None: not said.
    """

    units: tuple[str, ...]
    gaps: Mapping[str, int] = field(default_factory=dict)
    carried: Mapping[str, int] = field(default_factory=dict)
    source: str = ""
    sequence: tuple[str | Callable[..., Any], ...] | None = None
    bounds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        places = set(self.units) | set(self.gaps)
        nested = [name for name in places for other in _parents(name) if other in places]
        outside = [name for name, gap in {**self.gaps, **self.carried}.items() if not 0 <= gap <= len(self.units)]
        assert self.units, "no units"
        assert len(set(self.units)) == len(self.units), f"units twice: {self.units}"
        assert not nested, f"in another unit or gap module: {nested}"
        assert not outside, f"gaps outside of 0 to {len(self.units)}: {outside}"


def parameters_below(module: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters of the module of a name, with their names in the whole model, each name of one."""
    found = module.get_submodule(name).named_parameters(remove_duplicate=False)
    return [(f"{name}.{key}" if name else key, parameter) for key, parameter in found]


def shared_parameter_names(model: nn.Module, plan: StagePlan) -> tuple[str, ...]:
    """Returns the names of the parameters that every stage holds: those in no unit and in no module of a gap.

    A parameter that is also in a unit or a gap under another name (a tied one) is here only under the name that isn't.
    """
    places = (*plan.units, *plan.gaps)
    # Another name for a unit, or for a module around units, leads to parameters that have their place already.
    placed = {id(module) for name in places for module in model.get_submodule(name).modules()}
    names: list[str] = []
    for name, module in model.named_modules():
        if id(module) not in placed:
            names.extend(f"{name}.{key}" if name else key for key, _ in module.named_parameters(recurse=False))
    return tuple(names)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
