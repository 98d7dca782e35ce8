"""Strategies found for a model and a machine: how layers are placed on ranks."""

from .placements import PlacementSolution, convert_layout, find_conversion, solve_placements

__all__ = ["PlacementSolution", "convert_layout", "find_conversion", "solve_placements"]
