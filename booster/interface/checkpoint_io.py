"""Interface between the facade and the checkpoint engine of a plugin."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from booster.core.model_wrapper import ModelWrapper
from booster.core.optimizer_wrapper import OptimizerWrapper
from booster.core.shard_spec import TensorSlice
from booster.errors import ConfigError
from booster.rng_state import ProcessRNG as ProcessRNG
from booster.validation import is_non_nan_number, size_from_text

_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_\-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """Objects of a training run by name; "" for a single one of its kind.

    Attributes:
        models: Boosted models.
        optimizers: Boosted optimizers, or wrapped plain ones.
        lr_schedulers: Objects with a scheduler's `state_dict`.
        dataloaders: Dataloaders with a resumable position: `state_dict` returns plain values.
        random_state: Random generators of this process.
        frozen: Names of frozen parameters of this rank by model, which a checkpoint may leave out.
    """

    models: Mapping[str, ModelWrapper]
    optimizers: Mapping[str, OptimizerWrapper]
    lr_schedulers: Mapping[str, Any]
    dataloaders: Mapping[str, Any]
    random_state: ProcessRNG
    frozen: Mapping[str, Collection[str]] = field(default_factory=dict)

    def names(self) -> dict[str, list[str]]:
        """Return the names by kind, with the kinds of `training_state.json`."""
        kinds = ("models", "optimizers", "lr_schedulers", "dataloaders")
        return {kind: list(getattr(self, kind)) for kind in kinds}

    def folders(self) -> Iterator[str]:
        """Yield each subdirectory of models and optimizers once."""
        yield from dict.fromkeys([*self.models, *self.optimizers])

    def check(self) -> None:
        """Raise `ConfigError` unless all names are valid directory names."""
        for folder in self.folders():
            if folder and (_FOLDER.fullmatch(folder) is None or folder == "latest" or folder.startswith("step-")):
                raise ConfigError(
                    f"{folder!r} is the name of a model or an optimizer and of its directory in a checkpoint: use"
                    " letters, digits, '_' and '-', and neither 'latest' nor 'step-...'"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Save options; see `Booster.save`."""

    step: int | None = None
    keep_last: int | None = None
    size_per_shard: float | str = 1024
    use_safetensors: bool = True
    exclude_frozen_parameters: bool = False

    def check(self) -> None:
        """Raise `ConfigError` if a number is invalid."""
        if self.step is not None and (type(self.step) is not int or self.step < 0):
            raise ConfigError(f"step={self.step!r} is not a step number: give an integer of at least 0")
        shard_bytes(self.size_per_shard)
        if self.keep_last is None:
            return
        if self.step is None:
            raise ConfigError(
                f"keep_last={self.keep_last!r} is a number of steps to keep, but without step= the path itself is"
                " written: give step as well, or leave keep_last out"
            )
        if type(self.keep_last) is not int or self.keep_last < 1:
            raise ConfigError(f"keep_last={self.keep_last!r} would keep no step: give an integer of at least 1")


def shard_bytes(size_per_shard: Any) -> int:
    """Return a maximum file size in bytes.

    Args:
        size_per_shard: Number of MB (10**6 bytes), or a text with a unit, such as "5GB" (10**9) or "2GiB" (2**30).

    Raises:
        ConfigError: It is not such a size.
    """
    if is_non_nan_number(size_per_shard) and 0 < size_per_shard < float("inf"):
        size: float = size_per_shard * 10**6
    else:
        size = (isinstance(size_per_shard, str) and size_from_text(size_per_shard)) or 0
    if size == 0:
        raise ConfigError(
            f"size_per_shard={size_per_shard!r} is not a size: give a number of MB above 0, such as 1024, or a text"
            " with one of the units KB, MB, GB, TB, KiB, MiB, GiB, TiB, such as '5GB'"
        )
    return max(1, round(size))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """Files of one adapter of a model.

    Attributes:
        slices: This rank's slices of its tensors, under their names in the file.
        documents: Further files by name.
    """

    slices: Sequence[TensorSlice]
    documents: Mapping[str, bytes]


class CheckpointIO(ABC):
    """Saves and loads boosted objects.

    Every method is collective: every rank must call it with the same arguments. A call either returns on every rank
    when the files are complete, or raises on every rank and leaves files and memory unchanged; for memory see `verify`
    of `load_model`.
    """

    @abstractmethod
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
        """Write the model's parameters and buffers under the user's names; tied ones once.

        In a directory, an older save with the same prefix is replaced, also one in the other format.

        Args:
            model: Boosted model, or a plain module, which is written by rank 0.
            checkpoint: File, by its suffix: `.safetensors`, or `.bin`, `.pt` or `.pth` for torch's format. Without a
                suffix, or with shard=True, a directory.
            shard: If True, write Hugging Face's sharded layout, with `config.json` if the model has a config. If False,
                write the tensors of a directory into one file.
            prefix: Hugging Face's `variant` in a directory's file names: `model.<prefix>-00001-of-00002.safetensors`.
                Optional.
            size_per_shard: Maximum shard size in MB (10**6 bytes), or with a unit, such as "5GB"; a single larger
                tensor gets its own larger shard.
            use_safetensors: If False, write torch's format, which `torch.load(weights_only=True)` opens. Optional,
                defaults to the format of the path's suffix, and to safetensors in directories.
            use_async: If True, return after a copy into host memory and write in the background. Training may continue
                at once; a failure is raised by the next call or by `wait`.

        Raises:
            ConfigError: The path is a directory instead of a file or vice versa, or of another format, or a size is
                invalid.
            CheckpointError: Writing failed on some rank, or the previous asynchronous save failed.
            RankFailedError: A rank did not respond within the timeout.
        """

    @abstractmethod
    def load_model(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str],
        *,
        strict: bool = True,
        verify: str = "checksums",
    ) -> None:
        """Load the model from a file or directory of this library, of `save_pretrained` or of `torch.save`.

        Args:
            model: Boosted model, or a plain module.
            checkpoint: File, index file, or directory.
            strict: If False, load tensors that match in name and shape; no match at all is still an error.
            verify: "checksums" reads every byte once and compares its checksum on the way; "before" compares all
                checksums before anything is changed, and reads twice; "structure" compares none.

        Raises:
            CheckpointError: Missing, unexpected or differing names and shapes, all in one message, or unreadable files;
                nothing was changed. Or data is damaged or lost on the way: then every use of the boosted model raises
                the error again until a load has succeeded; the values of a plain module are undefined.
        """

    @abstractmethod
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
        """Write the optimizer's states by parameter name, its groups, and the loss scaler; see `save_model`.

        For a plain torch optimizer, parameter names are those that it was built with, as in
        `torch.optim.AdamW(model.named_parameters())`, else the numbers of its `state_dict`.
        """

    @abstractmethod
    def load_optimizer(
        self,
        optimizer: OptimizerWrapper | Optimizer,
        checkpoint: str | os.PathLike[str],
        *,
        verify: str = "checksums",
    ) -> None:
        """Load the optimizer from the output of `save_optimizer`; see `load_model`."""

    @abstractmethod
    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | os.PathLike[str]) -> None:
        """Write the scheduler's state to one JSON file."""

    @abstractmethod
    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | os.PathLike[str]) -> None:
        """Load the scheduler from the output of `save_lr_scheduler`."""

    @abstractmethod
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
        """Write models, optimizers, schedulers, dataloaders and RNG states into one directory; see `Booster.save`.

        Args:
            checkpoint: Directory, or with `options.step` the parent directory of all steps.
            parts: Objects to save.
            extra: Further plain values.
            facts: JSON metadata of the save, such as plugin and parallel layout.
            options: Save options.
            use_async: See `save_model`.
        """

    @abstractmethod
    def load_training_state(
        self,
        checkpoint: str | os.PathLike[str],
        parts: TrainingParts,
        *,
        strict: bool = True,
        verify: str = "checksums",
        missing_ok: bool = False,
    ) -> Any:
        """Load the parts from the output of `save_training_state` and return `extra`; see `load_model`.

        With `missing_ok`, return None and change nothing if there is no training state.
        """

    @abstractmethod
    def wait(self) -> None:
        """Wait until no asynchronous save is in flight.

        Raises:
            CheckpointError: A save failed on some rank.
        """
