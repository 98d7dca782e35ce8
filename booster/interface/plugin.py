"""Interface of plugins: a parallel strategy for a training job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from booster.core.model_wrapper import ModelWrapper, batch_on_device, call_with_batch
from booster.core.optimizer_wrapper import OptimizerWrapper
from booster.deprecation import ConfigFingerprint
from booster.errors import ConfigError

from .checkpoint_io import CheckpointIO

Boosted: TypeAlias = tuple[
    ModelWrapper,
    OptimizerWrapper | None,
    Callable[..., Any] | None,
    DataLoader[Any] | None,
    LRScheduler | None,
]
"""Result of `Plugin.configure`: model, optimizer, criterion, dataloader, scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageManager:
    """Place of this rank in the pipeline, with the methods of ColossalAI's class; by default the only stage.

    Attributes:
        stage: Index of the stage.
        num_stages: Number of stages.
        has_last_layer: If True, this rank computes the loss. With pp_style="zbv" that is stage 0.
    """

    stage: int = 0
    num_stages: int = 1
    has_last_layer: bool = True

    def is_first_stage(self, ignore_chunk: bool = True) -> bool:
        """Return whether this rank holds the model's first layer. `ignore_chunk` has no effect."""
        return self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = True) -> bool:
        """Return whether this rank holds the model's last layer. `ignore_chunk` has no effect."""
        return self.has_last_layer


class Plugin(ConfigFingerprint, ABC):
    """Parallel strategy.

    `Booster.boost` calls, on every rank and in this order: `check` and `config_fingerprint`, compared over ranks;
    `place` on the user's objects, `MixedPrecision.prepare` unless the plugin controls precision, `configure`,
    `MixedPrecision.configure`. Each passes its result on to the next: a plugin keeps nothing about a model between the
    calls. A result of None is not passed, so that methods may lack the argument.

    Checkpoints are written from slices of the model and of the optimizer's states. Several ranks may hold the same
    elements; exactly one of them is `is_primary` in the wrappers' constructors. If they do not hold the same bits, the
    wrappers' slices must have `shared=False`; otherwise each of those ranks writes a part. See `TensorSlice` and
    `ModelWrapper.require_equal_copies`.

    Plugins over several ranks derive from `booster.plugins.base.DistributedPlugin`.
    """

    @abstractmethod
    def supported_devices(self) -> list[str]:
        """Return the supported device types, such as ["cpu", "cuda"]."""

    @abstractmethod
    def supported_precisions(self) -> list[str]:
        """Return the names of the supported precisions."""

    @abstractmethod
    def control_precision(self) -> bool:
        """Return whether the plugin has its own precision argument, in place of the Booster's."""

    @abstractmethod
    def control_device(self) -> bool:
        """Return whether the plugin selects the device, in place of the Booster's argument."""

    def support_no_sync(self) -> bool:
        """Return whether `no_sync` works, with or without saving communication."""
        return True

    def support_lora(self) -> bool:
        """Return whether low-rank adapters can be enabled."""
        return False

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of this rank."""

    @property
    @abstractmethod
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""

    @property
    @abstractmethod
    def dp_rank(self) -> int:
        """Data-parallel rank of this process."""

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """Data-parallel group of this rank: `dp_size` ranks with different data; None for the world."""
        return None

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """`data_group`, by ColossalAI's name."""
        return self.data_group

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.axis_sizes().get("tp", 1)

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return self.axis_sizes().get("pp", 1)

    @property
    def sp_size(self) -> int:
        """Number of ranks along the axis of sequence parallelism."""
        return self.axis_sizes().get("sp", 1)

    @property
    def precision(self) -> str | None:
        """Name of the weights' precision, such as 'bf16', where the plugin casts them; else None."""
        return None

    @property
    def zero_stage(self) -> int:
        """ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also weights."""
        return 0

    @property
    def stage_manager(self) -> StageManager:
        """Place of this rank in the pipeline: first and last stage at once, where there is none."""
        return StageManager()

    @property
    def mesh(self) -> DeviceMesh | None:
        """Device mesh of the ranks, whose axes have documented names; None on one device without a process group."""
        return None

    def axis_sizes(self) -> dict[str, int]:
        """Return the number of ranks along each axis of the device mesh, by name."""
        return {"dp": self.dp_size}

    def reduction_dtype(self, parameter_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of such parameters are summed over ranks.

        It is fp32 or wider on the CPU. An accelerator's backend sums in the dtype in which they travel.
        """
        return parameter_dtype

    def config_fingerprint(self) -> list[str]:
        """Return lines of text that must be equal on all ranks, such as "stage=1"; compared by every boost().

        The class is always compared. Values that may differ, such as a device or a directory, are left out, and so are
        addresses in texts of objects. No communication.
        """
        return []

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> Any:
        """Raise for a model or optimizer that cannot be boosted; changes nothing. Does nothing by default.

        No communication: boost() raises an error of one rank on all.

        Returns:
            What `place` needs to know about them, such as a plan, or None.

        Raises:
            ConfigError: The plugin cannot train the model, or update it with the optimizer.
        """

    @abstractmethod
    def place(self, model: nn.Module, optimizer: Optimizer | None, checked: Any = None) -> Any:
        """Move the user's model to its device and synchronize the weights of all ranks, in place.

        Collective; all ranks have models of the same names, shapes and dtypes. `nn.Parameter` objects are not replaced.

        Args:
            model: The user's model.
            optimizer: The user's optimizer, or None.
            checked: Result of `check`.

        Returns:
            What `configure` needs to know about them, or None.
        """

    @abstractmethod
    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
        *,
        placed: Any = None,
    ) -> Boosted:
        """Wrap the five arguments; omitted ones stay None. `placed` is the result of `place`. Collective."""

    def no_sync(
        self, model: ModelWrapper | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which backward() accumulates local gradients.

        Overridden by plugins that reduce gradients in backward.
        """
        return nullcontext()

    def leave_reduction(self, model: ModelWrapper, axis: str, handler: str) -> None:
        """Leave the gradients of a boosted model unreduced along an axis, for a gradient handler that reduces them.

        Overridden by plugins that can. No communication; called before the first backward.

        Args:
            model: Boosted model.
            axis: Axis that the handler reduces over, such as "dp".
            handler: Name of the handler, for the message.

        Raises:
            ConfigError: The plugin reduces the gradients along the axis itself, or has no such axis.
        """
        raise ConfigError(
            f"the gradient handler {handler} reduces the gradients over {axis!r}, and {type(self).__name__} does that"
            " itself, together with sharding them or with the ranks that share layers: leave the handler out, let it"
            " take the reduced gradients as they are (reduces = None), or use TorchDDPPlugin, which leaves 'dp' to it"
        )

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
        """Run forward and backward for the next batch, by default as one stage. See `Booster.execute_pipeline`."""
        batch = batch_on_device(next(data_iter), self.device)
        with nullcontext() if optimizer is not None else torch.no_grad():
            outputs = call_with_batch(model, batch)
            loss = criterion(outputs, batch)
        if not return_outputs:
            outputs = None  # backward needs only what autograd has saved
        if optimizer is not None:
            optimizer.backward(loss, num_items=num_items)
        return {"loss": loss.detach() if return_loss else None, "outputs": outputs}

    def representative_ranks(self) -> list[int]:
        """Return ranks that cover all that differ in memory, for `booster.estimate_memory`: one of each pipeline stage.

        The estimate is that of the one that needs the most.
        """
        return [0]

    def pipeline_seconds(self, model: ModelWrapper, forward: float, backward: float, message: float) -> float:
        """Return the time of forward and backward of a batch over all pipeline stages, for `booster estimate`.

        Args:
            model: Boosted model, which has trained on such a batch.
            forward: Time that a stage computes for the forwards of all microbatches.
            backward: The same of the backwards.
            message: Time of a message to another stage.
        """
        return forward + backward

    def gathers_layers(self) -> bool:
        """Return whether a layer's weights are whole on a rank only while the layer or its backward runs.

        Then activation checkpointing recomputes single layers only: a segment of several would need their weights.
        """
        return False

    def layer_divisor(self) -> int:
        """Return what the number of layers must be a multiple of so that all stages hold equally many."""
        return 1

    @classmethod
    def settings_for(cls, num_ranks: int) -> list[dict[str, Any]]:
        """Return candidate arguments of the plugin on `num_ranks` ranks, for `booster estimate`; may be empty."""
        return [{}]

    @abstractmethod
    def control_checkpoint_io(self) -> bool:
        """Return whether `get_checkpoint_io` returns the plugin's own CheckpointIO class."""

    @abstractmethod
    def get_checkpoint_io(self) -> CheckpointIO:
        """Return the CheckpointIO of objects that this plugin boosted."""

    def close(self) -> None:
        """Release the plugin's process groups and other resources; see `Booster.close`. Does nothing by default.

        Collective; objects that the plugin boosted are no longer used.
        """

    def prepare_dataloader(
        self,
        dataset: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type | None = None,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """Return a loader of this rank's samples of the dataset, resumable within an epoch.

        Call it on every rank with the same arguments; no communication.

        Args:
            dataset: Map-style dataset or `IterableDataset`, equal on all ranks, or a `DataLoader` of one, with any
                sampler or batch sampler, which is divided as by `boost`.
            batch_size: Samples per batch and rank; left out with a `DataLoader`, and with streams of batches.
            shuffle: If True, reshuffle every epoch, by the seed and the epoch alone.
            seed: Seed of the order and of the workers' generators, the same on all ranks. Defaults to the seed of the
                launch, 1024 without one; for a `DataLoader` with a generator, to the initial seed of that.
            drop_last: If True, drop an incomplete last global batch, else pad it by repeating samples.
            pin_memory: Argument of `DataLoader`.
            num_workers: Argument of `DataLoader`. Random augmentation in workers depends on the seed, the epoch and the
                sample's position in the epoch's order, but not on the number of workers.
            distributed_sampler_cls: Sampler class, called as `cls(dataset, num_replicas=, rank=, shuffle=)`, with
                `seed` and `drop_last` if it takes them; optional.
            **kwargs: Further arguments of `DataLoader`, except for samplers.

        Raises:
            ConfigError: The dataset is empty, `drop_last` leaves no batch, or the `DataLoader` cannot be divided.
        """
        from booster.data import prepare_dataloader

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
