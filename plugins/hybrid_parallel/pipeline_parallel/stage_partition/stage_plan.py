"""Stage plans: the modules between which a model may be split, and the positions of all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .tracing import containers_of

# Note [Layers and gaps]
# *Units* are the modules after which a chunk may end, usually the layers of a transformer. They run in sequence, and a
# unit depends on earlier ones only through the output of the previous one. Any other module has a *gap*: the number of
# units that run before it, 0 before the first and len(units) after the last. Modules that contain units have no gap.
# Their direct parameters are *shared*, on all stages, as are those of a module that runs in several gaps. Modules
# without parameters are on all stages, too, and are not listed.
# The output of a *carried* module is needed after later units, and is sent on from chunk to chunk.


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Possible splits of a model into chunks; see Note [Layers and gaps].

    Attributes:
        layers: Names of the layers, in order of execution.
        gaps: Gaps of the outermost modules with parameters and without units; a module with two names has two entries.
        skip_outputs: Modules whose output is sent to later chunks, and the gap at which it is complete.
        source: Description of the plan's source.
        sequence: Names of modules, and functions, that replace the model's forward, each applied to the output of the
            previous one; optional, by default the forward runs.
        bounds: Bounds of the user's split: position p has the units bounds[p] to bounds[p + 1] - 1; optional.
        overwrites_embeddings: Whether the forward changes the output of a module before the layers in place.
    """

    layers: tuple[str, ...]
    gaps: Mapping[str, int] = field(default_factory=dict)
    skip_outputs: Mapping[str, int] = field(default_factory=dict)
    source: str = ""
    sequence: tuple[str | Callable[..., Any], ...] | None = None
    bounds: tuple[int, ...] | None = None
    overwrites_embeddings: bool = False

    def __post_init__(self) -> None:
        places = self.places.keys()
        nested = [name for name in places if places & containers_of((name,))]
        outside = [name for name, gap in {**self.gaps, **self.skip_outputs}.items() if not 0 <= gap <= len(self.layers)]
        assert self.layers, "no units"
        assert len(set(self.layers)) == len(self.layers), f"units twice: {self.layers}"
        assert not nested, f"in another unit or gap module: {nested}"
        assert not outside, f"gaps outside of 0 to {len(self.layers)}: {outside}"

    @property
    def places(self) -> dict[str, int]:
        """Gap of each gap module, and the gap before each layer, by name."""
        return {**{name: index for index, name in enumerate(self.layers)}, **self.gaps}


def listed(names: Sequence[str]) -> str:
    """Return names as text, abbreviated if there are more than six."""
    return ", ".join(names if len(names) <= 6 else [*names[:3], "...", *names[-2:]])


def parameters_below(module: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a named module, with all their names in the full model."""
    found = module.get_submodule(name).named_parameters(remove_duplicate=False)
    return [(f"{name}.{key}" if name else key, parameter) for key, parameter in found]


def shared_parameter_names(model: nn.Module, plan: StagePlan) -> tuple[str, ...]:
    """Return the names of the parameters on every stage: those outside of units and gap modules.

    A tied parameter is listed only under its names outside of units and gap modules.
    """
    # Another name for a unit, or for a module around units, leads to parameters that have their place already.
    placed = {id(module) for name in plan.places for module in model.get_submodule(name).modules()}
    names: list[str] = []
    for name, module in model.named_modules():
        if id(module) not in placed:
            names.extend(f"{name}.{key}" if name else key for key, _ in module.named_parameters(recurse=False))
    return tuple(names)
