"""Text output of `booster ckpt`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from booster.checkpoint_io.inspecting.comparison import Comparison
    from booster.checkpoint_io.inspecting.part_verification import VerifiedPart

__all__ = ["comparison_lines", "count_text", "escape_control", "inspection_lines", "size_text", "verified_text"]

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size_text(num_bytes: float) -> str:
    """Format a size with a decimal unit."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes /= 1000
        unit += 1
    return f"{num_bytes:.0f} {_UNITS[unit]}" if unit == 0 else f"{num_bytes:.2f} {_UNITS[unit]}"


def count_text(count: int, noun: str) -> str:
    """Format a count and its noun, in the plural unless it is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def escape_control(text: str) -> str:
    """Escape text from a file that contains control characters."""
    return text if text.isprintable() else repr(text)


def inspection_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of `booster ckpt inspect`.

    Args:
        found: Path of the checkpoint, result of `describe_training` or None, and results of `describe` for all parts.
    """
    yield found["path"]
    training = found["training_state"]
    metadata = {} if training is None else training["facts"]
    if training is not None:
        yield from _rows(metadata)
        yield from _rows({key: value for key, value in training.items() if key != "facts"})
    for part in found["parts"]:
        yield ""
        yield from _part_lines(part, {key: value for key, value in part["facts"].items() if key not in metadata})


def verified_text(found: VerifiedPart) -> str:
    """Return the summary of a verified part."""
    what = f"{count_text(found.num_tensors, 'tensor')} in {count_text(found.num_files, 'file')}"
    if found.has_checksums:
        return f"{what}, {size_text(found.num_bytes)}: files, sizes, structure, tiling and checksums are right"
    return (
        f"{what}, {size_text(found.num_bytes)}: files, sizes and structure are right; no checksums were recorded, so"
        " the elements were not checked"
    )


def comparison_lines(found: Comparison) -> Iterator[str]:
    """Yield a line for each difference between two sets of tensors."""
    yield from (f"  only in A: {escape_control(name)}" for name in found.only_left)
    yield from (f"  only in B: {escape_control(name)}" for name in found.only_right)
    for name, (left, right) in found.shapes.items():
        yield f"  {escape_control(name)}: shape {list(left)} != {list(right)}"
    for name in dict.fromkeys((*found.dtypes, *found.elements)):
        yield f"  {escape_control(name)}: {'; '.join(_tensor_differences(found, name))}"


def _tensor_differences(found: Comparison, name: str) -> Iterator[str]:
    if name in found.dtypes:
        left, right = (str(dtype).removeprefix("torch.") for dtype in found.dtypes[name])
        yield f"dtype {left} != {right}"
    if name in found.elements:
        part = found.elements[name]
        yield f"{part.num_differing} of {part.num_elements} elements differ, by at most {part.max_difference:g}"


def _part_lines(part: Mapping[str, Any], metadata: Mapping[str, Any]) -> Iterator[str]:
    label = f"{part['folder']}/{part['kind']}".lstrip("/") + (f" ({part['variant']})" if part["variant"] else "")
    dtypes = ", ".join(f"{name} x {count}" for name, count in part["dtypes"].items())
    yield (
        f"{label}: {count_text(part['num_tensors'], 'tensor')}, {count_text(part['num_elements'], 'element')},"
        f" {size_text(part['num_bytes'])}"
    )
    checksums = "recorded" if part["checksums"] else "none recorded"
    yield from _rows({"dtypes": dtypes, "checksums": checksums, **metadata})
    yield from _optimizer_lines(part["optimizer"])
    yield "  files:"
    for file in part["files"]:
        yield f"    {file['name']}  {size_text(file['num_bytes'])}  {count_text(file['num_tensors'], 'tensor')}"
    if part["tensors"]:
        yield "  tensors:"
        yield from _tensor_lines(part["tensors"], with_file=len(part["files"]) > 1)


def _rows(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if value not in (None, "", [], [""]):
            yield f"  {key:<12} {_value_text(value)}"


def _optimizer_lines(optimizer: Mapping[str, Any] | None) -> Iterator[str]:
    if optimizer is None:
        return
    yield f"  {'optimizer':<12} {optimizer['class']}, {count_text(optimizer['num_skipped_steps'], 'skipped step')}"
    if optimizer["loss_scaler"] is not None:
        yield f"  {'loss_scaler':<12} {_value_text(optimizer['loss_scaler'])}"
    for index, group in enumerate(optimizer["param_groups"]):
        values = ", ".join(f"{key}={_value_text(value)}" for key, value in group.items() if key != "params")
        yield f"  {f'group {index}':<12} {count_text(len(group['params']), 'parameter')}: {values}"


def _tensor_lines(tensors: Sequence[Mapping[str, Any]], *, with_file: bool) -> Iterator[str]:
    rows = [(escape_control(tensor["name"]), tensor["dtype"], str(tensor["shape"])) for tensor in tensors]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for tensor, columns in zip(tensors, rows, strict=True):
        row = "  ".join(f"{text:<{width}}" for text, width in zip(columns, widths, strict=True))
        file = f"  {tensor['file']}" if with_file else ""
        yield f"    {row}  {size_text(tensor['num_bytes']):>9}{file}"


def _value_text(value: Any) -> str:
    if isinstance(value, dict) and not any(key.startswith("$") for key in value):
        return ", ".join(f"{key} {_value_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_value_text(item) for item in value)
    if isinstance(value, dict) and set(value) == {"$tuple"}:  # encoding of json_values
        return f"({', '.join(_value_text(item) for item in value['$tuple'])})"
    return escape_control(value) if isinstance(value, str) else json.dumps(value)
