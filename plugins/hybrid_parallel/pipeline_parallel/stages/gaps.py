"""Positions (gaps) of modules outside of the layer chain: by order of registration, unless known otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

__all__ = ["containers_of", "find_gaps", "holds_parameters", "outside_of"]


def find_gaps(model: nn.Module, units: tuple[str, ...], known: Mapping[str, int | None]) -> dict[str, int]:
    """Return the gaps of the outermost modules with parameters and without layers of the chain.

    Args:
        model: The user's model.
        units: Layers, as in `StagePlan`.
        known: Gaps of modules with a known order of execution, or None for a module that runs in several gaps.
    """
    index = {name: number for number, name in enumerate(units)}
    containers = containers_of(units)
    # A further name of a layer or of a container of layers has no gap.
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
    """Return the names of all modules that contain layers of the chain, with the full model ("")."""
    parts = [name.split(".") for name in units]
    return frozenset(".".join(one[:length]) for one in parts for length in range(len(one)))


def outside_of(name: str, containers: frozenset[str]) -> str:
    """Return the outermost parent of a module that contains no layer of the chain."""
    parts = name.split(".")
    paths = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return next((path for path in paths if path not in containers), name)


def holds_parameters(module: nn.Module) -> bool:
    """Return whether a module or a submodule has parameters."""
    return any(True for _ in module.parameters())


def _outermost(
    module: nn.Module, name: str, index: Mapping[str, int], containers: frozenset[str]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield layers and the outermost modules without layers, in order of registration, but layers as they run."""
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
