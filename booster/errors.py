"""Every exception that the library raises for something its user can change."""

from __future__ import annotations

__all__ = ["BoosterError", "CheckpointError", "ConfigError", "DesyncError", "NonfiniteError", "RankFailedError"]


class BoosterError(Exception):
    """Base of all errors of this library. Messages say what was given, why it can't work, and what to write instead."""


class ConfigError(BoosterError, ValueError):
    """A call or a setting that can't work. Raised before anything is allocated, wrapped or written."""


class CheckpointError(BoosterError):
    """A checkpoint that can't be written, found or trusted. Nothing of the model or of older files was changed."""


class DesyncError(BoosterError):
    """Ranks that should agree differ: the message names them and the first difference."""


class RankFailedError(BoosterError):
    """Another rank failed, is missing or too late: the message names it and what it was doing."""


class NonfiniteError(BoosterError):
    """A loss or a gradient is inf or nan on some rank: the message says where it came from. Nothing was updated."""
