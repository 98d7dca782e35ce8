"""The contract between the facade and whatever writes and reads a plugin's checkpoints."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from booster.checkpoint_io.training.training_parts import SaveOptions, TrainingParts
    from booster.interface import OptimizerWrapper

__all__ = ["CheckpointIO"]


class CheckpointIO(ABC):
    """Saves and loads boosted objects.

    Every method is collective: every rank must call it, with the same arguments. A call returns on every rank only
    when the files are complete, or raises on every rank and leaves what was on disk, and in memory, as it was.
    """

    @abstractmethod
    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str],
        *,
        shard: bool = False,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,
        use_async: bool = False,
    ) -> None:
        """Write the model's parameters and buffers under the user's names, tied ones once.

        Args:
            model: The boosted model, or a plain module, of which rank 0 writes its own.
            checkpoint: A file (shard=False) or a directory (shard=True).
            shard: Write Hugging Face's sharded layout, with `config.json` where the model has a config.
            prefix: Put into the file names, as Hugging Face's `variant`: `model.<prefix>-00001-of-00002.safetensors`.
            size_per_shard: Largest shard in MB (10**6 bytes); a single larger tensor makes a larger shard.
            use_safetensors: False writes `.bin` files, which `torch.load(weights_only=True)` opens.
            use_async: Return after a copy into host memory and write in the background. The model may be trained on
                at once; what goes wrong is raised by the next call here, or by `wait`.

        Raises:
            ConfigError: A directory where a file is expected or the reverse, or a size below 1.
            CheckpointError: Writing failed on some rank, or the checkpoint before this one in the background.
            RankFailedError: A rank did not come in time.
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
        """Fill the model from a file or a directory that this library, `save_pretrained` or `torch.save` wrote.

        Args:
            model: The boosted model, or a plain module.
            checkpoint: A file, an index file, or a directory.
            strict: False loads what matches in name and shape; a checkpoint that matches nothing is an error still.
            verify: "checksums" reads everything that a checksum was recorded for before anything is loaded;
                "structure" trusts the bytes.

        Raises:
            CheckpointError: Missing, unexpected or differing names and shapes, all in one message; unreadable files.
        """

    @abstractmethod
    def save_optimizer(
        self,
        optimizer: OptimizerWrapper | Optimizer,
        checkpoint: str | os.PathLike[str],
        *,
        shard: bool = False,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,
        use_async: bool = False,
    ) -> None:
        """Write the optimizer's states by parameter name, its groups, and the loss scaler; see `save_model`.

        A plain torch optimizer is taken too: its parameters have the names that it was built with, as in
        `torch.optim.AdamW(model.named_parameters())`, or are numbered as in its own `state_dict`.
        """

    @abstractmethod
    def load_optimizer(
        self,
        optimizer: OptimizerWrapper | Optimizer,
        checkpoint: str | os.PathLike[str],
        *,
        verify: str = "checksums",
    ) -> None:
        """Fill the optimizer from what `save_optimizer` wrote; see `load_model`."""

    @abstractmethod
    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | os.PathLike[str]) -> None:
        """Write the scheduler's state to one JSON file."""

    @abstractmethod
    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | os.PathLike[str]) -> None:
        """Take over what `save_lr_scheduler` wrote."""

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
        """Write models, optimizers, schedulers, loaders and random states into one directory; see `Booster.save`.

        Args:
            checkpoint: The directory, or with `options.step` the one that holds a directory for every step.
            parts: What to save.
            extra: Further plain values.
            facts: What to say of the save: the plugin, the layout of the ranks.
            options: How to save.
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
        """Fill the parts from what `save_training_state` wrote and returns `extra`; see `load_model`.

        With `missing_ok` it returns None, and changes nothing, where there is no whole training state at all.
        """

    @abstractmethod
    def wait(self) -> None:
        """Return when no save is under way in the background any more.

        Raises:
            CheckpointError: One of them failed, on whichever rank.
        """
