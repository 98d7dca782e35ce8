"""Exceptions of the library for problems that its user can fix."""

from __future__ import annotations


class BoosterError(Exception):
    """Base of all errors of this library. Messages state what was given, why it fails, and what to write instead."""


class ConfigError(BoosterError, ValueError):
    """Invalid call or setting. Raised before anything is allocated, wrapped or written."""


class CheckpointError(BoosterError):
    """Checkpoint that cannot be written, is missing, or is damaged. The model and older files are unchanged."""


class DesyncError(BoosterError):
    """Ranks differ where they must be equal: the message names them and the first difference."""


class RankFailedError(BoosterError):
    """Another rank failed, is missing or too late: the message names it and its last progress."""


class NonfiniteError(BoosterError):
    """Loss or gradient with inf or nan on some rank: the message names its origin. Nothing was updated."""
