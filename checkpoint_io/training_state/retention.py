"""Step directories: which are committed, which is the latest, and which to remove (retention)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from booster.checkpoint_io.commit import remove_checkpoint, replaced_file
from booster.checkpoint_io.formats.manifest import Manifest
from booster.checkpoint_io.layout import TRAINING_STATE, TRAINING_STATE_MANIFEST
from booster.checkpoint_io.loading.reader import open_directory
from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError, ConfigError
from booster.logger import get_dist_logger

LATEST = "latest"
_MAX_ATTEMPTS = 20
_STEP = re.compile(r"step-(\d{8,})")

# Note [Checkpoint sequence numbers]
# Every training state has a sequence number: one more than the highest in its directory at the time of the save. The
# latest state is the one with the highest sequence number, not the highest step: a run that went back to step 100 and
# saved step 110 resumes from there, even if step 200 of the previous run still exists. The file `latest` records the
# same for users and other tools. It is not read by a load, so a kill between commit and its update does no harm.
# Only rank 0 uses this module.


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """Committed training state: directory and sequence number of the save."""

    path: Path
    sequence: int


class StepDirectories:
    """Training states in one directory: `step-00001200` and so on, and the directory itself if it is one.

    Args:
        storage: Storage of the directory.
        root: Directory.
    """

    def __init__(self, storage: Storage, root: Path) -> None:
        self._storage = storage
        self._root = root

    @staticmethod
    def is_step(name: str) -> bool:
        """Return whether this is the name of a step directory."""
        return _STEP.fullmatch(name) is not None

    def step_path(self, step: int) -> Path:
        """Return the directory of a step."""
        return self._root / f"step-{step:08d}"

    def check_latest_writable(self) -> None:
        """Check that `latest` can be written.

        Raises:
            ConfigError: The name is taken by something other than a file.
        """
        if self._storage.kind(self._root / LATEST) not in (None, "file", "link"):
            raise ConfigError(
                f"{self._root / LATEST} is not a file, but the name of the latest step is written there: move it"
                " away, or save to another directory"
            )

    def steps(self) -> list[CommittedStep]:
        """Return the committed steps, oldest first.

        Raises:
            CheckpointError: A manifest is damaged, so its position in the order is unknown.
        """
        return self._committed(self._folders())

    def latest(self) -> CommittedStep | None:
        """Return the last saved training state, a step or the directory itself, or None if there is none.

        Raises:
            CheckpointError: A manifest is damaged, so it is unknown whether it is the latest.
        """
        for _ in range(_MAX_ATTEMPTS):
            names = self._names()
            found = self._committed([self._root]) + self.steps()
            if found:
                return max(found, key=lambda step: step.sequence)
            if names == self._names():
                break  # else the listed steps may have been removed because of newer ones
        return None

    def next_sequence(self) -> int:
        """Return the sequence number for the next save; damaged steps are ignored."""
        steps = self._committed([self._root, *self._folders()], skip_damaged=True)
        return 1 + max((step.sequence for step in steps), default=0)

    def update_latest(self, name: str) -> None:
        """Update `latest` atomically to name a step."""
        storage, path = self._storage, self._root / LATEST
        if storage.kind(path) == "link":  # other programs make it a symbolic link
            storage.remove(path)
        with replaced_file(storage, path) as new_path:
            storage.write_file(new_path, f"{name}\n".encode())

    def remove_old(self, keep_last: int) -> None:
        """Remove committed steps, oldest first, until `keep_last` are left; other directory entries are kept."""
        for step in self._committed(self._folders(), skip_damaged=True)[:-keep_last]:
            remove_checkpoint(self._storage, step.path)

    def _names(self) -> list[str]:
        return self._storage.names(self._root) if self._storage.kind(self._root) in ("directory", "link") else []

    def _folders(self) -> list[Path]:
        return [self._root / name for name in self._names() if self.is_step(name)]

    def _committed(self, folders: list[Path], *, skip_damaged: bool = False) -> list[CommittedStep]:
        found = []
        for folder in folders:
            try:
                manifest = read_training_manifest(self._storage, folder)
                if manifest is None:
                    continue
                sequence = manifest.metadata.get("sequence")
                if type(sequence) is not int:
                    raise CheckpointError(
                        f"{folder / TRAINING_STATE_MANIFEST} has no sequence number: take another copy of it"
                    )
                found.append(CommittedStep(path=folder, sequence=sequence))
            except CheckpointError as error:
                if self._storage.kind(folder) is None:
                    continue  # removed meanwhile by a background save
                if not skip_damaged:
                    raise
                get_dist_logger().warning(f"{folder} is left alone: {error}", ranks=[0])
        # By name if sequence numbers are equal, as after a manual copy.
        return sorted(found, key=lambda step: (step.sequence, len(step.path.name), step.path.name))


def read_training_manifest(storage: Storage, directory: Path) -> Manifest | None:
    """Return the manifest of a training state, or None if none was committed.

    Raises:
        CheckpointError: The manifest is damaged, or the training state is missing or has another size.
    """
    if storage.kind(directory) not in ("directory", "link"):
        return None
    files = open_directory(storage, directory)
    if TRAINING_STATE_MANIFEST not in files.names:
        return None
    path = directory / TRAINING_STATE_MANIFEST
    manifest = Manifest.parse(files.read(path.name), str(path))
    record = manifest.documents.get(TRAINING_STATE)
    if manifest.kind != "training_state" or record is None:
        raise CheckpointError(f"{path} is not the manifest of a training state: take another copy of the checkpoint")
    num_bytes = files.size(TRAINING_STATE)
    if num_bytes != record.num_bytes:
        raise CheckpointError(
            f"{directory / TRAINING_STATE} has {num_bytes} bytes, but {record.num_bytes} were written: take another"
            " copy of the checkpoint"
        )
    return manifest
