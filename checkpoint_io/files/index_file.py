"""Index of a sharded checkpoint: file of each tensor, with validated file names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from booster.checkpoint_io.files.strict_json import parse_json
from booster.checkpoint_io.layout import FileNames
from booster.errors import CheckpointError
from booster.interface import TensorSpec

__all__ = ["check_file_name", "check_index_entries", "format_names", "parse_index"]

MAX_TENSORS = 1_000_000
_MAX_NAME = 255  # limit of file systems
_MAX_LISTED = 10


def parse_index(raw: bytes, source_name: str, file_names: FileNames) -> dict[str, list[str]]:
    """Return the tensors of every file in an index.

    Args:
        raw: Content of the index.
        source_name: Path of the index for messages.
        file_names: File names of this checkpoint.

    Raises:
        CheckpointError: Not an index, or an index with names other than tensor files in the same directory.
    """
    document = parse_json(raw, source_name)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or len(weight_map) > MAX_TENSORS:
        raise CheckpointError(
            f"{source_name} has no weight_map, or one of more than a million tensors: it is damaged or not an index. Take"
            " another copy of it"
        )
    if not weight_map:
        # The index of an optimizer without states has no entries, but there is one shard, without tensors.
        return {file_names.shard(1, 1): []}
    named: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or file_name not in named:
            check_file_name(file_name, source_name, file_names)
        named.setdefault(file_name, []).append(name)
    return named


def check_file_name(file_name: Any, source_name: str, file_names: FileNames) -> None:
    """Check that an untrusted name is that of a tensor file in the same directory.

    Raises:
        CheckpointError: The name is a path, hidden, not printable, or has another suffix.
    """
    is_plain = (
        isinstance(file_name, str)
        and len(file_name.encode("utf-8", "surrogatepass")) <= _MAX_NAME
        and not file_name.startswith(".")
        and not any(character in '/\\:*?"<>|' or not character.isprintable() for character in file_name)
        and file_name.endswith(f".{file_names.suffix}")
    )
    if not is_plain:
        raise CheckpointError(
            f"{source_name} names the file {str(file_name)[:200]!r}: it may name only .{file_names.suffix} files beside itself. Do"
            " not trust this checkpoint"
        )


def check_index_entries(names: Iterable[str], specs: Mapping[str, TensorSpec], path: object, index: str) -> None:
    """Check that a file holds the tensors that the index assigns to it.

    Raises:
        CheckpointError: Tensors are missing; the message lists them.
    """
    missing = [name for name in names if name not in specs]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} tensors that {index} assigns to it, such as {format_names(missing)}: the files are from"
            " different saves, or one is damaged"
        )


def format_names(names: Iterable[str]) -> str:
    """Format the first ten names for a message, and the number of further ones."""
    names = list(names)
    text = ", ".join(repr(name[:200]) for name in names[:_MAX_LISTED])
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"{text}{more}" or "nothing"
