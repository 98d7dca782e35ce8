"""Actions of `booster ckpt`: each takes the parsed arguments and returns the exit code."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from booster.checkpoint_io.formats.optimizer_values import parse_values
from booster.checkpoint_io.layout import MODEL, OPTIMIZER
from booster.checkpoint_io.loading.reader import StoredCheckpoint
from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.tools.convert import Conversion, consolidate, convert, export_optimizer
from booster.checkpoint_io.tools.diff import Comparison, compare_tensors, compare_values
from booster.checkpoint_io.tools.inspect import (
    CheckpointContents,
    StoredPart,
    VerifiedPart,
    describe,
    describe_training,
    find_contents,
    orphaned_shards,
    training_document,
    verify_documents,
    verify_part,
)
from booster.checkpoint_io.training_state.document import TrainingDocument
from booster.errors import CheckpointError, ConfigError

from .arguments import count_text, size_text


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
        texts = []
        if name in found.dtypes:
            dtypes = [str(dtype).removeprefix("torch.") for dtype in found.dtypes[name]]
            texts.append(f"dtype {dtypes[0]} != {dtypes[1]}")
        if name in found.elements:
            part = found.elements[name]
            number = f"{part.num_differing} of {part.num_elements} elements differ"
            texts.append(f"{number}, by at most {part.max_difference:g}")
        yield f"  {escape_control(name)}: {'; '.join(texts)}"


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


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _inspect(arguments: argparse.Namespace) -> int:
    storage = Storage()
    contents = find_contents(storage, arguments.path)
    described = []
    for part in contents.parts:
        with part.open(storage) as stored:
            described.append(describe(part, stored))
    document = training_document(storage, contents)
    found = {
        "path": str(contents.path),
        "training_state": None if document is None else describe_training(document),
        "parts": described,
    }
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    for line in inspection_lines(found):
        print(line)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    storage, start = Storage(), time.perf_counter()
    try:
        contents = find_contents(storage, arguments.path)
    except CheckpointError as error:
        print(f"DAMAGED: {error}")
        return 1
    damages: list[str] = []
    verified: list[VerifiedPart] = []
    for part in contents.parts:
        try:
            verified.append(verify_part(storage, part))
            print(f"{part.label}: {verified_text(verified[-1])}")
        except CheckpointError as error:
            damages.append(f"{part.label}: {error}")
    damages += _other_damages(storage, contents)
    for damage in damages:
        print(f"DAMAGED: {damage}")
    if not damages:
        print(_conclusion(contents, verified, time.perf_counter() - start))
    return 1 if damages else 0


def _other_damages(storage: Storage, contents: CheckpointContents) -> Iterator[str]:
    for name in orphaned_shards(storage, contents):
        yield f"{name} is a shard of a checkpoint without index and manifest. Use another copy, or remove it"
    try:
        num_documents = verify_documents(storage, contents)
    except CheckpointError as error:
        yield f"training state: {error}"
    else:
        if num_documents:
            print(f"training state: {count_text(num_documents, 'document')}: sizes and checksums are right")


def _conclusion(contents: CheckpointContents, verified: list[VerifiedPart], seconds: float) -> str:
    num_bytes = sum(found.num_bytes for found in verified if found.has_checksums)
    rate = f"{size_text(num_bytes)} in {seconds:.2f} s, {num_bytes / 1e9 / seconds:.2f} GB/s"
    if all(found.has_checksums for found in verified):
        return f"OK: {contents.path} is what was saved ({rate})"
    if num_bytes == 0:
        return f"OK in structure: {contents.path} has no checksums"
    return f"OK: {contents.path}; data with checksums is what was saved ({rate}), the rest is right in structure"


def _convert(arguments: argparse.Namespace) -> int:
    storage = Storage()
    conversion = Conversion(
        is_safetensors=None if arguments.format is None else arguments.format == "safetensors",
        size_per_shard=arguments.size_per_shard,
        dtype=None if arguments.dtype is None else _DTYPES[arguments.dtype],
        keeps_optimizer=not arguments.no_optimizer,
        overwrites=arguments.overwrite,
    )
    contents = find_contents(storage, arguments.source)
    for note in convert(storage, contents, Path(arguments.target), conversion):
        print(note)
    print(f"converted {contents.path} to {arguments.target}")
    return 0


def _consolidate(arguments: argparse.Namespace) -> int:
    storage = Storage()
    contents = find_contents(storage, arguments.source)
    part = contents.only_part(OPTIMIZER if arguments.optimizer else MODEL)
    consolidate(storage, contents, part, Path(arguments.target), overwrites=arguments.overwrite)
    print(f"wrote the {part.label} of {contents.path} to {arguments.target}")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    if not arguments.tolerance >= 0:
        raise ConfigError(f"--tolerance {arguments.tolerance:g} is not a non-negative number: give 0 or more")
    storage = Storage()
    left, right = (find_contents(storage, path) for path in (arguments.left, arguments.right))
    num_differing = 0
    for title, lines in _differences(storage, left, right, arguments.tolerance):
        print(title, *lines, sep="\n")
        num_differing += bool(lines)
    print("the checkpoints differ" if num_differing else "the checkpoints are equal")
    return 1 if num_differing else 0


def _differences(
    storage: Storage, left: CheckpointContents, right: CheckpointContents, tolerance: float
) -> Iterator[tuple[str, list[str]]]:
    """Yield a title and the differences of each compared part."""
    for label, left_part, right_part in _pairs(left, right):
        summary, lines = _compared(storage, left_part, right_part, tolerance)
        yield f"{label}: {summary}", lines
    first, second = (training_document(storage, contents) for contents in (left, right))
    if first is not None and second is not None:
        lines = [f"  {escape_control(line)}" for line in compare_values(_run_values(first), _run_values(second), "")]
        yield f"training state: {count_text(len(lines), 'difference')}", lines


def _run_values(document: TrainingDocument) -> dict[str, Any]:
    # Without versions, the time of the save and the like, which may differ between equal runs.
    per_rank = document.per_rank
    return {
        "step": document.facts.get("step"),
        "lr_schedulers": document.lr_schedulers,
        "dataloaders": document.dataloaders,
        "ranks": [per_rank.values[index] for index in per_rank.of_rank],
        "extra": document.extra,
    }


def _pairs(
    left: CheckpointContents, right: CheckpointContents
) -> Iterator[tuple[str, StoredPart | None, StoredPart | None]]:
    if not (left.is_directory and right.is_directory):
        kind = (right if left.is_directory else left).parts[0].kind
        left_part, right_part = left.only_part(kind), right.only_part(kind)
        yield kind.name, left_part, right_part
        return
    of_left, of_right = ({part.label: part for part in contents.parts} for contents in (left, right))
    for label in dict.fromkeys((*of_left, *of_right)):
        yield label, of_left.get(label), of_right.get(label)


def _compared(
    storage: Storage, left: StoredPart | None, right: StoredPart | None, tolerance: float
) -> tuple[str, list[str]]:
    if left is None or right is None:
        return "not in both", [f"  only in {'B' if left is None else 'A'}"]
    with left.open(storage) as left_part, right.open(storage) as right_part:
        found = compare_tensors(left_part, right_part, tolerance=tolerance)
        lines = list(comparison_lines(found))
        lines += [f"  {escape_control(line)}" for line in compare_values(_groups(left_part), _groups(right_part), "")]
    compared = count_text(found.num_common, "tensor")
    return f"{compared} in both, largest difference of an element {found.max_difference:g}", lines


def _groups(stored: StoredCheckpoint) -> dict[str, Any]:
    if stored.groups is None:
        return {}
    return parse_values(stored.groups, stored.specs, str(stored.path))


def _export(arguments: argparse.Namespace) -> int:
    storage = Storage()
    contents = find_contents(storage, arguments.source)
    names = export_optimizer(
        storage,
        contents,
        Path(arguments.target),
        with_master_weights=arguments.master_weights,
        overwrites=arguments.overwrite,
    )
    for number, name in enumerate(names):
        print(f"{number:>6}  {escape_control(name)}")
    print(f"wrote {count_text(len(names), 'parameter')} in this order from {contents.path} to {arguments.target}")
    return 0


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "inspect": _inspect,
    "verify": _verify,
    "convert": _convert,
    "consolidate": _consolidate,
    "diff": _diff,
    "export-optimizer": _export,
}
