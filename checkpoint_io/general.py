"""Checkpoints of models that every rank holds whole: one rank writes, all ranks read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from booster.checkpoint_io import json_values
from booster.checkpoint_io.commit import new_file
from booster.checkpoint_io.interface import CheckpointIO
from booster.checkpoint_io.layout import MODEL, OPTIMIZER
from booster.checkpoint_io.matching import Match, match_names, part_of
from booster.checkpoint_io.optimizer_values import MASTER_SUFFIX, parse_values
from booster.checkpoint_io.reader import Checkpoint, open_checkpoint, read_json
from booster.checkpoint_io.save_request import SaveRequest
from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.writer import write_json
from booster.comm import all_reduce_numbers, group_rank, raise_on_all_ranks
from booster.errors import BoosterError, CheckpointError, ConfigError
from booster.interface import ModelWrapper, OptimizerState, OptimizerWrapper, TensorSlice

__all__ = ["GeneralCheckpointIO"]

T = TypeVar("T")


class GeneralCheckpointIO(CheckpointIO):
    """Writes by the one rank whose slices are primary, which must hold everything whole; reads on every rank.

    Args:
        group: The ranks that call together; None: the world, or this process alone where nothing was launched.
        storage: Where files are; None: the local file system.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, storage: Storage | None = None) -> None:
        self.group = group
        self.storage = Storage() if storage is None else storage

    def save_model(
        self,
        model: ModelWrapper,
        checkpoint: str | PathLike[str],
        *,
        shard: bool = False,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,
    ) -> None:
        """Writes the model; see `CheckpointIO.save_model`. Collective over the group.

        With `shard=True`, a model that fits into one shard becomes `model.safetensors` without an index, and files of
        an older save under the same prefix and format go. `shard=False` takes the path as it is, without configs.
        """

        def prepare() -> tuple[SaveRequest, dict[str, torch.Tensor], bool]:
            request = SaveRequest(checkpoint, MODEL, shard, prefix, size_per_shard, use_safetensors)
            return request, *self._whole_tensors(model.tensor_slices())

        request, tensors, is_writer = self._agree(prepare, "saving the model")
        self._check_one_writer(is_writer)
        self._agree(
            lambda: request.write_model(self.storage, model.unwrap(), tensors) if is_writer else None,
            f"saving the model to {request.path}",
        )

    def load_model(self, model: ModelWrapper, checkpoint: str | PathLike[str], *, strict: bool = True) -> None:
        """Fills the model; see `CheckpointIO.load_model`. Collective over the group.

        A tied tensor may be stored under any of its names. Floats are converted to the model's own float format;
        between other formats only what is lossless is.
        """
        path = _as_path(checkpoint)
        with ExitStack() as stack:

            def check() -> tuple[Checkpoint, Match, list[TensorSlice]]:
                stored = stack.enter_context(open_checkpoint(self.storage, path, MODEL))
                slices = model.tensor_slices()
                match = match_names(stored.specs, slices, model.tied_names())
                match.check(str(path), strict=strict)
                if strict:
                    _check_duplicates(stored, match)
                return stored, match, slices

            stored, match, slices = self._agree(check, f"loading the model from {path}")

            def fill() -> None:
                _fill(stored, {match.sources[part.name]: part for part in slices if part.name in match.sources})
                model.notify_loaded()

            self._agree(fill, f"loading the model from {path}")

    def save_optimizer(
        self,
        optimizer: OptimizerWrapper,
        checkpoint: str | PathLike[str],
        *,
        shard: bool = False,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,
    ) -> None:
        """Writes the optimizer; see `CheckpointIO.save_optimizer`. Collective over the group.

        With `shard=True` there is always an index, and beside it `optimizer_groups.json` with everything that is no
        tensor; `shard=False` puts both into one file.
        """

        def prepare() -> tuple[SaveRequest, dict[str, torch.Tensor], bool, str]:
            request = SaveRequest(checkpoint, OPTIMIZER, shard, prefix, size_per_shard, use_safetensors)
            state = optimizer.checkpoint_state()
            groups = json_values.dumps(state.values(), "the optimizer's values")
            tensors, is_writer = self._whole_tensors(state.slices(), is_primary=optimizer.is_primary)
            return request, tensors, is_writer, groups

        request, tensors, is_writer, groups = self._agree(prepare, "saving the optimizer")
        self._check_one_writer(is_writer)
        self._agree(
            lambda: request.write_optimizer(self.storage, tensors, groups) if is_writer else None,
            f"saving the optimizer to {request.path}",
        )

    def load_optimizer(self, optimizer: OptimizerWrapper, checkpoint: str | PathLike[str]) -> None:
        """Fills the optimizer; see `CheckpointIO.load_optimizer`. Collective over the group.

        fp32 master weights that are stored fill the optimizer's; one that keeps none gets them into the parameters
        themselves, as they are the more exact weights: load the model first. Where none are stored, masters follow the
        model's weights.
        """
        path = _as_path(checkpoint)
        with ExitStack() as stack:

            def check() -> tuple[Checkpoint, OptimizerState, dict[str, Any]]:
                stored = stack.enter_context(open_checkpoint(self.storage, path, OPTIMIZER))
                if stored.groups is None:
                    raise CheckpointError(f"{path} holds no param groups: it is no optimizer that save_optimizer wrote")
                values = parse_values(stored.groups, stored.specs, str(path))
                state = optimizer.checkpoint_state()
                state.check(stored.specs, values)
                return stored, state, values

            stored, state, values = self._agree(check, f"loading the optimizer from {path}")
            self._agree(lambda: _fill_optimizer(optimizer, stored, state, values), f"loading the optimizer from {path}")

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | PathLike[str]) -> None:
        """Writes the scheduler's state; see `CheckpointIO.save_lr_scheduler`. Collective over the group.

        Raises:
            CheckpointError: The state holds something that is no plain value; the message names its key.
        """
        path = _as_path(checkpoint)

        def write() -> None:
            name = type(lr_scheduler).__name__
            document = {"scheduler": name, "state": json_values.encode(lr_scheduler.state_dict(), f"state of {name}")}
            if group_rank(self.group) == 0:
                with new_file(self.storage, path) as file:
                    write_json(file, document)

        self._agree(write, f"saving the LR scheduler to {path}")

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | PathLike[str]) -> None:
        """Takes over the scheduler's state; see `CheckpointIO.load_lr_scheduler`. Collective over the group.

        Raises:
            CheckpointError: The file is unreadable, or of another class of scheduler.
        """
        path = _as_path(checkpoint)

        def read() -> dict[str, Any]:
            if path.is_dir():
                raise ConfigError(f"{path} is a directory, and an LR scheduler is one file: give the file")
            return _scheduler_state(json_values.loads(read_json(self.storage, path), str(path)), lr_scheduler, path)

        state = self._agree(read, f"loading the LR scheduler from {path}")
        self._agree(lambda: lr_scheduler.load_state_dict(state), f"loading the LR scheduler from {path}")

    def _agree(self, action: Callable[[], T], doing: str) -> T:
        """Returns what the action gives, once it succeeded on every rank; else raises on every rank."""
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(action())
        except BoosterError as error:
            failure = error
        except OSError as error:
            failure = CheckpointError(f"{doing} failed: {error}. Check the path, its permissions and the free space")
            failure.__cause__ = error
        except Exception as error:  # raised below, by every rank
            failure = error
        raise_on_all_ranks(failure, self.group)
        return results[0]

    def _whole_tensors(
        self, slices: Sequence[TensorSlice], is_primary: bool | None = None
    ) -> tuple[dict[str, torch.Tensor], bool]:
        """Returns this rank's tensors by name and whether it is the one that writes them."""
        parts = [part.name for part in slices if not part.is_whole]
        if parts:
            raise ConfigError(
                f"this rank holds only a part of {parts[0]!r} and of {len(parts) - 1} others, and GeneralCheckpointIO"
                " writes from one rank that holds everything: take the CheckpointIO of the plugin that sharded them"
            )
        primaries = {part.primary for part in slices}
        if len(primaries) > 1:
            raise ConfigError(
                "this rank is to write some tensors and other ranks the rest, and GeneralCheckpointIO writes from one"
                " rank: take the CheckpointIO of the plugin that placed them"
            )
        without_slices = group_rank(self.group) == 0 if is_primary is None else is_primary
        return {part.name: part.tensor for part in slices}, primaries.pop() if primaries else without_slices

    def _check_one_writer(self, is_writer: bool) -> None:
        num_writers = int(all_reduce_numbers([float(is_writer)], self.group)[0])
        if num_writers != 1:
            raise ConfigError(
                f"{num_writers} ranks hold primary slices, and GeneralCheckpointIO writes from exactly one: pass"
                " is_primary=True to the wrappers of one of the ranks that hold the same parameters"
            )


def _as_path(checkpoint: str | PathLike[str]) -> Path:
    text = fspath(checkpoint)
    if not text:
        raise ConfigError("the checkpoint's path is empty: give a file or a directory")
    return Path(text)


def _check_duplicates(stored: Checkpoint, match: Match) -> None:
    for taken, others in match.duplicates.items():
        differing = [name for name in others if not torch.equal(stored.read(taken), stored.read(name))]
        if differing:
            raise CheckpointError(
                f"{taken!r} and {differing[0]!r} are one tied tensor in the model, but differ in {stored.path}, nothing"
                " was loaded: untie them in the model, or pass strict=False to load the first"
            )


def _fill(stored: Checkpoint, parts: Mapping[str, TensorSlice]) -> None:
    with torch.no_grad():
        for name, part in parts.items():
            part.tensor.copy_(part_of(stored.read(name), part))


def _fill_optimizer(
    optimizer: OptimizerWrapper, stored: Checkpoint, state: OptimizerState, values: Mapping[str, Any]
) -> None:
    masters = [part.name for part in state.slices() if part.name.endswith(MASTER_SUFFIX)]
    if optimizer.master_weights is not None and any(name not in stored.specs for name in masters):
        optimizer.master_weights.refresh()
    parts = {part.name: part for part in state.allocate(stored.specs, values)}
    _fill(stored, parts)
    in_parameters = dict(_masters_without_place(optimizer, stored, parts))
    if in_parameters:
        _fill(stored, in_parameters)
        optimizer.model.notify_loaded()


def _masters_without_place(
    optimizer: OptimizerWrapper, stored: Checkpoint, parts: Mapping[str, TensorSlice]
) -> Iterator[tuple[str, TensorSlice]]:
    of_model = {part.name: part for part in optimizer.model.tensor_slices()}
    for name in stored.specs:
        parameter = name.removesuffix(MASTER_SUFFIX)
        if name.endswith(MASTER_SUFFIX) and name not in parts and parameter in of_model:
            yield name, of_model[parameter]


def _scheduler_state(document: Any, lr_scheduler: LRScheduler, path: Path) -> dict[str, Any]:
    state = document.get("state") if isinstance(document, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no scheduler's state: give a file that save_lr_scheduler wrote")
    name = type(lr_scheduler).__name__
    if document.get("scheduler") != name:
        raise CheckpointError(
            f"{path} holds the state of a {document.get('scheduler')!s:.80}, not of a {name}: build the scheduler"
            " that was saved"
        )
    return state
