"""Tries an optimizer out on whole parameters and on parts of them: the only way to know about a foreign class."""

from booster.plugins.sharding.probe.apart import find_tie
from booster.plugins.sharding.probe.trial import find_obstacle

__all__ = ["find_obstacle", "find_tie"]
