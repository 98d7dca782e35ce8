"""Compares what a checkpoint holds with what a model wants, before anything is written; a pure function."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from booster.errors import CheckpointError
from booster.interface import TensorSlice, TensorSpec

__all__ = ["Match", "can_convert", "match_names"]

MAX_LISTED = 10


@dataclass(slots=True, kw_only=True)
class Match:
    """Which stored tensor fills which slice, and what does not fit.

    Attributes:
        sources: Stored name for every slice's name that can be filled.
        duplicates: Further stored names of a tied tensor, by the stored name that is taken.
        missing: Names of the model that the checkpoint lacks.
        unexpected: Names of the checkpoint that the model lacks.
        differing: One line for every name whose shape or number format does not fit.
    """

    sources: dict[str, str] = field(default_factory=dict)
    duplicates: dict[str, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def check(self, where: str, *, strict: bool) -> None:
        """Raises one error that lists all that does not fit.

        Args:
            where: The checkpoint.
            strict: False raises only if nothing at all fits.

        Raises:
            CheckpointError: Something, or with `strict=False` everything, does not fit.
        """
        wants_any = bool(self.missing or self.differing)
        if strict and (wants_any or self.unexpected):
            advice = "Load it into the model that it was saved from, or pass strict=False to load only what fits"
            raise CheckpointError(f"{where} does not fit the model, nothing was loaded:{self.listing()}\n{advice}")
        if not self.sources and (wants_any or self.unexpected):
            raise CheckpointError(f"no tensor of {where} fits the model, nothing was loaded:{self.listing()}")

    def listing(self) -> str:
        """Returns lines with all that does not fit; empty where everything does."""
        parts = {
            "missing in the checkpoint": self.missing,
            "not in the model": self.unexpected,
            "differing": self.differing,
        }
        return "".join(f"\n  {len(names)} {title}:{_lines(names)}" for title, names in parts.items() if names)


def match_names(
    specs: Mapping[str, TensorSpec],
    slices: Sequence[TensorSlice],
    tied: Mapping[str, Sequence[str]],
    wanted_by_all: Collection[str] | None = None,
) -> Match:
    """Returns which stored tensor fills which slice.

    Args:
        specs: What the checkpoint holds.
        slices: What this rank's part of the model wants, by the first name of each tensor; of one tensor there may be
            several slices.
        tied: Further names of the same memory, which count as well; the first name goes first.
        wanted_by_all: Names that the model has on any rank, which are not unexpected; None: those of `slices`.
    """
    match = Match()
    known = set(wanted_by_all or ())
    for part in {part.name: part for part in slices}.values():
        names = (part.name, *tied.get(part.name, ()))
        known.update(names)
        stored = [name for name in names if name in specs]
        problems = {name: line for name in stored if (line := _difference(name, specs[name], part)) is not None}
        fitting = [name for name in stored if name not in problems]
        match.differing.extend(problems.values())
        if not stored:
            match.missing.append(part.name)
        if fitting:
            match.sources[part.name] = fitting[0]
        if len(fitting) > 1:
            match.duplicates[fitting[0]] = fitting[1:]
    match.unexpected.extend(name for name in specs if name not in known)
    return match


def can_convert(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Returns whether a load may convert: floats to the model's float format, all else only without loss."""
    if stored == wanted or (stored.is_floating_point and wanted.is_floating_point):
        return True
    kinds = {_format_kind(stored), _format_kind(wanted)}
    # promote_types knows no unsigned formats but uint8: anything else there counts as lossy.
    return kinds == {"integer"} and torch.promote_types(stored, wanted) == wanted


def _difference(name: str, spec: TensorSpec, part: TensorSlice) -> str | None:
    if spec.shape != part.global_shape:
        return f"{name!r} has shape {spec.shape} in the checkpoint, {part.global_shape} in the model"
    if not can_convert(spec.dtype, part.dtype):
        return f"{name!r} is {spec.dtype} in the checkpoint, {part.dtype} in the model"
    return None


def _format_kind(dtype: torch.dtype) -> str:
    if dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        return "integer"
    return str(dtype)


def _lines(names: Sequence[str]) -> str:
    shown = "".join(f"\n    {name}" for name in names[:MAX_LISTED])
    return f"{shown}\n    ... and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else shown
