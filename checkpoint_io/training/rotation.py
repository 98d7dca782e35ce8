"""The steps under one directory: which are whole, which is the latest, and which go when there are too many."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from booster.checkpoint_io.commit import Transaction, listing, remove_checkpoint, resolve
from booster.checkpoint_io.files.manifest import Manifest
from booster.checkpoint_io.files.strict_json import MAX_JSON_BYTES
from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError, ConfigError
from booster.logger import get_dist_logger

__all__ = ["LATEST", "TRAINING_STATE", "TRAINING_STATE_MANIFEST", "StepFolders", "WholeStep", "read_training_manifest"]

TRAINING_STATE = "training_state.json"
TRAINING_STATE_MANIFEST = "training_state.manifest.json"
LATEST = "latest"
_MAX_LOOKS = 20
_STEP = re.compile(r"step-(\d{8,})")

# Note [Sequence]
# Every whole training state carries a number, one more than the highest under its directory when it was saved. The
# latest is the one with the highest, not the one of the highest step: a run that went back to step 100 and saved step
# 110 goes on from there, though step 200 of the run before lies beside it. The file `latest` says the same to people
# and tools; no load of ours reads it, so that a kill between a commit and its move costs nothing.
# Only rank 0 comes here.


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """A training state that was committed: its directory, and its number in the order of saves."""

    path: Path
    sequence: int


class StepFolders:
    """The training states under one directory, `step-00001200` and so on, and the directory itself if it is one.

    Args:
        storage: Where they are.
        root: The directory.
    """

    def __init__(self, storage: Storage, root: Path) -> None:
        self._storage = storage
        self._root = root

    @staticmethod
    def is_step(name: str) -> bool:
        """Return whether a step's directory has this name."""
        return _STEP.fullmatch(name) is not None

    def path_of(self, step: int) -> Path:
        """Return the directory of a step."""
        return self._root / f"step-{step:08d}"

    def check_latest(self) -> None:
        """Raise if `latest` can't be written.

        Raises:
            ConfigError: Something other than a file has the name.
        """
        if self._storage.kind(self._root / LATEST) not in (None, "file", "link"):
            raise ConfigError(
                f"{self._root / LATEST} is no file, and the name of the latest step is to be written there: move it"
                " away, or save to another directory"
            )

    def steps(self) -> list[WholeStep]:
        """Return the whole steps, oldest first; what is not whole is left out.

        Raises:
            CheckpointError: The record of one is damaged, so that its place in the order is unknown.
        """
        return self._whole([self._root / name for name in self._names() if _STEP.fullmatch(name)])

    def latest(self) -> WholeStep | None:
        """Return the training state that was saved last, a step or the directory itself; None where there is none.

        Raises:
            CheckpointError: The record of one is damaged, so that it may be the latest or not.
        """
        for _ in range(_MAX_LOOKS):
            names = self._names()
            found = self._whole([self._root]) + self.steps()
            if found:
                return max(found, key=lambda step: step.sequence)
            if names == self._names():
                break  # else all that were listed may have gone since, because newer ones came
        return None

    def next_sequence(self) -> int:
        """Return the number for the next save; damaged steps do not count."""
        folders = [self._root, *(self._root / name for name in self._names() if _STEP.fullmatch(name))]
        return 1 + max((step.sequence for step in self._whole(folders, skips_damaged=True)), default=0)

    def point_latest(self, name: str) -> None:
        """Make `latest` name a step, in one step."""
        storage, path = self._storage, self._root / LATEST
        if storage.kind(path) == "link":  # other programs link to the step
            storage.remove(path)
        transaction = Transaction(storage, path, is_directory=False)
        try:
            storage.write_file(transaction.begin() / LATEST, f"{name}\n".encode())
            transaction.commit(is_stale=lambda name: False)
        finally:
            transaction.abort()

    def rotate(self, keep_last: int) -> None:
        """Remove whole steps, oldest first, until `keep_last` are left; anything else in the directory stays."""
        folders = [self._root / name for name in self._names() if _STEP.fullmatch(name)]
        for step in self._whole(folders, skips_damaged=True)[:-keep_last]:
            remove_checkpoint(self._storage, step.path)

    def _names(self) -> list[str]:
        return self._storage.names(self._root) if self._storage.kind(self._root) in ("directory", "link") else []

    def _whole(self, folders: list[Path], *, skips_damaged: bool = False) -> list[WholeStep]:
        found = []
        for folder in folders:
            try:
                manifest = read_training_manifest(self._storage, folder)
                if manifest is not None:
                    found.append(WholeStep(path=folder, sequence=_sequence_of(manifest, folder)))
            except (CheckpointError, FileNotFoundError) as error:
                if self._storage.kind(folder) is None:
                    continue  # a save in the background has just removed it
                if not skips_damaged:
                    raise
                get_dist_logger().warning(f"{folder} is left alone: {error}", ranks=[0])
        # By name where two have one number, as a copy made by hand has.
        return sorted(found, key=lambda step: (step.sequence, len(step.path.name), step.path.name))


def read_training_manifest(storage: Storage, directory: Path) -> Manifest | None:
    """Return the manifest of a whole training state; None where no training state was committed.

    Raises:
        CheckpointError: It is damaged, or the state that it is about is not there in its size.
    """
    if storage.kind(directory) not in ("directory", "link") or TRAINING_STATE_MANIFEST not in listing(
        storage, directory
    ):
        return None
    path = resolve(storage, directory, TRAINING_STATE_MANIFEST)
    manifest = Manifest.parse(storage.read_file(path, max_bytes=MAX_JSON_BYTES, inside=directory), str(path))
    record = manifest.documents.get(TRAINING_STATE)
    if manifest.kind != "training_state" or record is None:
        raise CheckpointError(f"{path} is no training state's manifest: take another copy of the checkpoint")
    with storage.open_regular(resolve(storage, directory, TRAINING_STATE), inside=directory) as file:
        num_bytes = storage.size(file)
    if num_bytes != record.num_bytes:
        raise CheckpointError(
            f"{directory / TRAINING_STATE} has {num_bytes} bytes, and {record.num_bytes} were written: take another"
            " copy of the checkpoint"
        )
    return manifest


def _sequence_of(manifest: Manifest, folder: Path) -> int:
    sequence = manifest.facts.get("sequence")
    if type(sequence) is not int:
        raise CheckpointError(f"{folder / TRAINING_STATE_MANIFEST} has no sequence number: take another copy of it")
    return sequence
