"""Finds the gap of every module outside of units: by the order of registration, where nothing else is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

__all__ = ["containers_of", "find_gaps", "holds_parameters", "outside_of"]


def find_gaps(model: nn.Module, units: tuple[str, ...], known: Mapping[str, int | None]) -> dict[str, int]:
    """Returns the gaps of the outermost modules that hold parameters and no unit.

    Args:
        model: The user's.
        units: See `StagePlan`.
        known: Gaps of modules of which the order of execution is known; None: of one that runs in several.
    """
    index = {name: number for number, name in enumerate(units)}
    containers = containers_of(units)
    # A second name of a unit or of a module around units is no module of a gap.
    placed = {id(model.get_submodule(name)) for name in (*units, *containers)}
    gaps: dict[str, int] = {}
    reached = 0
    for name, module in _outermost(model, "", index, containers):
        if name in index:
            reached = index[name] + 1
        elif id(module) not in placed and holds_parameters(module):
            gap = known.get(name, reached)
            if gap is not None:
                gaps[name] = gap
    return gaps


def containers_of(units: tuple[str, ...]) -> frozenset[str]:
    """Returns the names of all modules that hold units, the whole model ("") among them."""
    parts = [name.split(".") for name in units]
    return frozenset(".".join(one[:length]) for one in parts for length in range(len(one)))


def outside_of(name: str, containers: frozenset[str]) -> str:
    """Returns the outermost module on the way to one that holds no unit."""
    parts = name.split(".")
    paths = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return next((path for path in paths if path not in containers), name)


def holds_parameters(module: nn.Module) -> bool:
    """Returns whether a module, or one in it, has parameters."""
    return any(True for _ in module.parameters())


def _outermost(
    module: nn.Module, name: str, index: Mapping[str, int], containers: frozenset[str]
) -> Iterator[tuple[str, nn.Module]]:
    """Yields units and the outermost modules without any, in order: that of registration, but units as they run."""
    children = [
        (f"{name}.{key}" if name else key, child) for key, child in module._modules.items() if child is not None
    ]
    with_units = [one for one in children if one[0] in containers or one[0] in index]
    ordered = iter(sorted(with_units, key=lambda one: _first_unit(one[0], index)))
    for own in children:
        full, child = next(ordered) if own in with_units else own
        if full in containers:
            yield from _outermost(child, full, index, containers)
        else:
            yield full, child


def _first_unit(name: str, index: Mapping[str, int]) -> int:
    return min(number for unit, number in index.items() if unit == name or unit.startswith(f"{name}."))
