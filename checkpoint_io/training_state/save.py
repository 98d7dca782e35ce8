"""Save of a training checkpoint in one directory: models, optimizers, schedulers, dataloaders, RNG states, values."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from booster.checkpoint_io.formats import json_values
from booster.checkpoint_io.layout import (
    EXCLUDES_FROZEN,
    GRADIENTS,
    MODEL,
    OPTIMIZER,
    RANDOM_STATE,
    TRAINING_STATE,
    TRAINING_STATE_MANIFEST,
    FileKind,
    as_path,
    save_target,
)
from booster.checkpoint_io.parallel import CheckpointGroup
from booster.checkpoint_io.saving.part import (
    CheckpointPart,
    model_part,
    optimizer_part,
    optimizer_values,
    save_metadata,
)
from booster.checkpoint_io.saving.save import Saver, SaveRequest
from booster.checkpoint_io.storage import Storage
from booster.comm import all_gather_bytes
from booster.errors import CheckpointError, format_list
from booster.interface import AccumulatedGradients, TensorSlice
from booster.interface.checkpoint_io import SaveOptions, TrainingParts
from booster.kernels.checksum import tensor_crc32
from booster.logger import get_dist_logger

from .accumulated_gradients import gradients_part
from .document import PerRank, TrainingDocument, scheduler_document
from .retention import StepDirectories, read_training_manifest

# Note [Training checkpoint files]
# Files of a directory: those of the first model and optimizer; each further model or optimizer in a subdirectory of its
# name; `random_state.safetensors` and, during an accumulation, `gradients.safetensors`, with every rank's own tensors
# and the reduced gradients; `training_state.json` with all values that are not tensors; and
# `training_state.manifest.json` with the checksums of the latter and of every part's manifest, so that a part
# replaced by another save is detected.

_ACTION = "saving the training state"
_MAX_NAMES = 5  # per message


@dataclass(frozen=True, slots=True, kw_only=True)
class _GatheredState:
    """State gathered from all ranks before a save is planned; equal on all ranks but for the gradients themselves."""

    per_rank: PerRank
    optimizer_values: dict[str, str]  # as JSON, by optimizer
    accumulated: dict[str, AccumulatedGradients]  # of the optimizers for which any rank has some
    reduced: list[str]  # those of which some gradients are already reduced over ranks


class TrainingStateSaver:
    """Saves training checkpoints of one process group.

    Args:
        ranks: Ranks that save together.
        storage: Storage to write to.
        saver: Saver that writes the checkpoints.
    """

    def __init__(self, ranks: CheckpointGroup, storage: Storage, saver: Saver) -> None:
        self._ranks = ranks
        self._storage = storage
        self._saver = saver
        self._has_warned_of_buffers = False
        self._issued: dict[Path, int] = {}  # sequence numbers by directory, of saves that may still be in flight

    def save(
        self,
        checkpoint: str | os.PathLike[str],
        parts: TrainingParts,
        *,
        extra: Any = None,
        metadata: Mapping[str, Any],
        options: SaveOptions,
        use_async: bool = False,
    ) -> None:
        """Save into the directory or, with a step, into a step directory below it. Collective.

        For arguments, see `CheckpointIO.save_training_state`; `metadata` is its `facts`.

        Raises:
            ConfigError: Invalid numbers, names or paths, or a save between clipping and step.
            CheckpointError: A value is not plain (the message names its key), or writing failed on some rank.
        """

        def check() -> tuple[Path, Mapping[str, Any]]:
            options.check()
            parts.check()
            return as_path(checkpoint).absolute(), parts.random_state.capture()

        root, random_state = self._ranks.run_on_all_ranks(check, _ACTION)
        gathered = self._gather(parts)
        self._saver.save(
            lambda: self._request(root, parts, random_state, gathered, extra, metadata, options),
            _ACTION,
            use_async=use_async,
        )

    def _gather(self, parts: TrainingParts) -> _GatheredState:
        """Gather the ranks' plain values, and which accumulated gradients exist on any rank. Collective."""
        for model in parts.models.values():
            model.require_equal_copies()
        values_of = {
            name: self._ranks.run_on_all_ranks(partial(optimizer_values, optimizer), _ACTION)
            for name, optimizer in parts.optimizers.items()
        }
        gradients_of = {name: optimizer.pending_gradients() for name, optimizer in parts.optimizers.items()}
        for gradients in gradients_of.values():
            gradients.synchronize()
        local = self._ranks.run_on_all_ranks(lambda: _local_values(parts, gradients_of), _ACTION)
        payloads, of_rank = all_gather_bytes(local, self._ranks.group)
        values = [json_values.loads(raw, "the ranks' values") for raw in payloads]
        self._warn_of_local_buffers([one["buffers"] for one in values])
        accumulated = [name for name in gradients_of if any(name in one["waiting"] for one in values)]
        saved_values = [
            {
                "dataloaders": rank_values["dataloaders"],
                "gradients": {name: rank_values["gradients"][name] for name in accumulated},
            }
            for rank_values in values
        ]
        return _GatheredState(
            per_rank=PerRank(values=saved_values, of_rank=list(of_rank)),
            optimizer_values=values_of,
            accumulated={name: gradients_of[name] for name in accumulated},
            reduced=[name for name in accumulated if any(name in one["reduced"] for one in values)],
        )

    def _warn_of_local_buffers(self, checksums: Sequence[Mapping[str, int]]) -> None:
        """Warn once if buffers differ between ranks, of which a checkpoint keeps one rank's."""
        names = dict.fromkeys(name for one in checksums for name in one)
        differing = [name for name in names if len({one[name] for one in checksums if name in one}) > 1]
        if differing and self._ranks.rank == 0 and not self._has_warned_of_buffers:
            self._has_warned_of_buffers = True
            get_dist_logger().warning(
                f"the ranks differ in the buffers {format_list(differing, _MAX_NAMES)}, as broadcast_buffers=False"
                " leaves each rank its own: the checkpoint has those of one rank, with which all ranks resume. Pass"
                " broadcast_buffers=True, or sync_batch_norm=True for the statistics of batches"
            )

    def _request(
        self,
        root: Path,
        parts: TrainingParts,
        random_state: Mapping[str, Any],
        gathered: _GatheredState,
        extra: Any,
        metadata: Mapping[str, Any],
        options: SaveOptions,
    ) -> SaveRequest:
        step_directories = StepDirectories(self._storage, root)
        target = root if options.step is None else step_directories.step_path(options.step)
        document = TrainingDocument(
            facts=self._facts(metadata, options, root, step_directories),
            models=list(parts.models),
            optimizers=list(parts.optimizers),
            gradients=list(gathered.accumulated),
            reduced=gathered.reduced,
            lr_schedulers={name: scheduler_document(scheduler) for name, scheduler in parts.lr_schedulers.items()},
            dataloaders=list(parts.dataloaders),
            per_rank=gathered.per_rank,
            extra=extra,
        )
        return SaveRequest(
            parts=list(self._parts(target, parts, random_state, gathered, options)),
            documents={TRAINING_STATE: document.encode()},
            manifest_name=TRAINING_STATE_MANIFEST,
            metadata=document.facts,
            is_stale=self._is_stale(target, parts),
            is_related=None if options.step is None else step_directories.is_step,
            after_commit=None if options.step is None else self._after_commit(step_directories, target.name, options),
        )

    def _parts(
        self,
        target: Path,
        parts: TrainingParts,
        random_state: Mapping[str, Any],
        gathered: _GatheredState,
        options: SaveOptions,
    ) -> Iterator[CheckpointPart]:
        to_model, to_optimizer = (
            save_target(
                target,
                kind,
                shard=True,
                size_per_shard=options.size_per_shard,
                use_safetensors=options.use_safetensors,
            )
            for kind in (MODEL, OPTIMIZER)
        )
        for name, model in parts.models.items():
            yield model_part(model, to_model, name, parts.frozen[name] if options.exclude_frozen_parameters else None)
        for name, optimizer in parts.optimizers.items():
            yield optimizer_part(optimizer, to_optimizer, gathered.optimizer_values[name], name)
        for name, pending in gathered.accumulated.items():
            yield gradients_part(pending, to_model, name)
        rank = self._ranks.rank  # each writes its own random state
        states = [TensorSlice.full(f"rank{rank}.{name}", one, primary=True) for name, one in random_state.items()]
        yield CheckpointPart(target=to_model.with_kind(RANDOM_STATE), slices=states)

    def _facts(
        self, metadata: Mapping[str, Any], options: SaveOptions, root: Path, folders: StepDirectories
    ) -> dict[str, Any]:
        sequence = 0  # only rank 0's value is written
        if self._ranks.rank == 0:
            sequence = max(folders.next_sequence(), self._issued.get(root, 0) + 1)
            self._issued[root] = sequence
        common = save_metadata(self._ranks.size)
        versions = {name: str(version) for name, version in common["versions"].items()}
        versions["python"] = platform.python_version()
        excluded = {EXCLUDES_FROZEN: True} if options.exclude_frozen_parameters else {}
        return {**common, **metadata, **excluded, "versions": versions, "step": options.step, "sequence": sequence}

    def _after_commit(self, folders: StepDirectories, name: str, options: SaveOptions) -> Callable[[], None]:
        if self._ranks.rank == 0:
            folders.check_latest_writable()

        def announce() -> None:
            folders.update_latest(name)
            if options.keep_last is not None:
                folders.remove_old(options.keep_last)

        return announce

    def _is_stale(self, target: Path, parts: TrainingParts) -> Callable[[str], bool]:
        """Return a predicate for leftovers of the replaced save: RNG states, gradients and its other parts."""
        folders = set(parts.folders()) | {""}

        @cache
        def replaced_kinds() -> dict[str, list[FileKind]]:  # first called at the commit, after saves in flight
            return self._replaced_kinds(target)

        def is_stale(name: str) -> bool:
            folder, _, base = name.rpartition("/")
            always = (GRADIENTS, RANDOM_STATE) if folder in folders else ()
            for kind in (*always, *replaced_kinds().get(folder, ())):
                for is_safetensors in (True, False):
                    names = kind.names(is_safetensors=is_safetensors)
                    if names.may_have_written(base) or (kind == OPTIMIZER and base == names.groups):
                        return True
            return False

        return is_stale

    def _replaced_kinds(self, target: Path) -> dict[str, list[FileKind]]:
        try:
            manifest = read_training_manifest(self._storage, target)
        except CheckpointError:
            return {}  # damaged, but about to be replaced
        found: dict[str, list[FileKind]] = {}
        for document in () if manifest is None else manifest.documents:
            folder, _, base = document.rpartition("/")
            kinds = (MODEL, OPTIMIZER, GRADIENTS, RANDOM_STATE)
            found.setdefault(folder, []).extend(kind for kind in kinds if kind.names_of(base) is not None)
        return found


def _local_values(parts: TrainingParts, pending: Mapping[str, AccumulatedGradients]) -> bytes:
    values = {
        "dataloaders": {name: loader.state_dict() for name, loader in parts.dataloaders.items()},
        "gradients": {name: gradients.counts().to_plain() for name, gradients in pending.items()},
        "waiting": [name for name, gradients in pending.items() if gradients.has_gradients],
        "buffers": {
            f"{name}.{one.name}".lstrip("."): tensor_crc32(one.tensor)
            for name, model in parts.models.items()
            if not model.broadcasts_buffers
            for one in model.tensor_slices()
            if not one.shared
        },
        "reduced": [name for name, gradients in pending.items() if gradients.reduced()],
    }
    return json_values.dumps(values, "a dataloader's position").encode()
