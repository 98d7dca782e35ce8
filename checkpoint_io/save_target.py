"""Save target: validated path and format arguments of a save."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from booster.errors import CheckpointError, ConfigError
from booster.interface.checkpoint_io import check_size_per_shard

from .layout import BIN_SUFFIXES, SAFETENSORS_SUFFIXES, FileKind, FileNames, is_valid_prefix
from .storage import Storage

MEGABYTE = 10**6


class SaveTarget:
    """Path and format of a save; see `CheckpointIO.save_model` for the arguments.

    Attributes:
        path: File or directory.
        is_sharded: Whether the path is a directory of shards.
        max_shard_bytes: Maximum shard size.
        names: File names.

    Raises:
        ConfigError: Invalid or contradictory arguments.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        kind: FileKind,
        shard: bool,
        prefix: str | None,
        size_per_shard: int,
        use_safetensors: bool,
    ) -> None:
        self.path = as_path(checkpoint)
        check_size_per_shard(size_per_shard)
        if prefix is not None and not shard:
            raise ConfigError(
                f"prefix={prefix!r} goes into the names of shards, but shard=False writes to the path as it is: pass"
                " shard=True, or leave prefix out"
            )
        if prefix is not None and not is_valid_prefix(prefix):
            raise ConfigError(
                f"prefix={prefix!r} is ambiguous within a file name: use letters, digits, '_' and '-', such as 'fp16'"
            )
        if not shard:
            _check_suffix(self.path, use_safetensors)
        self.is_sharded = shard
        self.max_shard_bytes = size_per_shard * MEGABYTE
        self.names: FileNames = kind.names(is_safetensors=use_safetensors, prefix=prefix)


def as_path(checkpoint: str | os.PathLike[str]) -> Path:
    """Convert the user's path.

    Raises:
        ConfigError: The path is empty.
    """
    text = os.fspath(checkpoint)
    if not text:
        raise ConfigError("the checkpoint's path is empty: give a file or a directory")
    return Path(text)


@contextmanager
def explain_missing_parents(storage: Storage, target: Path, action: str) -> Iterator[None]:
    """Replace an error by one that names the missing parent directory, if that is the cause.

    Args:
        storage: Storage of the target.
        target: File or directory to write; the block creates its parents.
        action: Description of the operation for messages.

    Raises:
        CheckpointError: The parents could not be created.
        OSError: Any other error of the block.
    """
    try:
        yield
    except OSError as error:
        parent = Path(os.path.realpath(target.parent))
        existing = parent
        while storage.kind(existing) is None:
            existing = existing.parent
        if existing == parent and storage.kind(existing) == "directory":
            raise
        is_directory = storage.kind(existing) == "directory"
        reason = f"the directory {parent} cannot be created" if is_directory else f"{existing} is not a directory"
        raise CheckpointError(
            f"{action} to {target} failed, because {reason} ({error}): give a path below a writable directory"
        ) from error


def _check_suffix(path: Path, use_safetensors: bool) -> None:
    allowed, other = (SAFETENSORS_SUFFIXES, BIN_SUFFIXES) if use_safetensors else (BIN_SUFFIXES, SAFETENSORS_SUFFIXES)
    if path.suffix in allowed:
        return
    if not path.suffix:
        raise ConfigError(
            f"{path} has no suffix, but shard=False, the default, writes one file whose suffix determines its format:"
            f" pass shard=True to write a directory, or give a name that ends in {' or '.join(allowed)}, such as"
            f" {f'{path}{allowed[0]}'!r}"
        )
    if path.suffix not in other:
        raise ConfigError(
            f"{path} ends in {path.suffix!r}, but shard=False, the default, writes one file: pass shard=True to write a"
            f" directory, or give a name that ends in {' or '.join(allowed)}"
        )
    raise ConfigError(
        f"{path} ends in {path.suffix!r}, but use_safetensors={use_safetensors} writes another format: pass"
        f" use_safetensors={not use_safetensors}, or give a name that ends in {' or '.join(allowed)}"
    )
