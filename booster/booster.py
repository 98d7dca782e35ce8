"""`Booster`, the facade of a training loop: it contains no strategy and delegates to the plugin."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from .boost_checks import (
    check_boosted_model,
    check_boosted_optimizer,
    is_closed,
    mark_boosted,
    mark_closed,
    not_boosted_error,
    register_model,
    verify_same_across_ranks,
)
from .booster_checkpoint import CheckpointMethods
from .checkpoint_io import CheckpointIO
from .comm import barrier, check_same_across_ranks, group_rank, group_size, timeout_scope
from .core.activation_policy import POLICY
from .core.compiling import compile_layers, parse_compile_options
from .core.plain_torch import hook_clipping, refuse_plain_criterion
from .data.dataloader import active_position
from .data.join import JoinIterator
from .device import keep_freed_memory, malloc_trim
from .errors import ConfigError
from .fault_tolerance.progress import in_phase
from .interface import MixedPrecision, ModelWrapper, OptimizerWrapper, Plugin, PluginChoice, PluginPlan
from .lora import add_lora, refuse_quantization, unchanged_on_failure
from .metrics import gather_for_metrics
from .mixed_precision import resolve_mixed_precision
from .monitor.nan_check import detect_nonfinite
from .monitor.summary import summarize
from .registry import resolve_plugin
from .validation import check_clipping, error_of, is_int

T = TypeVar("T")


def _without_none(**found: Any) -> dict[str, Any]:
    """Keyword arguments for methods of third parties, whose signature lacks those that they have no use for."""
    return {name: value for name, value in found.items() if value is not None}


class Booster(CheckpointMethods):
    """Facade that runs an ordinary training loop under a parallel strategy.

    Args:
        device: Device for training without a plugin, optional; defaults to the accelerator if there is one, else the
            CPU.
        mixed_precision: 'fp16', 'bf16', 'fp16_naive', 'fp16_apex', 'fp8', or a `MixedPrecision`; optional, defaults to
            the dtypes of the parameters. A plugin of a name casts the weights to it where it does so itself.
        plugin: `Plugin`, or the name of one, built in or registered by another package; "auto" or an `AutoPlugin`,
            which chooses it at the first `boost`. Optional, defaults to one device.
        compile: If True, compile the forward of each layer of the model's stacks by `torch.compile`, or the entire
            forward if there are none; a dict gives keyword arguments of `torch.compile`, such as dict(mode=...,
            dynamic=...). Optional, defaults to False.

    Attributes:
        plugin: The plugin; with an `AutoPlugin` from the first `boost` on.
        mixed_precision: The mixed precision, or None.
        checkpoint_io: Checkpoint engine of the plugin.
        plan: What an `AutoPlugin` has chosen; otherwise None.

    Raises:
        ConfigError: A name is unknown, the plugin controls the device or precision itself, or torch.compile does not
            take the arguments.

    Examples:
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
        plugin: str | Plugin | PluginChoice | None = None,
        *,
        compile: bool | Mapping[str, Any] = False,
    ) -> None:
        self.plan: PluginPlan | None = None
        self._choice = _choice_of(plugin)
        if self._choice is None:
            self._use(resolve_plugin(plugin, mixed_precision, device), mixed_precision)
        else:
            self._use_choice(self._choice, mixed_precision, device)
        self._compile_options = parse_compile_options(compile)

    def _use(self, plugin: Plugin, mixed_precision: str | MixedPrecision | None) -> None:
        self.plugin = plugin
        self.mixed_precision = resolve_mixed_precision(mixed_precision, plugin)
        self.checkpoint_io: CheckpointIO = plugin.get_checkpoint_io()

    def _use_choice(
        self, choice: PluginChoice, mixed_precision: str | MixedPrecision | None, device: str | torch.device | None
    ) -> None:
        """Use the plan of an `AutoPlugin` as soon as there is one: now, or at the first boost()."""
        if device is not None:
            raise ConfigError(
                f"device={device!r} was given with an AutoPlugin, whose plugin selects the device of every rank: leave"
                " device out"
            )
        self.mixed_precision = None
        self._precision_of_choice = choice.precision_for(mixed_precision)
        if choice.plan is not None:
            self._use_plan(choice.plan)

    def _use_plan(self, plan: PluginPlan) -> None:
        self._use(plan.make_plugin(), plan.mixed_precision)
        self.plan = plan

    def _choose(
        self,
        choice: PluginChoice,
        model: nn.Module,
        optimizer: Optimizer | None,
        criterion: Callable[..., Any] | None,
        dataloader: DataLoader[Any] | None,
    ) -> None:
        """Use what an `AutoPlugin` chooses for the first model. Collective."""
        if self.plan is None:
            self._use_plan(choice.choose(model, optimizer, criterion, dataloader, self._precision_of_choice))
        assert self.plan is not None
        check_same_across_ranks("boost() with a plan", [], error=error_of(partial(_follow, self.plan, model)))
        self._choice = None

    if not TYPE_CHECKING:  # type checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError; for a name of the package, say how to reach it."""
            if name in sys.modules[__package__].__all__:
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}, which is a name of the package: write"
                    f" `from booster import {name}`",
                    name=name,
                    obj=self,
                )
            if name in ("plugin", "checkpoint_io") and vars(self).get("_choice") is not None:
                raise ConfigError(
                    f"the Booster has no {name} yet: its AutoPlugin chooses one at the first boost(). Call boost()"
                    " first, with the DataLoader that prepare_dataloader() would be given"
                )
            return object.__getattribute__(self, name)  # raises the usual error, or again that of a property

    @in_phase("boost")
    @timeout_scope("setup")
    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Return the boosted model, optimizer, criterion, dataloader and scheduler; omitted ones stay None.

        Called once for each model and its optimizer: a GAN's generator and discriminator, a teacher without optimizer.

        Args:
            model: Any `nn.Module`.
            optimizer: Any torch optimizer over parameters of the model, in any number of groups.
            criterion: Loss function; runs in the model's compute dtype. Its own parameters do not train: one with such
                parameters is a submodule of the model, whose forward then returns the loss.
            dataloader: Plain loader, replaced by one over this rank's samples; its batch size is per rank.
            lr_scheduler: Scheduler of `optimizer`.

        Collective: every rank must call it, for the same objects in the same order.

        Raises:
            ConfigError: An object is boosted already, is of the wrong type, or does not belong to the others; on all
                ranks if on any.
            DesyncError: The ranks have different models, optimizers, other arguments, plugins or versions, or are at
                another call. Nothing was changed.
        """
        if self._choice is not None:
            self._choose(self._choice, model, optimizer, criterion, dataloader)
        if is_closed(self.plugin):
            raise ConfigError(
                "this Booster is closed, which has released its plugin's process groups: make a new plugin and a new"
                " Booster"
            )
        checked = verify_same_across_ranks(
            self.plugin,
            self.mixed_precision,
            model,
            optimizer,
            criterion,
            dataloader,
            lr_scheduler,
            compile_options=self._compile_options,
        )
        policies = dict.fromkeys(vars(one)[POLICY] for one in model.modules() if POLICY in vars(one))
        for policy in policies:
            policy.prepare(type(self.plugin).__name__, gathers_layers=self.plugin.gathers_layers())
        mark_boosted(model, optimizer)
        options = self._compile_options
        enable_compilation = None if options is None else compile_layers(model, options)
        placed = self.plugin.place(model, optimizer, **_without_none(checked=checked))
        prepared = None if self.mixed_precision is None else self.mixed_precision.prepare(model)
        users_criterion = criterion
        boosted, wrapped, criterion, dataloader, lr_scheduler = self.plugin.configure(
            model, optimizer, criterion, dataloader, lr_scheduler, **_without_none(placed=placed)
        )
        if self.mixed_precision is not None:
            boosted, wrapped, criterion = self.mixed_precision.configure(
                boosted, wrapped, criterion, **_without_none(prepared=prepared)
            )
        if wrapped is not None:
            hook_clipping(wrapped)
            for policy in policies:
                if policy.end_step is not None:
                    wrapped.register_step_hook(policy.end_step)
        if enable_compilation is not None:
            enable_compilation()
        register_model(self.plugin, boosted, wrapped)
        if self.plugin.dp_size > 1 or (wrapped is not None and wrapped.loss_scaler is not None):
            refuse_plain_criterion(users_criterion, boosted)
        malloc_trim(0)  # the weights that other ranks have now
        if self.plugin.device.type == "cpu":
            keep_freed_memory()
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    @timeout_scope("checkpoint")
    def close(self) -> None:
        """Release the plugin's process groups, with their threads, connections and files.

        For programs that make one plugin after another. Call it when the objects that a Booster of this plugin has
        boosted are no longer used, and drop them: a group's threads end with the last reference to it. Background saves
        are waited for. Closing again does nothing. Groups without references are also released when the next plugin is
        made, except those of accelerators' backends, such as nccl.

        Collective: every rank must call it.

        Raises:
            CheckpointError: A background save failed on some rank; the Booster is closed nevertheless.
        """
        if is_closed(self.plugin):
            return
        try:
            self.wait_for_checkpoints()
        finally:
            barrier()  # no rank waits for this one in these groups any more
            mark_closed(self.plugin)
            self.plugin.close()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the user's model inside of a boosted one; other modules are returned unchanged."""
        return model.unwrap() if isinstance(model, ModelWrapper) else model

    def prepare_dataloader(self, dataset: Any, batch_size: int | None = None, **kwargs: Any) -> DataLoader[Any]:
        """Return a loader of this rank's samples of a dataset or DataLoader; see `Plugin.prepare_dataloader`."""
        return self.plugin.prepare_dataloader(dataset, batch_size, **kwargs)

    def join_uneven(self, batches: Iterable[T]) -> Iterator[T]:
        """Return this rank's batches up to the last one that every rank has, so that all loops end together.

        For the user's own iterators, some of which may end before others: `for batch in booster.join_uneven(batches)`,
        once an epoch. If ranks end early, rank 0 logs the number of batches and which ranks had no more; remaining
        batches are dropped. The last batch ends a step of `accumulate`. One batch is prefetched, except from loaders
        made by the Booster, whose saved position stays that of the batches handed out.

        Args:
            batches: Iterable of this rank's batches, of any type.

        Collective: every rank must iterate over it. One all-reduce of three numbers per batch.

        Raises:
            ConfigError: `batches` is not iterable on some rank; on all ranks, with the first batch.
            Exception: Error of reading a batch: itself on its rank, elsewhere an error of that class of this library,
                else `RankFailedError`, with the rank and the text.
        """
        return JoinIterator(batches)

    def backward(
        self,
        loss: torch.Tensor,
        optimizer: OptimizerWrapper,
        num_items: float | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Compute gradients of a scalar loss; replaces `loss.backward()`.

        Args:
            loss: Tensor with one element.
            optimizer: Boosted optimizer of the parameters.
            num_items: Number of tokens or samples that this rank's loss *sums* over. The gradient of the step then is
                the sum over all ranks and microbatches divided by the global count, also for uneven numbers of items.
                Optional; by default the gradient is the mean over ranks.
            retain_graph: If True, keep the graph for another backward() over it.

        Collective: every data-parallel rank must call it.

        Raises:
            ConfigError: The optimizer is not boosted, or the loss is not a scalar or requires no gradient.
        """
        if not isinstance(optimizer, OptimizerWrapper):  # no call in every step
            raise not_boosted_error(optimizer, "backward")
        optimizer.backward(loss, retain_graph=retain_graph, num_items=num_items)

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | PathLike[str] | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> nn.Module:
        """Add trainable low-rank adapters of peft to a model, and freeze the rest. Call it before `boost`.

        Args:
            model: The user's model, changed in place.
            pretrained_dir: Directory of a saved adapter to continue, of `save_lora_as_pretrained` or peft.
            lora_config: `peft.LoraConfig` of a new adapter; either of both.
            bnb_quantization_config: Exists for ColossalAI's users; an error says how to load a quantized base.
            quantize: As `bnb_quantization_config`.

        Returns:
            The `peft.PeftModel`; pass it, and an optimizer of its trainable parameters, to `boost`.

        Raises:
            ConfigError: peft is not installed, the model is boosted or has adapters, `target_modules` match nothing, or
                the saved adapter is of another model; on all ranks.
            CheckpointError: The saved adapter is missing or damaged; on all ranks.

        Collective: yes, one small message.
        """
        adapted: list[nn.Module] = []

        def add() -> None:
            refuse_quantization(quantize, bnb_quantization_config)
            adapted.append(add_lora(model, lora_config, pretrained_dir))

        with unchanged_on_failure(model):
            error = error_of(add)
            check_same_across_ranks("enable_lora()", [], error=error)
        return adapted[0]

    def no_sync(
        self, model: ModelWrapper | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which backward() accumulates local gradients; the next one outside of it reduces them.

        Raises:
            ConfigError: The plugin reduces gradients in every backward().
        """
        if not self.plugin.support_no_sync():
            raise ConfigError(
                f"{type(self.plugin).__name__} reduces gradients in every backward(): leave no_sync() out"
            )
        if model is not None:
            model = check_boosted_model(model, "no_sync")
        if optimizer is not None:
            optimizer = check_boosted_optimizer(optimizer, "no_sync")
        return self.plugin.no_sync(model, optimizer)

    @contextmanager
    def accumulate(
        self, model: ModelWrapper, optimizer: OptimizerWrapper, steps: int, loader: Iterable[Any] | None = None
    ) -> Iterator[bool]:
        """Accumulate gradients over several microbatches: the step's gradient is their mean, as of one large batch.

        Inside, `optimizer.step` and clipping take effect with the last microbatch only, and `zero_grad` behind its
        backward or before the first; ranks communicate only in the last. The last batch of a loader or of `join_uneven`
        ends a step, too, and the mean is over the actual number of microbatches. With `num_items` in backward() the
        gradient is divided by the global count instead.

        Args:
            model: Boosted model.
            optimizer: Its boosted optimizer.
            steps: Number of microbatches per step.
            loader: Loader, or result of `join_uneven`, whose last batch ends a step; optional, defaults to the one that
                was read last. To be given where a loop reads several.

        Yields:
            True for the last microbatch of a step: the one to step an LR scheduler in.

        Raises:
            ConfigError: `steps` is not a number of microbatches, `loader` is not being read, or this is inside of
                another `accumulate` of the optimizer.
        """
        if not is_int(steps) or steps < 1:
            raise ConfigError(f"accumulate(steps={steps!r}) is not a number of microbatches: give an int of 1 or more")
        model = check_boosted_model(model, "accumulate")
        optimizer = check_boosted_optimizer(optimizer, "accumulate")
        batch = active_position(loader)
        if loader is not None and batch is None:
            raise ConfigError(
                f"accumulate(loader=...) got a {type(loader).__name__} that is not being read: give the loader that"
                " boost() or prepare_dataloader() returned, or the result of join_uneven(), while a loop is over it"
            )
        is_last = optimizer.num_microbatches + 1 >= steps or (batch is not None and batch.is_last)
        with nullcontext() if is_last else self.no_sync(model, optimizer), optimizer.microbatch(is_last):
            yield is_last

    def clip_grad_norm_(
        self, optimizer: OptimizerWrapper, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip the global norm of the optimizer's unscaled gradients; return the norm before, a 0-dim tensor.

        Returns None inside of `accumulate` before the last microbatch. Collective.

        Raises:
            ConfigError: `max_norm` is not a non-negative number, or `norm_type` not a positive one.
        """
        check_clipping(max_norm, norm_type, without_clipping="float('inf') for the norm alone")
        return check_boosted_optimizer(optimizer, "clip_grad_norm_").clip_grad_by_norm(max_norm, norm_type)

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
        """Run forward and backward for the next batch of an iterator, under any plugin.

        A pipeline splits the batch into microbatches of equal size (up to one sample); the gradient is that of the full
        batch. Under other plugins the batch is one microbatch.

        Args:
            data_iter: Iterator over this rank's batches: a mapping of the model's keyword arguments, a sequence of its
                positional ones, or its only one. All stages of a pipeline need the same ones. Host tensors are copied
                to the rank's device.
            model: Boosted model.
            criterion: Function of (outputs, batch) of each microbatch on the last stage that returns the loss. Losses
                are averaged, weighted by the microbatches' numbers of samples.
            optimizer: Boosted optimizer, optional; without it only the forward runs.
            return_loss: If True, the result has the detached loss.
            return_outputs: If True, the result has the detached outputs, concatenated along dim 0, on the last stage.
            num_items: Number of tokens or samples that the losses of this rank's batch *sum* over. They are summed, and
                the step's gradient is divided by the global count as in `backward`, which is exact also for
                microbatches with different numbers of tokens. Optional; by default losses are averaged.

        Returns:
            {"loss": tensor or None, "outputs": outputs or None}. All stages get the loss, unless the plugin was given
            broadcast_loss=False; only the last one gets outputs.

        Collective: every rank must call it.

        Raises:
            StopIteration: The iterator has ended, with a pipeline on all ranks.
            DesyncError: Stages have different batches, or only some ranks have one.
            RankFailedError: Another stage has failed; the message names it.
        """
        if not hasattr(data_iter, "__next__"):
            raise ConfigError(
                f"execute_pipeline() was given a {type(data_iter).__name__}, which is not an iterator, and each call"
                " takes the next batch of one: write data_iter = iter(dataloader) once an epoch, and pass that"
            )
        if not callable(criterion):
            raise ConfigError(
                f"execute_pipeline() was given a {type(criterion).__name__} for the criterion, which is not callable:"
                " give a function of (outputs, batch) that returns the loss"
            )
        model = check_boosted_model(model, "execute_pipeline")
        model.require_usable()
        if optimizer is not None:
            optimizer = check_boosted_optimizer(optimizer, "execute_pipeline")
        return self.plugin.execute_pipeline(
            data_iter, model, criterion, optimizer, return_loss, return_outputs, num_items=num_items
        )

    def summary(self, model: ModelWrapper, optimizer: OptimizerWrapper | None = None) -> str:
        """Print the summary table on the main process, and return it on every rank.

        It lists the plugin, ranks per axis, and per param group the dtypes of parameter, compute, reduction, master
        weight and state.
        """
        if optimizer is not None:
            optimizer = check_boosted_optimizer(optimizer, "summary")
        text = summarize(self.plugin, check_boosted_model(model, "summary"), optimizer)
        self.print(text)
        return text

    def debug_nonfinite(
        self, model: ModelWrapper, optimizer: OptimizerWrapper | None = None, *, action: str = "raise"
    ) -> AbstractContextManager[None]:
        """Return a context in which an inf or nan in a loss or gradient of any rank is an error on all ranks.

        The error of a loss, raised by `backward`, names the ranks, the first module with a nonfinite output, and
        nonfinite parameters. That of gradients, raised by clipping or by the step before anything is updated, names the
        parameters and the ranks that computed nonfinite gradients. An overflow that a loss scaler skips is not an
        error, and is logged. All outputs and gradients are checked, which takes time.

        Args:
            model: Boosted model.
            optimizer: Its boosted optimizer, optional; by default losses and gradients of all optimizers are checked.
            action: "raise" for a `NonfiniteError`, or "log" to log the same text and continue.

        Collective: every rank must enter the block, and each backward() and step in it.

        Raises:
            ConfigError: The action is unknown, or objects are not boosted.
        """
        model = check_boosted_model(model, "debug_nonfinite")
        if optimizer is not None:
            optimizer = check_boosted_optimizer(optimizer, "debug_nonfinite")
        return detect_nonfinite(model, optimizer, action=action)

    def gather_for_metrics(self, data: Any) -> Any:
        """Return the ranks' tensors concatenated along dim 0, and their lists of objects one after another.

        Each sample counts once: the samples that pad the last batch of a loader made by the Booster are removed from
        tensors and lists with one row per sample; those of other loaders are unknown. Ranks may have different numbers
        of rows, or none. Objects are plain values, such as strings, numbers, lists of any length, tuples and dicts.

        Args:
            data: Tensor with one row per sample (or a scalar per rank), list with one object per sample, or any nesting
                of these. An empty 1-D tensor, as `torch.empty(0)`, matches any other. A list that has tensors in it is
                not one of objects: its tensors are concatenated one by one, and objects beside them stay as they are.

        Collective: every rank must call it, with equally many tensors and lists; tensors may differ in dim 0 only.

        Raises:
            ConfigError: The data of some rank has neither tensor nor list, a sparse tensor, or an object that is not
                plain; on all ranks.
            DesyncError: The ranks' data do not match; the message names the ranks and their tensors.
        """
        return gather_for_metrics(data, self.plugin.data_group)

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.plugin.device

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return group_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks of the world."""
        return group_size()

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, which prints and writes logs."""
        return group_rank() == 0

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process."""
        if self.is_main_process:
            print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Wait for every rank. Collective."""
        barrier()


def _follow(plan: PluginPlan, model: nn.Module) -> None:
    plan.check_model(model)
    plan.prepare_model(model)


def _choice_of(plugin: str | Plugin | PluginChoice | None) -> PluginChoice | None:
    if isinstance(plugin, str) and plugin in PluginChoice.by_name:
        return PluginChoice.by_name[plugin]()
    if isinstance(plugin, str) and plugin.lower() in PluginChoice.by_name:
        raise ConfigError(f"plugin={plugin!r} is not known: write plugin={plugin.lower()!r}")
    return plugin if isinstance(plugin, PluginChoice) else None
