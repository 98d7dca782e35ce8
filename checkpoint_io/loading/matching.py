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

    def check(self, source_name: str, *, strict: bool) -> None:
        """Raise one error that lists all mismatches.

        Args:
            source_name: Name of the checkpoint for messages.
            strict: If False, raise only if no tensor matches.

        Raises:
            CheckpointError: There are mismatches or, with `strict=False`, no matches.
        """
        has_unfilled = bool(self.missing or self.differing)
        if strict and (has_unfilled or self.unexpected):
            advice = "Load it into the model that it was saved from, or pass strict=False to load only what fits"
            raise CheckpointError(
                f"{source_name} does not fit the model, so nothing was loaded:{self.format_mismatches()}\n{advice}"
            )
        if not self.sources and (has_unfilled or self.unexpected):
            raise CheckpointError(
                f"no tensor of {source_name} fits the model, so nothing was loaded:{self.format_mismatches()}"
            )

    def format_mismatches(self) -> str:
        """Format all mismatches, one per line; empty if there are none."""
        mismatches = {
            "missing in the checkpoint": self.missing,
            "not in the model": self.unexpected,
            "differing": self.differing,
        }
        return "".join(
            f"\n  {len(names)} {title}:{_format_names(names)}" for title, names in mismatches.items() if names
        )


def match_names(
    specs: Mapping[str, TensorSpec],
    slices: Sequence[TensorSlice],
    tied: Mapping[str, Sequence[str]],
    names_of_all_ranks: Collection[str] | None = None,
) -> Match:
    """Match stored tensors with slices.

    Args:
        specs: Dtypes and shapes of the stored tensors.
        slices: Slices of the model on this rank, by the first name of each tensor; a tensor may have several slices.
        tied: Further names of the same memory, which match as well; the first name takes precedence.
        names_of_all_ranks: Names that the model has on any rank; these are not unexpected. Optional, defaults to those of
            `slices`.
    """
    match = Match()
    known = set(names_of_all_ranks or ())
    for tensor_slice in {tensor_slice.name: tensor_slice for tensor_slice in slices}.values():
        names = (tensor_slice.name, *tied.get(tensor_slice.name, ()))
        known.update(names)
        stored = [name for name in names if name in specs]
        problems = {name: line for name in stored if (line := _mismatch(name, specs[name], tensor_slice)) is not None}
        matching = [name for name in stored if name not in problems]
        match.differing.extend(problems.values())
        if not stored:
            match.missing.append(tensor_slice.name)
        if matching:
            match.sources[tensor_slice.name] = matching[0]
        if len(matching) > 1:
            match.duplicates[matching[0]] = matching[1:]
    match.unexpected.extend(name for name in specs if name not in known)
    return match


def can_convert(stored: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a load may convert: any float to any float, other dtypes only if lossless."""
    if stored == target or (stored.is_floating_point and target.is_floating_point):
        return True
    kinds = {_dtype_category(stored), _dtype_category(target)}
    # promote_types supports no unsigned dtype but uint8; all others count as lossy.
    return kinds == {"integer"} and torch.promote_types(stored, target) == target


def _mismatch(name: str, spec: TensorSpec, tensor_slice: TensorSlice) -> str | None:
    if spec.shape != tensor_slice.global_shape:
        return f"{name!r} has shape {spec.shape} in the checkpoint, {tensor_slice.global_shape} in the model"
    if not can_convert(spec.dtype, tensor_slice.dtype):
        return f"{name!r} is {spec.dtype} in the checkpoint, {tensor_slice.dtype} in the model"
    return None


def _dtype_category(dtype: torch.dtype) -> str:
    if dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        return "integer"
    return str(dtype)


def _format_names(names: Sequence[str]) -> str:
    text = "".join(f"\n    {name}" for name in names[:MAX_LISTED])
    return f"{text}\n    ... and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else text
