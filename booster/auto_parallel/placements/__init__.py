"""Placements inside of layers: chosen by an integer program, and converted by the cheapest collectives."""

from .layout_conversion import ConversionStep, LayoutConversion, convert_layout, find_conversion
from .solver import ModuleChoice, PlacementSolution, solve_placements

__all__ = [
    "ConversionStep",
    "LayoutConversion",
    "ModuleChoice",
    "PlacementSolution",
    "convert_layout",
    "find_conversion",
    "solve_placements",
]
