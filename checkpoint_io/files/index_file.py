"""Index of a sharded checkpoint: file of each tensor, with validated file names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from booster.checkpoint_io.files.strict_json import parse_json
from booster.checkpoint_io.layout import FileNames
from booster.errors import CheckpointError
from booster.interface import TensorSpec

__all__ = ["check_file_name", "check_held", "listed", "parse_index"]

MAX_TENSORS = 1_000_000
_MAX_NAME = 255  # limit of file systems
_MAX_LISTED = 10


def parse_index(raw: bytes, what: str, owner: FileNames) -> dict[str, list[str]]:
    """Return the tensors of every file in an index.

    Args:
        raw: Content of the index.
        what: Path of the index for messages.
        owner: File names of this checkpoint.

    Raises:
        CheckpointError: Not an index, or an index with names other than tensor files in the same directory.
    """
    document = parse_json(raw, what)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or len(weight_map) > MAX_TENSORS:
        raise CheckpointError(
            f"{what} has no weight_map, or one of more than a million tensors: it is damaged or not an index. Take"
            " another copy of it"
        )
    if not weight_map:
        # The index of an optimizer without states has no entries, but there is one shard, without tensors.
        return {owner.shard(1, 1): []}
    named: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or file_name not in named:
            check_file_name(file_name, what, owner)
        named.setdefault(file_name, []).append(name)
    return named


def check_file_name(file_name: Any, what: str, owner: FileNames) -> None:
    """Check that an untrusted name is that of a tensor file in the same directory.

    Raises:
        CheckpointError: The name is a path, hidden, not printable, or has another suffix.
    """
    is_plain = (
        isinstance(file_name, str)
        and len(file_name.encode("utf-8", "surrogatepass")) <= _MAX_NAME
        and not file_name.startswith(".")
        and not any(character in '/\\:*?"<>|' or not character.isprintable() for character in file_name)
        and file_name.endswith(f".{owner.suffix}")
    )
    if not is_plain:
        raise CheckpointError(
            f"{what} names the file {str(file_name)[:200]!r}: it may name only .{owner.suffix} files beside itself. Do"
            " not trust this checkpoint"
        )


def check_held(names: Iterable[str], specs: Mapping[str, TensorSpec], path: object, index: str) -> None:
    """Check that a file holds the tensors that the index assigns to it.

    Raises:
        CheckpointError: Tensors are missing; the message lists them.
    """
    lost = [name for name in names if name not in specs]
    if lost:
        raise CheckpointError(
            f"{path} lacks {len(lost)} tensors that {index} assigns to it, such as {listed(lost)}: the files are from"
            " different saves, or one is damaged"
        )


def listed(names: Iterable[str]) -> str:
    """Format the first ten names for a message, and the number of further ones."""
    names = list(names)
    shown = ", ".join(repr(name[:200]) for name in names[:_MAX_LISTED])
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"{shown}{more}" or "nothing"
