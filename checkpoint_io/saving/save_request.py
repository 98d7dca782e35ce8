"""Content and target of one save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from booster.checkpoint_io.commit import Transaction
from booster.checkpoint_io.saving.component import CheckpointPart
from booster.checkpoint_io.storage import Storage

__all__ = ["SaveRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Content and target of one save.

    Attributes:
        target: Final directory or file.
        is_directory: Whether the target is a directory.
        components: Parts of the checkpoint.
        documents: Further small files, written by rank 0, by name.
        manifest_name: Name of a manifest over the documents and the parts' manifests. Optional, defaults to no
            such manifest.
        facts: JSON metadata of the save for the manifest.
        is_stale: Predicate: a file of this name, relative to the target, is a leftover of the replaced save.
        is_related: Predicate: a save to this sibling name belongs to the same run; see `Transaction`.
        after_commit: Called on rank 0 after the commit.
        doing: Description of the operation for messages.
    """

    target: Path
    is_directory: bool
    parts: Sequence[CheckpointPart]
    documents: Mapping[str, bytes] = field(default_factory=dict)
    manifest_name: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_stale: Callable[[str], bool] | None = None
    is_related: Callable[[str], bool] | None = None
    after_commit: Callable[[], None] | None = None
    action: str = "saving"

    def transaction(self, storage: Storage) -> Transaction:
        """Return a new transaction for the target."""
        return Transaction(storage, self.target, is_directory=self.is_directory, is_related=self.is_related)
