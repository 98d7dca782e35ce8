"""Full training checkpoint in one directory: models, optimizers, schedulers, dataloaders, RNG states, user values."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from booster.checkpoint_io.destination import Destination, as_path
from booster.checkpoint_io.files import json_values
from booster.checkpoint_io.layout import GRADIENTS, MODEL, OPTIMIZER, RANDOM_STATE, Kind
from booster.checkpoint_io.ranks import Ranks
from booster.checkpoint_io.saving.component import Component
from booster.checkpoint_io.saving.components import (
    model_component,
    optimizer_component,
    optimizer_values,
    save_facts,
)
from booster.checkpoint_io.saving.save_request import SaveRequest
from booster.checkpoint_io.saving.saver import Saver
from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.training.lr_scheduler_state import scheduler_document
from booster.checkpoint_io.training.rank_tensors import rank_component
from booster.checkpoint_io.training.rotation import (
    TRAINING_STATE,
    TRAINING_STATE_MANIFEST,
    StepFolders,
    read_training_manifest,
)
from booster.checkpoint_io.training.training_document import PerRank, TrainingDocument
from booster.checkpoint_io.training.training_load import load_training_state
from booster.checkpoint_io.training.training_parts import SaveOptions, TrainingParts
from booster.checkpoint_io.training.waiting_gradients import gradients_component
from booster.errors import CheckpointError
from booster.interface import OptimizerWrapper, PendingGradients

__all__ = ["TrainingStateIO"]

# Note [Whole training state]
# Files of a directory: those of the first model and optimizer; each further model or optimizer in a subdirectory of its
# name; `random_state.safetensors` and, during an accumulation, `gradients.safetensors`, with every rank's own tensors
# and the reduced gradients; `training_state.json` with all values that are not tensors; and
# `training_state.manifest.json` with the checksums of the latter and of every part's manifest, so that a part
# replaced by another save is detected.

_DOING = "saving the training state"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """State gathered from all ranks before a save is planned; equal on all ranks but for the gradients themselves.

    Attributes:
        per_rank: Plain values of each rank.
        optimizer_values: Plain values of each optimizer as JSON.
        waiting: Accumulated gradients of the optimizers for which any rank has some.
        reduced: Names of those optimizers of which some gradients are already reduced over ranks.
    """

    per_rank: PerRank
    optimizer_values: dict[str, str]
    waiting: dict[str, PendingGradients]
    reduced: list[str]


class TrainingStateIO:
    """Saves and loads training checkpoints of one process group.

    Args:
        ranks: Ranks that save and load together.
        storage: Storage of the files.
        saver: Saver that writes the checkpoints.
    """

    def __init__(self, ranks: Ranks, storage: Storage, saver: Saver) -> None:
        self._ranks = ranks
        self._storage = storage
        self._saver = saver
        self._issued: dict[Path, int] = {}  # sequence numbers by directory, of saves that may still be in flight

    def save(
        self,
        checkpoint: str | os.PathLike[str],
        parts: TrainingParts,
        *,
        extra: Any = None,
        facts: Mapping[str, Any],
        options: SaveOptions,
        use_async: bool = False,
    ) -> None:
        """Save into the directory or, with a step, into a step directory below it. Collective.

        Args:
            checkpoint: Directory.
            parts: Objects to save.
            extra: Plain user values; those of rank 0 are written.
            facts: JSON metadata of the save.
            options: Save options.
            use_async: If True, return after a copy into host memory.

        Raises:
            ConfigError: Invalid numbers, names or paths, or a save between clipping and step.
            CheckpointError: A value is not plain (the message names its key), or writing failed on some rank.
        """
        if not use_async:
            self._saver.wait()  # the replaced checkpoint is read below

        def check() -> tuple[Path, Mapping[str, Any]]:
            options.check()
            parts.check()
            return as_path(checkpoint), parts.random_state.capture()

        root, random_state = self._ranks.agree(check, _DOING)
        gathered = self._gather(parts)
        request = self._ranks.agree(
            lambda: self._request(root, parts, random_state, gathered, extra, facts, options), _DOING
        )
        self._saver.save(request, use_async=use_async)

    def load(
        self,
        checkpoint: str | os.PathLike[str],
        parts: TrainingParts,
        *,
        strict: bool,
        verify: str,
        missing_ok: bool = False,
    ) -> Any:
        """Load from a directory, or from the latest committed step below it; return `extra`. Collective.

        Args:
            checkpoint: Directory.
            parts: Objects to fill; other contents of the checkpoint are ignored.
            strict: If True, models must have exactly the stored tensors.
            verify: "checksums" or "structure".
            missing_ok: If True, return None and change nothing if there is no training state.

        Raises:
            CheckpointError: A requested part is missing, does not match or is damaged; nothing was changed.
        """
        self._saver.wait()
        return load_training_state(
            self._ranks,
            self._storage,
            as_path(checkpoint),
            parts,
            strict=strict,
            verify=verify,
            missing_ok=missing_ok,
        )

    def _gather(self, parts: TrainingParts) -> _Gathered:
        """Gather the ranks' plain values, and which accumulated gradients exist on any rank. Collective."""
        for model in parts.models.values():
            model.require_equal_copies()
        optimizer_values = {name: self._values_of(optimizer) for name, optimizer in parts.optimizers.items()}
        pending = {name: optimizer.pending_gradients() for name, optimizer in parts.optimizers.items()}
        for gradients in pending.values():
            gradients.synchronize()
        payloads, of_rank = self._ranks.gather(self._ranks.agree(lambda: _own_values(parts, pending), _DOING))
        values = [json_values.loads(raw, "the ranks' values") for raw in payloads]
        waiting = [name for name in pending if any(name in one["waiting"] for one in values)]
        kept = [
            {"dataloaders": one["dataloaders"], "gradients": {name: one["gradients"][name] for name in waiting}}
            for one in values
        ]
        return _Gathered(
            per_rank=PerRank(values=kept, of_rank=list(of_rank)),
            optimizer_values=optimizer_values,
            waiting={name: pending[name] for name in waiting},
            reduced=[name for name in waiting if any(name in one["reduced"] for one in values)],
        )

    def _values_of(self, optimizer: OptimizerWrapper) -> str:
        return self._ranks.agree(lambda: optimizer_values(optimizer), _DOING)

    def _request(
        self,
        root: Path,
        parts: TrainingParts,
        random_state: Mapping[str, Any],
        gathered: _Gathered,
        extra: Any,
        facts: Mapping[str, Any],
        options: SaveOptions,
    ) -> SaveRequest:
        folders = StepFolders(self._storage, root)
        target = root if options.step is None else folders.path_of(options.step)
        document = TrainingDocument(
            facts=self._facts(facts, options.step, self._next_sequence(root, folders)),
            models=list(parts.models),
            optimizers=list(parts.optimizers),
            gradients=list(gathered.waiting),
            reduced=gathered.reduced,
            lr_schedulers={name: scheduler_document(one) for name, one in parts.lr_schedulers.items()},
            dataloaders=list(parts.dataloaders),
            per_rank=gathered.per_rank,
            extra=extra,
        )
        return SaveRequest(
            target=target,
            is_directory=True,
            components=list(self._components(target, parts, random_state, gathered, options)),
            documents={TRAINING_STATE: document.encode()},
            manifest_name=TRAINING_STATE_MANIFEST,
            facts=document.facts,
            is_stale=self._stale(target, parts),
            is_related=None if options.step is None else folders.is_step,
            after_commit=None if options.step is None else self._announcement(folders, target.name, options),
            doing=_DOING,
        )

    def _components(
        self,
        target: Path,
        parts: TrainingParts,
        random_state: Mapping[str, Any],
        gathered: _Gathered,
        options: SaveOptions,
    ) -> Iterator[Component]:
        def destination(kind: Kind) -> Destination:
            return Destination(target, kind, True, None, options.size_per_shard, options.use_safetensors)

        to_model, to_optimizer = destination(MODEL), destination(OPTIMIZER)
        rank, limit = self._ranks.rank, to_model.max_shard_bytes
        for name, model in parts.models.items():
            yield model_component(model, to_model, name)
        for name, optimizer in parts.optimizers.items():
            yield optimizer_component(optimizer, to_optimizer, gathered.optimizer_values[name], name)
        for name, pending in gathered.waiting.items():
            yield gradients_component(pending, folder=name, max_shard_bytes=limit)
        yield rank_component(RANDOM_STATE, random_state, rank, folder="", max_shard_bytes=limit)

    def _facts(self, facts: Mapping[str, Any], step: int | None, sequence: int) -> dict[str, Any]:
        of_save = save_facts(self._ranks.size)
        versions = {name: str(version) for name, version in of_save["versions"].items()}
        versions["python"] = platform.python_version()
        return {**of_save, **facts, "versions": versions, "step": step, "sequence": sequence}

    def _next_sequence(self, root: Path, folders: StepFolders) -> int:
        if self._ranks.rank != 0:
            return 0  # only rank 0's value is written
        sequence = max(folders.next_sequence(), self._issued.get(root, 0) + 1)
        self._issued[root] = sequence
        return sequence

    def _announcement(self, folders: StepFolders, name: str, options: SaveOptions) -> Callable[[], None]:
        if self._ranks.rank == 0:
            folders.check_latest()

        def announce() -> None:
            folders.point_latest(name)
            if options.keep_last is not None:
                folders.rotate(options.keep_last)

        return announce

    def _stale(self, target: Path, parts: TrainingParts) -> Callable[[str], bool]:
        """Return a predicate for leftovers of the replaced save: RNG states, gradients and its other parts."""
        folders = set(parts.folders()) | {""}
        before = self._folders_of_what_is_there(target) if self._ranks.rank == 0 else {}

        def is_stale(name: str) -> bool:
            folder, _, base = name.rpartition("/")
            always = (GRADIENTS, RANDOM_STATE) if folder in folders else ()
            return any(_owns(kind, base) for kind in (*always, *before.get(folder, ())))

        return is_stale

    def _folders_of_what_is_there(self, target: Path) -> dict[str, list[Kind]]:
        try:
            manifest = read_training_manifest(self._storage, target)
        except CheckpointError:
            return {}  # damaged, but about to be replaced
        found: dict[str, list[Kind]] = {}
        for document in () if manifest is None else manifest.documents:
            folder, _, base = document.rpartition("/")
            kinds = (MODEL, OPTIMIZER, GRADIENTS, RANDOM_STATE)
            found.setdefault(folder, []).extend(kind for kind in kinds if kind.names_of(base) is not None)
        return found


def _own_values(parts: TrainingParts, pending: Mapping[str, PendingGradients]) -> bytes:
    values = {
        "dataloaders": {name: loader.state_dict() for name, loader in parts.dataloaders.items()},
        "gradients": {name: gradients.counts().to_plain() for name, gradients in pending.items()},
        "waiting": [name for name, gradients in pending.items() if gradients.is_waiting],
        "reduced": [name for name, gradients in pending.items() if gradients.reduced()],
    }
    return json_values.dumps(values, "a dataloader's position").encode()


def _owns(kind: Kind, base: str) -> bool:
    forms = [kind.names(is_safetensors=is_safetensors) for is_safetensors in (True, False)]
    return any(names.owns(base) or (kind == OPTIMIZER and base == names.groups) for names in forms)
