"""Objects of a training run and save options: the arguments of `Booster.save` and `Booster.load`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from booster.checkpoint_io.destination import check_size_per_shard
from booster.checkpoint_io.training.rank_tensors import RandomState
from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper

__all__ = ["SaveOptions", "StatefulLoader", "TrainingParts"]

_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_\-]*")


class StatefulLoader(Protocol):
    """Dataloader with a resumable position."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the position."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """Objects of a training run by name; "" for a single one of its kind.

    Attributes:
        models: Boosted models.
        optimizers: Boosted optimizers, or wrapped plain ones.
        lr_schedulers: Objects with a scheduler's `state_dict`.
        dataloaders: Dataloaders with a resumable position.
        random_state: Random generators of this process.
    """

    models: Mapping[str, ModelWrapper]
    optimizers: Mapping[str, OptimizerWrapper]
    lr_schedulers: Mapping[str, Any]
    dataloaders: Mapping[str, StatefulLoader]
    random_state: RandomState

    def names(self) -> dict[str, list[str]]:
        """Return the names by kind, with the kinds of `TrainingDocument`."""
        kinds = ("models", "optimizers", "lr_schedulers", "dataloaders")
        return {kind: list(getattr(self, kind)) for kind in kinds}

    def folders(self) -> Iterator[str]:
        """Yield each subdirectory of models and optimizers once."""
        yield from dict.fromkeys([*self.models, *self.optimizers])

    def check(self) -> None:
        """Check that all names are valid directory names.

        Raises:
            ConfigError: A name is invalid.
        """
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
    size_per_shard: int = 1024
    use_safetensors: bool = True

    def check(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: A number is invalid.
        """
        if self.step is not None and (type(self.step) is not int or self.step < 0):
            raise ConfigError(f"step={self.step!r} is not a step number: give an integer of at least 0")
        check_size_per_shard(self.size_per_shard)
        if self.keep_last is None:
            return
        if self.step is None:
            raise ConfigError(
                f"keep_last={self.keep_last!r} is a number of steps to keep, but without step= the path itself is"
                " written: give step as well, or leave keep_last out"
            )
        if type(self.keep_last) is not int or self.keep_last < 1:
            raise ConfigError(f"keep_last={self.keep_last!r} would keep no step: give an integer of at least 1")
