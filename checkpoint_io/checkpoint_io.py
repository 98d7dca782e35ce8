"""Checkpoint engine of all plugins: translates calls into checkpoint parts for saving and into loads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from booster.comm import is_fake_world
from booster.errors import ConfigError, incomplete_error
from booster.interface import AccumulatedGradients, ModelWrapper, OptimizerState, OptimizerWrapper, TensorSlice
from booster.interface.checkpoint_io import AdapterFiles, CheckpointIO, SaveOptions, TrainingParts

from .commit import replaced_file
from .formats import json_values
from .formats.json import MAX_JSON_BYTES, json_bytes
from .layout import ADAPTER, MODEL, OPTIMIZER, as_path, save_target
from .loading.load import Loader, ModelLoad, OptimizerLoad, WrapsPlainObject, incomplete_on_failure
from .parallel import CheckpointGroup
from .saving.part import CheckpointPart, model_part, optimizer_part, optimizer_values, save_metadata
from .saving.save import Saver, SaveRequest, explain_missing_parents
from .storage import FakeStorage, Storage
from .training_state.document import scheduler_document, scheduler_state
from .training_state.load import load_training_state
from .training_state.save import TrainingStateSaver


class GeneralCheckpointIO(CheckpointIO):
    """Saves and loads the slices that the wrappers describe: replicated or sharded in any layout.

    Every rank writes and reads only its own slices; nothing is gathered.

    Args:
        group: Process group that saves and loads. Optional, defaults to the world, or to this process alone if
            torch.distributed is not initialized.
        storage: Storage of the files. Optional, defaults to the local file system.
        timeout_seconds: Timeout for the other ranks in each phase of a save; the error names the missing ranks.
            Optional, defaults to `checkpoint_timeout_seconds` of the launch.
        host: Host name of this rank. Optional, defaults to the system's. Each file on a shared file system is written
            by one host.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        storage: Storage | None = None,
        *,
        timeout_seconds: float | None = None,
        host: str | None = None,
    ) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"group={group!r} is a {type(group).__name__}: give a process group, such as plugin.data_group, or"
                " leave it out for all ranks"
            )
        if timeout_seconds is not None and not (isinstance(timeout_seconds, (int, float)) and timeout_seconds > 0):
            raise ConfigError(
                f"timeout_seconds={timeout_seconds!r} is not a positive number: give seconds above 0, or None for the"
                " timeout of the launch"
            )
        self.ranks = CheckpointGroup(group, host)
        self.storage = storage or (FakeStorage() if is_fake_world() else Storage())
        self.saver = Saver(self.ranks, self.storage, timeout_seconds)
        self._training_saver = TrainingStateSaver(self.ranks, self.storage, self.saver)

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str],
        *,
        shard: bool = False,
        prefix: str | None = None,
        size_per_shard: float | str = 1024,
        use_safetensors: bool | None = None,
        use_async: bool = False,
    ) -> None:
        """Write the model; see `CheckpointIO.save_model`. Collective over the group.

        In a directory, a model that fits into one shard becomes `model.safetensors` without an index, and files of an
        older save with the same prefix, in either format, are removed. Beside a single file there are no configs.
        """
        action = "saving the model"
        wrapped = self.ranks.run_on_all_ranks(lambda: _as_model_wrapper(model, is_primary=self.ranks.rank == 0), action)
        wrapped.require_equal_copies()
        target = partial(
            save_target,
            checkpoint,
            MODEL,
            shard=shard,
            prefix=prefix,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
        )
        self._save(lambda: [model_part(wrapped, target())], action, use_async)

    def load_model(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str],
        *,
        strict: bool = True,
        verify: str = "checksums",
    ) -> None:
        """Load the model; see `CheckpointIO.load_model` and `ModelLoad`. Collective over the group."""
        self.saver.wait()
        path = as_path(checkpoint)
        wrapped = self.ranks.run_on_all_ranks(
            lambda: _as_model_wrapper(model, is_primary=self.ranks.rank == 0), f"loading the model from {path}"
        )
        with Loader(self.ranks, self.storage, verify) as loader:
            load = ModelLoad(loader, wrapped, path, strict=strict)
            load.check()
            with incomplete_on_failure([wrapped]):
                load.fill()

    def save_adapters(
        self,
        model: ModelWrapper,
        checkpoint: str | os.PathLike[str],
        prepare: Callable[[], Mapping[str, AdapterFiles]],
        *,
        use_async: bool = False,
    ) -> None:
        """Write adapters of a model into a directory, each into one file, without a gather. Collective over the group.

        Args:
            model: Boosted model.
            checkpoint: Directory.
            prepare: Function that returns the files of each adapter, by its subdirectory.
            use_async: If True, write in the background.

        Raises:
            CheckpointError: See `CheckpointIO.save_model`.
        """
        model.require_equal_copies()

        def parts() -> list[CheckpointPart]:
            target = save_target(checkpoint, ADAPTER, shard=True, size_per_shard="1TB")
            return [
                CheckpointPart(target=target, slices=one.slices, folder=folder, documents=one.documents)
                for folder, one in prepare().items()
            ]

        self._save(parts, "saving the adapters", use_async)

    def save_optimizer(
        self,
        optimizer: OptimizerWrapper | Optimizer,
        checkpoint: str | os.PathLike[str],
        *,
        shard: bool = False,
        prefix: str | None = None,
        size_per_shard: float | str = 1024,
        use_safetensors: bool | None = None,
        use_async: bool = False,
    ) -> None:
        """Write the optimizer; see `CheckpointIO.save_optimizer`. Collective over the group.

        In a directory there is always an index, and `optimizer_groups.json` with all values that are not tensors; a
        single file holds both.
        """

        action = "saving the optimizer"
        target, wrapped = self.ranks.run_on_all_ranks(
            lambda: (
                save_target(
                    checkpoint,
                    OPTIMIZER,
                    shard=shard,
                    prefix=prefix,
                    size_per_shard=size_per_shard,
                    use_safetensors=use_safetensors,
                ),
                as_optimizer_wrapper(optimizer, is_primary=self.ranks.rank == 0),
            ),
            action,
        )
        self._save(lambda: [optimizer_part(wrapped, target, optimizer_values(wrapped))], action, use_async)

    def load_optimizer(
        self,
        optimizer: OptimizerWrapper | Optimizer,
        checkpoint: str | os.PathLike[str],
        *,
        verify: str = "checksums",
    ) -> None:
        """Load the optimizer; see `CheckpointIO.load_optimizer` and `OptimizerLoad`. Collective over the group."""
        self.saver.wait()
        path = as_path(checkpoint)
        wrapped = self.ranks.run_on_all_ranks(
            lambda: as_optimizer_wrapper(optimizer, is_primary=self.ranks.rank == 0),
            f"loading the optimizer from {path}",
        )
        with Loader(self.ranks, self.storage, verify) as loader:
            load = OptimizerLoad(loader, wrapped, path)
            load.check()
            with incomplete_on_failure([wrapped]):
                load.fill()

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | os.PathLike[str]) -> None:
        """Write the scheduler's state; see `CheckpointIO.save_lr_scheduler`. Collective over the group.

        Raises:
            CheckpointError: A value of the state is not plain; the message names its key.
        """
        self.saver.wait()  # an asynchronous save may be about to create the directory
        path = as_path(checkpoint)

        def write() -> None:
            document = json_values.encode(scheduler_document(lr_scheduler), f"state of {type(lr_scheduler).__name__}")
            if self.ranks.rank != 0:
                return
            with (
                explain_missing_parents(self.storage, path, f"saving the LR scheduler to {path}"),
                replaced_file(self.storage, path) as new_path,
            ):
                self.storage.write_file(new_path, json_bytes(document))

        self.ranks.run_on_all_ranks(write, f"saving the LR scheduler to {path}")

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | os.PathLike[str]) -> None:
        """Load the scheduler's state; see `CheckpointIO.load_lr_scheduler`. Collective over the group.

        Raises:
            CheckpointError: The file is unreadable, or of another scheduler class.
            ConfigError: The scheduler was built with other settings.
        """
        self.saver.wait()
        path = as_path(checkpoint)

        def read() -> dict[str, Any]:
            if self.storage.kind(path) == "directory":
                raise ConfigError(f"{path} is a directory, but an LR scheduler is one file: give the file")
            raw = self.storage.read_file(path, max_bytes=MAX_JSON_BYTES)
            return scheduler_state(json_values.loads(raw, str(path)), lr_scheduler, path)

        action = f"loading the LR scheduler from {path}"
        state = self.ranks.run_on_all_ranks(read, action)
        self.ranks.run_on_all_ranks(lambda: lr_scheduler.load_state_dict(state), action)

    def save_training_state(
        self,
        checkpoint: str | os.PathLike[str],
        parts: TrainingParts,
        *,
        extra: Any = None,
        facts: Mapping[str, Any],
        options: SaveOptions,
        use_async: bool = False,
    ) -> None:
        """Write a training checkpoint; see `TrainingStateSaver.save`. Collective over the group."""
        self._training_saver.save(checkpoint, parts, extra=extra, metadata=facts, options=options, use_async=use_async)

    def load_training_state(
        self,
        checkpoint: str | os.PathLike[str],
        parts: TrainingParts,
        *,
        strict: bool = True,
        verify: str = "checksums",
        missing_ok: bool = False,
    ) -> Any:
        """Load a training checkpoint and return `extra`; see `load_training_state`. Collective over the group."""
        self.saver.wait()
        path = as_path(checkpoint)
        return load_training_state(
            self.ranks, self.storage, path, parts, strict=strict, verify=verify, missing_ok=missing_ok
        )

    def wait(self) -> None:
        """Wait until no save is in flight; see `CheckpointIO.wait`. Collective over the group."""
        self.saver.wait()

    def _save(self, prepare: Callable[[], list[CheckpointPart]], action: str, use_async: bool) -> None:
        metadata = save_metadata(self.ranks.size)
        self.saver.save(lambda: SaveRequest(parts=prepare(), metadata=metadata), action, use_async=use_async)


# A boosted optimizer's states are named after the model's parameters. A plain optimizer has names only if it was built
# from them, `AdamW(model.named_parameters())`; then its checkpoint equals that of a boosted one. Otherwise the name is
# the index over all groups, as in torch's state_dict, and matches only an optimizer that is built the same way.


def _as_model_wrapper(model: nn.Module, *, is_primary: bool) -> ModelWrapper:
    """Return a boosted model unchanged, and wrap any other module, of which the primary rank's values are written."""
    if isinstance(model, ModelWrapper):
        return model
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"a {type(model).__name__} was given for the model: give the one that boost() returned, or a"
            " torch.nn.Module"
        )
    return _PlainModel(model, is_primary=is_primary)


# A plain model or optimizer is wrapped anew for every call, so a hook of its own raises while it is incomplete: at the
# model's forward, or at the optimizer's step. With the handle that removes the hook, and the error of the failed load.
_refusals: WeakKeyDictionary[nn.Module | Optimizer, tuple[RemovableHandle, str]] = WeakKeyDictionary()


def _refuse(owner: nn.Module | Optimizer, name: str, error: str | None) -> None:
    """Have a plain model or optimizer raise when it is used, or no longer if there is no error."""
    if owner in _refusals:
        _refusals.pop(owner)[0].remove()
    if error is None:
        return

    def raise_error(*_: object) -> None:
        raise incomplete_error(name, error)

    register = owner.register_forward_pre_hook if isinstance(owner, nn.Module) else owner.register_step_pre_hook
    _refusals[owner] = (register(raise_error), error)


class _PlainModel(ModelWrapper, WrapsPlainObject):
    """Plain module: replicated on every rank, with values that may differ between ranks."""

    def __init__(self, module: nn.Module, *, is_primary: bool) -> None:
        super().__init__(module, is_primary=is_primary)
        if module in _refusals:
            self.failed_loads[self] = _refusals[module][1]

    def mark_object(self, error: str | None) -> None:
        _refuse(self.module, "model", error)

    def tensor_slices(self) -> list[TensorSlice]:
        return [replace(tensor_slice, shared=False) for tensor_slice in super().tensor_slices()]


def as_optimizer_wrapper(optimizer: OptimizerWrapper | Optimizer, *, is_primary: bool) -> OptimizerWrapper:
    """Return a boosted optimizer unchanged, and wrap any other.

    Args:
        optimizer: Optimizer.
        is_primary: Whether this rank's state of a plain optimizer is written.

    Raises:
        ConfigError: `optimizer` is not an optimizer.
    """
    if isinstance(optimizer, OptimizerWrapper):
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"a {type(optimizer).__name__} was given for the optimizer: give the one that boost() returned, or a"
            " torch.optim.Optimizer"
        )
    return _PlainOptimizer(optimizer, is_primary)


class _PlainOptimizer(OptimizerWrapper, WrapsPlainObject):
    """Plain optimizer: replicated on every rank."""

    def __init__(self, optim: Optimizer, is_primary: bool) -> None:
        super().__init__(optim, _NamedParameters(optim, is_primary))
        if optim in _refusals:
            self.model.failed_loads[self] = _refusals[optim][1]

    def mark_object(self, error: str | None) -> None:
        _refuse(self.optim, "optimizer", error)

    def checkpoint_state(self) -> OptimizerState:
        return _PlainState(self)

    def pending_gradients(self) -> AccumulatedGradients:
        return _UnmanagedGradients(self)


class _UnmanagedGradients(AccumulatedGradients):
    """Gradients of a plain optimizer. Without `booster.backward` their accumulation is unknown: they are left alone."""

    @property
    def has_gradients(self) -> bool:
        return False

    def clear(self) -> None:
        """Do nothing."""


class _PlainState(OptimizerState):
    def slices(self) -> list[TensorSlice]:
        # Plain optimizers are not synchronized between ranks: only the primary rank's state is written.
        return [replace(tensor_slice, shared=False) for tensor_slice in super().slices()]


class _NamedParameters(ModelWrapper):
    """Parameters of a plain optimizer as a model; stored fp32 master weights are loaded into them."""

    def __init__(self, optim: Optimizer, is_primary: bool) -> None:
        super().__init__(nn.Module(), is_primary=is_primary)
        named: dict[str, nn.Parameter] = {}
        number = 0
        for group in optim.param_groups:
            names = group.get("param_names", [None] * len(group["params"]))
            for name, parameter in zip(names, group["params"], strict=True):
                named[str(number) if name is None else name] = parameter
                number += 1
        self.__dict__["_named"] = named  # not registered: names may contain dots

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named.items()

    def tensor_slices(self) -> list[TensorSlice]:
        return [
            TensorSlice.full(name, parameter.detach(), primary=self._is_primary, shared=False)
            for name, parameter in self._named.items()
        ]
