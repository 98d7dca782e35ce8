"""What a training run is made of, and how it is to be saved: the arguments of `Booster.save` and `Booster.load`."""

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
    """A dataloader that knows its position."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """The parts of a training run by name; "" is the name of the only one of its kind.

    Attributes:
        models: Boosted models.
        optimizers: Boosted optimizers, or views of plain ones.
        lr_schedulers: What has a scheduler's `state_dict`.
        dataloaders: Loaders that know their position.
        random_state: This process's generators.
    """

    models: Mapping[str, ModelWrapper]
    optimizers: Mapping[str, OptimizerWrapper]
    lr_schedulers: Mapping[str, Any]
    dataloaders: Mapping[str, StatefulLoader]
    random_state: RandomState

    def names(self) -> dict[str, list[str]]:
        """Return the names of each kind, as `TrainingDocument` calls the kinds."""
        kinds = ("models", "optimizers", "lr_schedulers", "dataloaders")
        return {kind: list(getattr(self, kind)) for kind in kinds}

    def folders(self) -> Iterator[str]:
        """Yield the folders that models and optimizers go to, each once."""
        yield from dict.fromkeys([*self.models, *self.optimizers])

    def check(self) -> None:
        """Raise for a name that can't be a folder's.

        Raises:
            ConfigError: Such a name.
        """
        for folder in self.folders():
            if folder and (_FOLDER.fullmatch(folder) is None or folder == "latest" or folder.startswith("step-")):
                raise ConfigError(
                    f"{folder!r} names a model or an optimizer, and its folder in a checkpoint is called so: use"
                    " letters, digits, '_' and '-', and neither 'latest' nor 'step-...'"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to save; see `Booster.save` for the arguments."""

    step: int | None = None
    keep_last: int | None = None
    size_per_shard: int = 1024
    use_safetensors: bool = True

    def check(self) -> None:
        """Raise for numbers that can't be.

        Raises:
            ConfigError: Such a number.
        """
        if self.step is not None and (type(self.step) is not int or self.step < 0):
            raise ConfigError(f"step={self.step!r} is no number of steps: give a whole number from 0 on")
        check_size_per_shard(self.size_per_shard)
        if self.keep_last is None:
            return
        if self.step is None:
            raise ConfigError(
                f"keep_last={self.keep_last!r} says how many steps to keep, and without step= the path itself is"
                " written: give step as well, or leave keep_last out"
            )
        if type(self.keep_last) is not int or self.keep_last < 1:
            raise ConfigError(f"keep_last={self.keep_last!r} would keep nothing: give a whole number from 1 on")
