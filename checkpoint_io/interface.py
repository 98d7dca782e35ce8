"""The contract between the facade and whatever writes and reads a plugin's checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from os import PathLike
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from booster.interface import ModelWrapper, OptimizerWrapper

__all__ = ["CheckpointIO"]


class CheckpointIO(ABC):
    """Saves and loads boosted objects.

    Every method is collective: every rank must call it, with the same arguments. A call returns on every rank only
    when the files are complete, or raises on every rank and leaves what was on disk, and in memory, as it was.
    """

    @abstractmethod
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
        """Writes the model's parameters and buffers under the user's names, tied ones once.

        Args:
            model: The boosted model.
            checkpoint: A file (shard=False) or a directory (shard=True).
            shard: Write Hugging Face's sharded layout, with `config.json` where the model has a config.
            prefix: Put into the file names, as Hugging Face's `variant`: `model.<prefix>-00001-of-00002.safetensors`.
            size_per_shard: Largest shard in MB (10**6 bytes); a single larger tensor makes a larger shard.
            use_safetensors: False writes `.bin` files by `torch.save`.

        Raises:
            ConfigError: A directory where a file is expected or the reverse, or a size below 1.
            CheckpointError: Writing failed on some rank.
        """

    @abstractmethod
    def load_model(self, model: ModelWrapper, checkpoint: str | PathLike[str], *, strict: bool = True) -> None:
        """Fills the model from a file or a directory that this library, `save_pretrained` or `torch.save` wrote.

        Args:
            model: The boosted model.
            checkpoint: A file, an index file, or a directory.
            strict: False loads what matches in name and shape; a checkpoint that matches nothing is an error still.

        Raises:
            CheckpointError: Missing, unexpected or differing names and shapes, all in one message; unreadable files.
        """

    @abstractmethod
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
        """Writes the optimizer's states by parameter name, its groups, and the loss scaler; see `save_model`."""

    @abstractmethod
    def load_optimizer(self, optimizer: OptimizerWrapper, checkpoint: str | PathLike[str]) -> None:
        """Fills the optimizer from what `save_optimizer` wrote; see `load_model`."""

    @abstractmethod
    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | PathLike[str]) -> None:
        """Writes the scheduler's state to one JSON file."""

    @abstractmethod
    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | PathLike[str]) -> None:
        """Takes over what `save_lr_scheduler` wrote."""
