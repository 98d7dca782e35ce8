"""One strategy for running one training job over the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from booster.errors import ConfigError
from booster.interface.batch_call import call_with_batch
from booster.interface.model import ModelWrapper
from booster.interface.optimizer import OptimizerWrapper
from booster.interface.rank_memory import MemoryQuestion, RankMemory

if TYPE_CHECKING:
    from booster.checkpoint_io import CheckpointIO

__all__ = ["Boosted", "Plugin"]

Boosted: TypeAlias = tuple[
    ModelWrapper,
    OptimizerWrapper | None,
    Callable[..., Any] | None,
    DataLoader[Any] | None,
    LRScheduler | None,
]
"""What `Plugin.configure` returns: model, optimizer, criterion, dataloader, scheduler."""


class Plugin(ABC):
    """What the facade asks of a strategy.

    `Booster.boost` calls, on every rank and in this order: `check` and `agreement_facts`, after which it goes on if all
    ranks are well and agree; `place` on the user's own objects, `MixedPrecision.prepare` unless the plugin controls
    precision, `configure`, `MixedPrecision.configure`.
    """

    # What the strategy can do.

    @abstractmethod
    def supported_devices(self) -> list[str]:
        """Returns the device types it runs on, such as ["cpu", "cuda"]."""

    @abstractmethod
    def supported_precisions(self) -> list[str]:
        """Returns the names of the number formats it runs with."""

    @abstractmethod
    def control_precision(self) -> bool:
        """Returns True if the plugin has a precision argument of its own, and takes none of the Booster's."""

    @abstractmethod
    def control_device(self) -> bool:
        """Returns True if the plugin decides the device, and takes none of the Booster's."""

    def support_no_sync(self) -> bool:
        """Returns whether `no_sync` works; it may save communication or not."""
        return True

    def support_lora(self) -> bool:
        """Returns whether low-rank adapters can be enabled."""
        return False

    # Where this rank stands.

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that this rank computes on."""

    @property
    @abstractmethod
    def dp_size(self) -> int:
        """Number of parts that the data is split into."""

    @property
    @abstractmethod
    def dp_rank(self) -> int:
        """Which part of the data this rank reads."""

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks, this one among them, that read the `dp_size` parts of the data, each one part; None: the world."""
        return None

    def axis_sizes(self) -> dict[str, int]:
        """Returns the number of ranks along each axis of the device mesh, by the axis's name."""
        return {"dp": self.dp_size}

    def reduction_dtype(self, parameter_dtype: torch.dtype) -> torch.dtype:
        """Returns the number format in which gradients of such parameters are summed over ranks."""
        return parameter_dtype

    def agreement_facts(self) -> list[str]:
        """Returns lines of text that must be the same on all ranks, such as "stage=1"; compared by every boost().

        The class is compared in any case. What may differ, as a device or a directory does, stays out; so do addresses
        in texts of objects. No communication.
        """
        return []

    # What it does.

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:  # noqa: B027
        """Raises for what this rank can tell can't be boosted; changes nothing. Default: nothing.

        No communication: what it raises on one rank, boost() raises on all.

        Raises:
            ConfigError: The plugin can't train the model, or update it with the optimizer.
        """

    @abstractmethod
    def place(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Moves the user's model to its device and makes all ranks start from the same weights, in place.

        Collective; all ranks have models of the same names, shapes and dtypes. `nn.Parameter` objects stay the same
        ones.
        """

    @abstractmethod
    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Boosted:
        """Wraps the five; what was left out stays None. Collective."""

    def no_sync(
        self, model: ModelWrapper | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        """Returns a context in which backward() adds up gradients without needing the other ranks' part yet."""
        return nullcontext()

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: ModelWrapper,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
        *,
        num_items: float | None = None,
    ) -> dict[str, Any]:
        """Runs forward and backward for the next batch; here as one stage. See `Booster.execute_pipeline`."""
        batch = next(data_iter)
        with nullcontext() if optimizer is not None else torch.no_grad():
            outputs = call_with_batch(model, batch)
            loss = criterion(outputs, batch)
        if optimizer is not None:
            optimizer.backward(loss, num_items=num_items)
        return {"loss": loss.detach() if return_loss else None, "outputs": outputs if return_outputs else None}

    def estimate_memory(self, question: MemoryQuestion) -> RankMemory:
        """Returns what training a model takes on the rank that needs the most. See `booster.estimate_memory`.

        Called on one rank, while the others are imagined: see Note [Imagined ranks].

        Raises:
            ConfigError: The plugin can't tell, or can't train the model.
        """
        raise ConfigError(
            f"{type(self).__name__} does not say how much memory it needs: ask about another plugin, or give the class"
            " a method estimate_memory()"
        )

    @classmethod
    def settings_for(cls, num_ranks: int) -> list[dict[str, Any]]:
        """Returns arguments of the plugin that are worth a look on so many ranks, for `booster estimate`."""
        return [{}]

    @abstractmethod
    def control_checkpoint_io(self) -> bool:
        """Returns True if `get_checkpoint_io` gives a CheckpointIO of the plugin's own."""

    @abstractmethod
    def get_checkpoint_io(self) -> CheckpointIO:
        """Returns what saves and loads objects that this plugin boosted."""

    def close(self) -> None:  # noqa: B027
        """Gives back what the plugin holds beside memory, as groups of ranks; see `Booster.close`. Default: nothing.

        Collective; nothing that the plugin boosted is used any more.
        """

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type | None = None,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """Returns a loader of this rank's part of the dataset, reshuffled every epoch, resumable in mid-epoch.

        Args:
            dataset: A map-style dataset, equal on all ranks.
            batch_size: Samples per batch and rank.
            shuffle: A new order every epoch, derived from the seed and the epoch alone.
            seed: Of the order and of the workers' random numbers.
            drop_last: Drop an incomplete last global batch; False: fill it by repeating samples.
            pin_memory: As `DataLoader`.
            num_workers: As `DataLoader`.
            distributed_sampler_cls: A sampler class with `DistributedSampler`'s arguments to use instead.
            **kwargs: Further arguments of `DataLoader`.

        Call it on every rank with the same arguments; no communication.

        Raises:
            ConfigError: An empty dataset, or `drop_last` leaves no batch.
        """
        from booster.data import prepare_dataloader  # the loader logs, and the logger asks where it runs

        return prepare_dataloader(
            dataset,
            batch_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            distributed_sampler_cls=distributed_sampler_cls,
            **kwargs,
        )
