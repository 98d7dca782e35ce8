"""Exceptions of the library for problems that its user can fix, and the text of their messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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


def add_note(error: BaseException, note: str) -> None:
    """Add a line below an error's text. Python 3.10 has no notes: there it becomes part of the text."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1:
        error.args = (f"{error.args[0]}\n{note}",)
    else:
        error.args = (*error.args, note)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, "" if it has none."""
    return str(error).strip().partition("\n")[0].rstrip()


def format_list(items: Iterable[object], limit: int = 10) -> str:
    """Return the first items as text, and the number of further ones: "a, b and 3 more"."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:limit]) + (f" and {len(texts) - limit} more" if len(texts) > limit else "")


def format_ranks(ranks: Sequence[int], limit: int = 10) -> str:
    """Return ranks as text: "rank 1", or "ranks 1, 2 and 3 more"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_list(ranks, limit)}"


def incomplete_error(name: str, error: str) -> CheckpointError:
    """Return the error for a model or an optimizer that is neither what it was nor what it should be.

    Args:
        name: "model" or "optimizer".
        error: Why a load into it has failed halfway.
    """
    return CheckpointError(
        f"this {name} is incomplete, as a load into it has failed halfway: {error}. Load a checkpoint into it before"
        ' you use it or its model; with verify="before" a damaged checkpoint changes nothing'
    )
