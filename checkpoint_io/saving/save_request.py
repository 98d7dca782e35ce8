"""What one save writes, and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from booster.checkpoint_io.commit import Transaction
from booster.checkpoint_io.saving.component import Component
from booster.checkpoint_io.storage import Storage

__all__ = ["SaveRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What a save writes, and where.

    Attributes:
        target: The final directory or file.
        is_directory: Which of the two.
        components: What goes there.
        documents: Further small files of rank 0's, by name, besides those of the components.
        manifest_name: A manifest of the documents and of the components' manifests; None: none.
        facts: What a reader may want to know of the save, as JSON has it.
        is_stale: Whether a file of this name, relative to the target, is left over from what the save replaces.
        is_related: Whether a save to this name beside the target is of the same run; see `Transaction`.
        after_commit: Called on rank 0 when the checkpoint is there.
        doing: What this is, for messages.
    """

    target: Path
    is_directory: bool
    components: Sequence[Component]
    documents: Mapping[str, bytes] = field(default_factory=dict)
    manifest_name: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    is_stale: Callable[[str], bool] | None = None
    is_related: Callable[[str], bool] | None = None
    after_commit: Callable[[], None] | None = None
    doing: str = "saving"

    def transaction(self, storage: Storage) -> Transaction:
        """Returns what brings the files to their place."""
        return Transaction(storage, self.target, is_directory=self.is_directory, is_related=self.is_related)
