"""The one object that a training loop talks to; it holds no strategy and asks the plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, SupportsFloat, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from booster.argument_checks import is_number, is_whole_number
from booster.boost_agreement import agree_on_boost
from booster.boost_checks import (
    is_closed,
    note_boosted,
    note_closed,
    note_model,
    require_boosted_model,
    require_boosted_optimizer,
)
from booster.checkpoint_io import CheckpointIO
from booster.comm import barrier, group_rank, group_size, patience
from booster.data.active import active_place
from booster.errors import ConfigError
from booster.facade_checkpoints import CheckpointMethods
from booster.interface import MixedPrecision, ModelWrapper, OptimizerWrapper, Plugin
from booster.metrics import gather_for_metrics
from booster.mixed_precision import mixed_precision_from_name
from booster.nonfinite import find_nonfinite
from booster.phases import in_phase
from booster.registry import plugin_from_name
from booster.single_device import SingleDevicePlugin
from booster.summary import summarize
from booster.uneven import JoinedBatches

__all__ = ["Booster"]

T = TypeVar("T")


class Booster(CheckpointMethods):
    """Turns an ordinary training loop into one that runs under a parallel strategy.

    Args:
        device: Where to compute, without a plugin that decides it; None: the accelerator if there is one, else the CPU.
        mixed_precision: 'fp16', 'bf16', 'fp16_naive', 'fp16_apex', 'fp8', or a `MixedPrecision`; None: the
            parameters' own format.
        plugin: A `Plugin`, or the name of one, built in or registered by another package; None: one device.

    Raises:
        ConfigError: An unknown name, or an argument that the plugin decides by itself.

    Example:
        >>> import torch
        >>> from booster import Booster
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> booster = Booster(device="cpu")
        >>> model, optimizer, *_ = booster.boost(model, optimizer)
        >>> booster.backward(model(torch.ones(2, 3)).square().mean(), optimizer)
        >>> optimizer.step()
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        mixed_precision: str | MixedPrecision | None = None,
        plugin: str | Plugin | None = None,
    ) -> None:
        self.plugin = _resolve_plugin(plugin, device)
        self.mixed_precision = _resolve_precision(mixed_precision, self.plugin)
        self._checkpoint_io: CheckpointIO = self.plugin.get_checkpoint_io()

    # Boosting.

    @in_phase("boost")
    @patience("setup")
    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Returns the boosted model, optimizer, criterion, dataloader and scheduler; what was left out stays None.

        Call it once for each model and its optimizer: a GAN's generator and discriminator, a teacher without optimizer.

        Args:
            model: Any `nn.Module`.
            optimizer: Any torch optimizer over parameters of the model, in any number of groups.
            criterion: Computes the loss; runs in the model's number format.
            dataloader: A plain loader is replaced by one that gives this rank its part; its batch size is per rank.
            lr_scheduler: A scheduler on `optimizer`.

        Collective: every rank must call it, for the same objects in the same order.

        Raises:
            ConfigError: Something was boosted before, is of the wrong type, or does not belong together; on all ranks
                if on any.
            DesyncError: The ranks give different models, optimizers or other things, have different plugins or
                versions, or make another call. Nothing was changed.
        """
        self._require_open()
        agree_on_boost(self.plugin, self.mixed_precision, model, optimizer, criterion, dataloader, lr_scheduler)
        note_boosted(model, optimizer)
        self.plugin.place(model, optimizer)
        if self.mixed_precision is not None:
            self.mixed_precision.prepare(model)
        boosted, wrapped, criterion, dataloader, lr_scheduler = self.plugin.configure(
            model, optimizer, criterion, dataloader, lr_scheduler
        )
        if self.mixed_precision is not None:
            boosted, wrapped, criterion = self.mixed_precision.configure(boosted, wrapped, criterion)
        boosted.num_ranks_of_batch = max(1, group_size() // self.plugin.dp_size)
        note_model(self.plugin, boosted)
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    @patience("checkpoint")
    def close(self) -> None:
        """Gives back what the plugin holds beside memory: groups of ranks, with their threads, connections and files.

        For programs that make one plugin after another. Call it when nothing is used any more that a Booster of this
        plugin has boosted, and let go of that: a group's threads end with the last object that refers to it. Saves in
        the background are waited for. Closing again does nothing. Groups that no object refers to any more are given
        back without it, when the next plugin is made; those of accelerators' own backends, such as nccl, only by it.

        Collective: every rank must call it.

        Raises:
            CheckpointError: A save in the background failed on some rank; the Booster is closed all the same.
        """
        if is_closed(self.plugin):
            return
        try:
            self.wait_for_checkpoints()
        finally:
            barrier()  # nobody waits for this rank in these groups any more
            note_closed(self.plugin)
            self.plugin.close()

    def _require_open(self) -> None:
        if is_closed(self.plugin):
            raise ConfigError(
                "this Booster was closed, which has given back its plugin's groups of ranks: make a new plugin and a"
                " new Booster"
            )

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Returns the user's model inside of a boosted one; any other module as it is."""
        return model.unwrap() if isinstance(model, ModelWrapper) else model

    def prepare_dataloader(self, dataset: Any, batch_size: int, **kwargs: Any) -> DataLoader[Any]:
        """Returns a loader of this rank's part of the dataset; see `Plugin.prepare_dataloader`."""
        return self.plugin.prepare_dataloader(dataset, batch_size, **kwargs)

    def join_uneven(self, batches: Iterable[T]) -> Iterator[T]:
        """Returns this rank's batches up to the last one that every rank has: all ranks end their loops together.

        For iterators of the user's own, of which some may end before others: `for batch in booster.join_uneven(mine)`,
        once an epoch. Where ranks end early, rank 0 logs after how many batches, and which ranks had no more; what the
        others have left is dropped. The last batch ends a step of `accumulate`. One batch is read ahead, but of a
        loader that the Booster made, whose saved position stays that of the batches handed out.

        Args:
            batches: This rank's, of any type.

        Collective: every rank must go through it. One sum of three numbers over all ranks a batch.

        Raises:
            ConfigError: `batches` can't be iterated on some rank; on all ranks, with the first batch.
            Exception: What reading a batch raised on a rank, there; elsewhere an error of that class if it is one of
                this library's, else `RankFailedError`, with the rank and the text.
        """
        return JoinedBatches(batches)

    # Training.

    def backward(
        self,
        loss: torch.Tensor,
        optimizer: OptimizerWrapper,
        num_items: float | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Computes gradients of a scalar loss; use it in place of `loss.backward()`.

        Args:
            loss: A tensor with one element.
            optimizer: The boosted optimizer of the parameters.
            num_items: How many tokens or samples this rank's loss *sums* over. The gradient of the step then is the sum
                over all ranks and micro-steps divided by the global count, however unevenly the items are spread.
                None: the mean over ranks.
            retain_graph: Keep the graph, for another backward() over a part of it.

        Collective: every data-parallel rank must call it.

        Raises:
            ConfigError: An optimizer that was not boosted, or a loss that is no scalar or needs no gradient.
        """
        require_boosted_optimizer(optimizer, "backward").backward(loss, retain_graph=retain_graph, num_items=num_items)

    def no_sync(
        self, model: ModelWrapper | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        """Returns a context in which backward() adds up gradients on this rank; ranks meet in the next one outside.

        Raises:
            ConfigError: The plugin can't do without.
        """
        if not self.plugin.support_no_sync():
            raise ConfigError(
                f"{type(self.plugin).__name__} reduces gradients in every backward(): leave no_sync() out"
            )
        if model is not None:
            model = require_boosted_model(model, "no_sync")
        if optimizer is not None:
            optimizer = require_boosted_optimizer(optimizer, "no_sync")
        return self.plugin.no_sync(model, optimizer)

    @contextmanager
    def accumulate(self, model: ModelWrapper, optimizer: OptimizerWrapper, steps: int) -> Iterator[bool]:
        """Makes one step out of several micro-batches: the gradient is the mean over them, as of one large batch.

        Inside, `optimizer.step`, `zero_grad` and clipping wait for the last micro-batch; ranks communicate only there.
        The last batch of a loader or of `join_uneven` ends a step too, and the mean is over the micro-batches that
        there were. With `num_items` in backward() the gradient is divided by the global count instead.

        Args:
            model: The boosted model.
            optimizer: Its boosted optimizer.
            steps: Micro-batches per step.

        Yields:
            True for the last micro-batch of a step: the one to step an LR scheduler in.
        """
        if not is_whole_number(steps) or steps < 1:
            raise ConfigError(f"accumulate(steps={steps!r}) is no whole number of micro-batches: give 1 or more")
        model = require_boosted_model(model, "accumulate")
        optimizer = require_boosted_optimizer(optimizer, "accumulate")
        batch = active_place()
        is_last = optimizer.num_micro_steps + 1 >= steps or (batch is not None and batch.is_last)
        with nullcontext() if is_last else self.no_sync(model, optimizer), optimizer.micro_step(is_last):
            yield is_last

    def clip_grad_norm_(
        self, optimizer: OptimizerWrapper, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clips the global norm of the optimizer's true gradients; returns it as it was, a 0-dim tensor on every rank.

        None where `accumulate` waits for further micro-batches. Collective.

        Raises:
            ConfigError: `max_norm` is no number, or is negative or nan, which would turn gradients round.
        """
        if isinstance(max_norm, bool) or not isinstance(max_norm, SupportsFloat):
            raise ConfigError(
                f"clip_grad_norm_(max_norm={max_norm!r}): that is a {type(max_norm).__name__} and no number: give a"
                " number above 0, such as 1.0, or float('inf') for the norm alone"
            )
        if not is_number(max_norm) or max_norm < 0:
            raise ConfigError(
                f"clip_grad_norm_(max_norm={max_norm!r}): no gradient has a norm of that, and scaling by it would turn"
                " gradients round: give a number above 0, or float('inf') for the norm alone"
            )
        if not is_number(norm_type) or norm_type <= 0:
            raise ConfigError(
                f"clip_grad_norm_(norm_type={norm_type!r}): there is no norm of that order: give a number above 0, such"
                " as 2.0, or float('inf') for the largest gradient"
            )
        return require_boosted_optimizer(optimizer, "clip_grad_norm_").clip_grad_by_norm(max_norm, norm_type)

    @in_phase("pipeline")
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
        """Runs forward and backward for the next batch of an iterator, under any plugin.

        Pipeline stages work on its micro-batches, parts with as many samples (or one more or less); the gradient is
        that of the whole batch. Under other plugins the batch is one part.

        Args:
            data_iter: Gives this rank's batches: a mapping of the model's keyword arguments, a sequence of its
                positional ones, or its only one. All stages of a pipeline need the same ones.
            model: The boosted model.
            criterion: Called with (outputs, batch) of each micro-batch on the last stage; returns the loss. Losses are
                averaged with the micro-batches' numbers of samples as weights.
            optimizer: The boosted optimizer; None: forward only.
            return_loss: Put the detached loss into the result.
            return_outputs: Put the detached outputs, joined along dimension 0, into the result, on the last stage.
            num_items: How many tokens or samples the losses of this rank's batch *sum* over: they are added up, and
                the step's gradient is divided by the global count as in `backward`, which is exact also where
                micro-batches have different numbers of tokens. None: a mean.

        Returns:
            {"loss": tensor or None, "outputs": outputs or None}. The loss is there on all stages, unless the plugin was
            given broadcast_loss=False; outputs are there on the last one, elsewhere they are None.

        Collective: every rank must call it.

        Raises:
            StopIteration: The iterator has ended, with a pipeline on all ranks.
            DesyncError: Stages have different batches, or only some ranks have one.
            RankFailedError: Another stage has failed; the message says where.
        """
        if not hasattr(data_iter, "__next__"):
            raise ConfigError(
                f"execute_pipeline() was given a {type(data_iter).__name__}, which is no iterator, and each call takes"
                " the next batch of one: write data_iter = iter(dataloader) once an epoch, and pass that"
            )
        if not callable(criterion):
            raise ConfigError(
                f"execute_pipeline() was given a {type(criterion).__name__} for the criterion, which can't be called:"
                " give a function of (outputs, batch) that returns the loss"
            )
        model = require_boosted_model(model, "execute_pipeline")
        if optimizer is not None:
            optimizer = require_boosted_optimizer(optimizer, "execute_pipeline")
        return self.plugin.execute_pipeline(
            data_iter, model, criterion, optimizer, return_loss, return_outputs, num_items=num_items
        )

    # Looking.

    def summary(self, model: ModelWrapper, optimizer: OptimizerWrapper | None = None) -> str:
        """Prints on the main process what really runs, and returns it on every rank.

        Plugin, ranks per axis, and for every param group the formats of parameter, compute, reduction, master, state.
        """
        if optimizer is not None:
            optimizer = require_boosted_optimizer(optimizer, "summary")
        text = summarize(self.plugin, require_boosted_model(model, "summary"), optimizer)
        self.print(text)
        return text

    def debug_nonfinite(
        self, model: ModelWrapper, optimizer: OptimizerWrapper | None = None, *, action: str = "raise"
    ) -> AbstractContextManager[None]:
        """Returns a block in which an inf or nan in a loss or a gradient, on any rank, is an error on all of them.

        The error of a loss has the ranks, the first module whose output was not finite, and parameters that are not
        finite themselves; it comes out of `backward`. That of gradients, out of the clipping or the step before
        anything is updated, has the parameters and the ranks that computed such gradients. An overflow that a loss
        scaler skips is no error, and written to the log. All outputs and gradients are looked at, which takes time.

        Args:
            model: The boosted model.
            optimizer: Its boosted optimizer; None: losses and gradients of every optimizer are looked at.
            action: "raise" a `NonfiniteError`, or "log" the same text and go on.

        Collective: every rank must enter the block, and each backward() and step in it.

        Raises:
            ConfigError: Another action, or objects that were not boosted.
        """
        model = require_boosted_model(model, "debug_nonfinite")
        if optimizer is not None:
            optimizer = require_boosted_optimizer(optimizer, "debug_nonfinite")
        return find_nonfinite(model, optimizer, action=action)

    def gather_for_metrics(self, data: Any) -> Any:
        """Returns the ranks' tensors joined along dimension 0, without the samples that fill up a loader's last batch.

        Ranks may bring different numbers of entries, or none. What fills up the last batch of a loader that the Booster
        made is left out where a tensor has one entry per sample of it; of other loaders that is not known.

        Args:
            data: A tensor with one entry per sample (or a scalar per rank), or any nesting of them. An empty tensor of
                one dimension, as `torch.empty(0)`, goes with any other.

        Collective: every rank must call it, with as many tensors, which may differ in dimension 0 alone.

        Raises:
            ConfigError: Nothing in it can be joined on some rank: no tensor, or a sparse one; on all ranks.
            DesyncError: The ranks' tensors don't fit each other; the message names the ranks and what they brought.
        """
        return gather_for_metrics(data, self.plugin.data_group)

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self.plugin.device

    @property
    def is_main_process(self) -> bool:
        """True on the rank that prints and writes logs."""
        return group_rank() == 0

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the main process."""
        if self.is_main_process:
            print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Waits until every rank is here. Collective."""
        barrier()


def _resolve_plugin(plugin: str | Plugin | None, device: str | torch.device | None) -> Plugin:
    if plugin is None:
        return SingleDevicePlugin(device)
    resolved = plugin_from_name(plugin) if isinstance(plugin, str) else plugin
    if not isinstance(resolved, Plugin):
        raise ConfigError(
            f"plugin={plugin!r} is a {type(plugin).__name__}, not a Plugin: pass an object such as"
            " TorchDDPPlugin(), not its class, or a name such as 'torch_ddp'"
        )
    if resolved.device.type not in resolved.supported_devices():
        raise ConfigError(
            f"{type(resolved).__name__} was asked to run on {resolved.device.type!r}, and runs on"
            f" {', '.join(resolved.supported_devices())}: choose another plugin or launch on another device"
        )
    if device is not None and resolved.control_device():
        raise ConfigError(
            f"device={device!r} was given together with {type(resolved).__name__}, which puts every rank on its own"
            " device: leave device out"
        )
    return resolved


def _resolve_precision(precision: str | MixedPrecision | None, plugin: Plugin) -> MixedPrecision | None:
    if precision is None or precision == "fp32":
        return None
    if plugin.control_precision():
        raise ConfigError(
            f"mixed_precision={precision!r} was given with {type(plugin).__name__}, which has number formats of its"
            f" own: give them to {type(plugin).__name__} alone"
        )
    if isinstance(precision, MixedPrecision):
        return precision
    if not isinstance(precision, str):
        raise ConfigError(
            f"mixed_precision={precision!r} is a {type(precision).__name__}: pass a name such as 'bf16', or a"
            " MixedPrecision object such as BF16MixedPrecision()"
        )
    resolved = mixed_precision_from_name(precision)
    if precision not in plugin.supported_precisions():
        raise ConfigError(
            f"mixed_precision={precision!r} does not run with {type(plugin).__name__}: choose one of"
            f" {', '.join(plugin.supported_precisions())}"
        )
    return resolved
