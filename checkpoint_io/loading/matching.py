"""Matching of stored tensors with a model's slices. Pure functions."""

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
    """Stored tensor for each slice, and the mismatches.

    Attributes:
        sources: Stored name by slice name, for slices that can be filled.
        duplicates: Further stored names of a tied tensor, by the stored name that is used.
        missing: Names of the model that are not in the checkpoint.
        unexpected: Names of the checkpoint that are not in the model.
        differing: One line per name whose shape or dtype does not match.
    """

    sources: dict[str, str] = field(default_factory=dict)
    duplicates: dict[str, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def check(self, where: str, *, strict: bool) -> None:
        """Raise one error that lists all mismatches.

        Args:
            where: Name of the checkpoint for messages.
            strict: If False, raise only if no tensor matches.

        Raises:
            CheckpointError: There are mismatches or, with `strict=False`, no matches.
        """
        wants_any = bool(self.missing or self.differing)
        if strict and (wants_any or self.unexpected):
            advice = "Load it into the model that it was saved from, or pass strict=False to load only what fits"
            raise CheckpointError(f"{where} does not fit the model, so nothing was loaded:{self.listing()}\n{advice}")
        if not self.sources and (wants_any or self.unexpected):
            raise CheckpointError(f"no tensor of {where} fits the model, so nothing was loaded:{self.listing()}")

    def listing(self) -> str:
        """Format all mismatches, one per line; empty if there are none."""
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
    """Match stored tensors with slices.

    Args:
        specs: Dtypes and shapes of the stored tensors.
        slices: Slices of the model on this rank, by the first name of each tensor; a tensor may have several slices.
        tied: Further names of the same memory, which match as well; the first name takes precedence.
        wanted_by_all: Names that the model has on any rank; these are not unexpected. Optional, defaults to those of
            `slices`.
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
    """Return whether a load may convert: any float to any float, other dtypes only if lossless."""
    if stored == wanted or (stored.is_floating_point and wanted.is_floating_point):
        return True
    kinds = {_format_kind(stored), _format_kind(wanted)}
    # promote_types supports no unsigned dtype but uint8; all others count as lossy.
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
