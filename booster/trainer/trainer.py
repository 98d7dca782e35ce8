"""`Trainer`: the training loop over a Booster, under every plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from booster.boost_checks import check_boosted_model, check_boosted_optimizer, check_scheduler
from booster.booster import Booster
from booster.comm import check_same_across_ranks
from booster.data.dataloader import DistributedDataLoader
from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.logger import get_dist_logger
from booster.pytree import map_tensors
from booster.validation import check_clipping, check_count, error_of

from .batches import as_batch, batches_of, check_loader, fingerprint_of_loader, is_last_batch, join_batches, loss_of
from .checkpoint_hook import CheckpointHook, check_paths, latest_of
from .gradient_handlers import Given, attach_gradient_handlers, resolve_gradient_handlers
from .hook import HookList, TrainerState, check_hook
from .metric_hooks import LossHook, MetricHook
from .schedule_hook import LRScheduleHook

_AUTO = "auto"

# Note [Saved positions]
# Hooks save at two places, where all else of that place is done: after an iteration, behind its evaluation, and after
# an epoch, behind its evaluation and with the next epoch as the position. A run that was saved after the last iteration
# of an epoch resumes with the end of that epoch.


class Trainer(TrainerState):
    """Training loop over a Booster: forward, backward, clipping, step, evaluations; everything else are hooks.

    The loader yields mappings, which the model takes by keyword; pairs of inputs and targets; or inputs alone. Each
    batch runs by `Booster.execute_pipeline`, so the loop is the same with and without a pipeline. `epochs` and `steps`
    of `fit` count the whole run: a script that is started again continues.

    Args:
        booster: Booster of the objects.
        model: Boosted model.
        optimizer: Its boosted optimizer.
        criterion: Function of (outputs, targets) that returns the loss; with mappings and inputs alone, of (outputs,
            batch). Optional, by default the model returns its loss, as those of transformers do.
        lr_scheduler: Scheduler of the optimizer, stepped by a `LRScheduleHook`; optional.
        hooks: Objects with some of the methods of `booster.trainer.Hook`; a `LossHook`, and a `LRScheduleHook` if there
            is a scheduler, are added if there are none.
        accumulate: Number of batches per step, of which the gradient is the mean; see `Booster.accumulate`.
        max_norm: Maximum gradient norm; optional, by default, as with 0, gradients are not clipped.
        gradient_handlers: Classes, registered names or `dict(type=name, ...)` of gradient handlers, which run in this
            order between backward and step; see `register_gradient_handler`.

    Collective: every rank must make it, with equal arguments.

    Raises:
        ConfigError: Objects are not boosted, or an argument is invalid; on all ranks.
        DesyncError: The ranks' arguments differ.

    Examples:
        >>> import torch
        >>> from booster import Booster, Trainer
        >>> data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.zeros(8, 1))
        >>> model = torch.nn.Linear(3, 1)
        >>> booster = Booster(device="cpu")
        >>> loader = booster.prepare_dataloader(data, batch_size=2)
        >>> model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> trainer = Trainer(booster, model, optimizer, torch.nn.functional.mse_loss)
        >>> metrics = trainer.fit(loader, epochs=2)
        >>> trainer.step
        8
    """

    def __init__(
        self,
        booster: Booster,
        model: ModelWrapper,
        optimizer: OptimizerWrapper,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        lr_scheduler: LRScheduler | None = None,
        hooks: Iterable[Any] = (),
        accumulate: int = 1,
        max_norm: float | None = None,
        *,
        gradient_handlers: Sequence[Given] = (),
    ) -> None:
        super().__init__()
        self.booster, self.model, self.optimizer, self.lr_scheduler = booster, model, optimizer, lr_scheduler
        self.criterion, self.accumulate, self.max_norm = criterion, accumulate, max_norm
        self.train_loader: Any = None
        self._is_at_epoch_end = self._ends_epoch = False
        lines: list[str] = []
        error = error_of(lambda: lines.extend(self._check(hooks, gradient_handlers)))
        check_same_across_ranks("making a Trainer", lines, error=error)
        attach_gradient_handlers(booster, model, optimizer, gradient_handlers)

    def _check(self, hooks: Any, gradient_handlers: Sequence[Given]) -> list[str]:
        """Check the arguments and sort the hooks; return what must be equal on all ranks."""
        if not isinstance(self.booster, Booster):
            raise ConfigError(
                f"Trainer() was given a {type(self.booster).__name__} for the Booster: write Trainer(booster, model,"
                " optimizer, criterion)"
            )
        check_boosted_model(self.model, "Trainer")
        check_boosted_optimizer(self.optimizer, "Trainer")
        if self.optimizer.model is not self.model:
            raise ConfigError("Trainer() got an optimizer of another model: pass both as one boost() returned them")
        if self.criterion is not None and not callable(self.criterion):
            raise ConfigError(
                f"criterion={self.criterion!r} is not callable: pass a function of (outputs, targets), or None if the"
                " model returns its loss"
            )
        if self.lr_scheduler is not None:
            check_scheduler(self.lr_scheduler, "Trainer")
        check_count(accumulate=self.accumulate)
        if self.max_norm is not None:
            check_clipping(self.max_norm, 2.0)
        if not isinstance(hooks, Iterable):
            raise ConfigError(f"hooks must be a list, got a single {type(hooks).__name__}: write hooks=[LossHook()]")
        given = list(hooks)
        for hook in given:
            check_hook(hook)
        names = [one.name for one in given if isinstance(one, MetricHook)]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ConfigError(
                f"two of the hooks write the metric eval_{repeated}: give one of them another name, as in"
                f" MetricHook(..., name='{repeated}_2')"
            )
        check_paths([one for one in given if isinstance(one, CheckpointHook)])
        if not any(isinstance(one, LossHook) for one in given):
            given.append(LossHook())
        if self.lr_scheduler is not None and not any(isinstance(one, LRScheduleHook) for one in given):
            given.append(LRScheduleHook())
        self._hooks = HookList(given)
        handlers = ", ".join(cls.__name__ for cls, _ in resolve_gradient_handlers(gradient_handlers)) or "none"
        settings = [f"accumulate={self.accumulate}", f"max_norm={self.max_norm}", f"gradient handlers: {handlers}"]
        return [*self._hooks.fingerprint(), *settings]

    @property
    def hooks(self) -> tuple[Any, ...]:
        """The hooks in the order of their calls."""
        return self._hooks.hooks

    def fit(
        self,
        train_loader: Iterable[Any],
        *,
        epochs: int | None = None,
        steps: int | None = None,
        eval_loader: Iterable[Any] | None = None,
        evaluate_every: int | None = None,
        resume: str | PathLike[str] | None = None,
    ) -> dict[str, float]:
        """Train until the run has so many epochs or steps, or a hook stops it; return `metrics`.

        Args:
            train_loader: Loader made by the Booster, or an iterable of this rank's batches, which is read by
                `join_uneven`. A run can be saved and resumed with the former.
            epochs: Number of epochs of the whole run, with those before a resume.
            steps: Number of steps of the whole run, instead; epochs follow each other.
            eval_loader: Loader of evaluations, optional.
            evaluate_every: Number of steps between evaluations; optional, defaults to one at the end of each epoch.
            resume: Directory of a checkpoint that a Trainer has saved; or "auto" for the latest one of the
                `CheckpointHook`, if there is one already, and of several hooks the one after most batches. Optional, by
                default the run starts, or continues in memory.

        Collective: every rank must call it.

        Raises:
            ConfigError: An argument is invalid, or a hook can't work with these; on all ranks.
            DesyncError: The ranks' arguments differ, or their loaders divide the samples differently.
            CheckpointError: The checkpoint does not fit, or a save failed.
            RankFailedError: Another rank failed; the message names the hook that raised there.
        """
        lines = [f"epochs={epochs}", f"steps={steps}"]
        lines += [f"evaluates={eval_loader is not None}", f"evaluate_every={evaluate_every}"]

        def check() -> None:
            self._check_fit(train_loader, epochs, steps, eval_loader, evaluate_every, resume)
            lines.extend(fingerprint_of_loader(train_loader, "train_loader"))
            lines.extend(fingerprint_of_loader(eval_loader, "eval_loader"))

        error = error_of(check)
        check_same_across_ranks("Trainer.fit()", lines, error=error)
        self._epochs, self._steps = epochs, steps
        self.total_steps, self.has_evaluation = steps, eval_loader is not None
        self._eval_loader, self._evaluate_every = eval_loader, evaluate_every
        self._start_at(train_loader, resume)
        with ExitStack() as self.resources, self._fitting():
            self._hooks.call("before_fit", self)
            if not self.model.unwrap().training:  # else layers that the user has frozen in evaluation mode stay so
                self.model.train()
            while not self._is_done:
                self._run_epoch()
            self._hooks.call("after_fit", self)
            check_same_across_ranks("the end of Trainer.fit()", [f"step={self.step}", f"epoch={self.epoch}"])
        return self.metrics

    def _check_fit(
        self,
        train_loader: Any,
        epochs: int | None,
        steps: int | None,
        eval_loader: Any,
        evaluate_every: int | None,
        resume: str | PathLike[str] | None,
    ) -> None:
        if (epochs is None) == (steps is None):
            raise ConfigError(f"fit(epochs={epochs}, steps={steps}): give the length of the run by one of them")
        check_count(**{"steps": steps} if epochs is None else {"epochs": epochs})
        dp_size = self.booster.plugin.dp_size
        check_loader(train_loader, "train_loader", dp_size)
        if eval_loader is not None:
            check_loader(eval_loader, "eval_loader", dp_size)
        if evaluate_every is not None:
            check_count(evaluate_every=evaluate_every)
            if eval_loader is None:
                raise ConfigError(f"evaluate_every={evaluate_every} has nothing to evaluate: pass an eval_loader")
        if resume is not None and not isinstance(resume, (str, PathLike)):
            raise ConfigError(
                f"fit(resume={resume!r}): give resume={_AUTO!r} for the latest checkpoint of the CheckpointHook, if"
                " there is one, or the path of a checkpoint"
            )
        if resume == _AUTO and not self._checkpoint_paths:
            raise ConfigError("resume='auto' continues from the path of a CheckpointHook, and there is none: add one")

    def _start_at(self, train_loader: Any, resume: str | PathLike[str] | None) -> None:
        """Set the position: that of a checkpoint, that of the last `fit` in the same loader's epoch, or a new epoch."""
        is_continued = self.train_loader is train_loader and self.epoch_iteration > 0
        self.train_loader, self._is_stopped = train_loader, False
        self.is_resumed = resume is not None
        if resume is not None:
            self._load(resume)
        elif is_continued and isinstance(train_loader, DistributedDataLoader):
            train_loader.load_state_dict(train_loader.state_dict())
        else:
            self.epoch_iteration, self._is_at_epoch_end = 0, False

    @property
    def _is_done(self) -> bool:
        has_epochs = self._epochs is not None and self.epoch >= self._epochs
        return self._is_stopped or has_epochs or (self._steps is not None and self.step >= self._steps)

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        self.is_fitting = True
        try:
            yield
        finally:
            self.is_fitting = False
            self.batch = self.outputs = None

    def _run_epoch(self) -> None:
        if not self._is_at_epoch_end:
            if self.epoch_iteration == 0:
                self._hooks.call("before_epoch", self)
            for batch in batches_of(self.train_loader):
                self._is_at_epoch_end = is_last_batch()
                self._run_iteration(batch)
                if self._is_done:
                    break
            else:
                self._is_at_epoch_end = True
            if self.epoch_iteration == 0:
                raise ConfigError(
                    "train_loader has no batches: give it a dataset with samples, and no smaller than a batch"
                )
        if self._is_at_epoch_end:
            self._end_epoch()

    def _end_epoch(self) -> None:
        if self._eval_loader is not None and self._evaluate_every is None:
            self.evaluate(self._eval_loader)
        self._ends_epoch = True
        self._hooks.call("after_epoch", self)
        self.epoch, self.epoch_iteration = self.epoch + 1, 0
        self._is_at_epoch_end = self._ends_epoch = False

    def _run_iteration(self, given: Any) -> None:
        self.batch = as_batch(given)
        self._hooks.call("before_iteration", self)
        with self.booster.accumulate(self.model, self.optimizer, self.accumulate) as is_last:
            self._forward("training", self.optimizer)
            if self.max_norm:
                norm = self.booster.clip_grad_norm_(self.optimizer, self.max_norm)
                self.grad_norm = self.grad_norm if norm is None else norm
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.is_step_end = is_last
        self.iteration, self.epoch_iteration = self.iteration + 1, self.epoch_iteration + 1
        self.step += is_last
        if is_last and self._eval_loader is not None and self._evaluate_every and not self.step % self._evaluate_every:
            self.evaluate(self._eval_loader)
        self._hooks.call("after_iteration", self)

    def _forward(self, mode: str, optimizer: OptimizerWrapper | None) -> None:
        result = self.booster.execute_pipeline(
            iter([self.batch]),
            self.model,
            partial(loss_of, self.criterion),
            optimizer,
            return_outputs=self._hooks.needs_outputs(mode),
        )
        self.loss, self.outputs = result["loss"], result["outputs"]

    def evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Run the model over a loader without gradients; return the metrics of this evaluation.

        Args:
            loader: Loader made by the Booster, or an iterable of this rank's batches.

        Collective: every rank must call it.

        Raises:
            ConfigError: It is not a loader, or several; on all ranks.
            DesyncError: The ranks' loaders divide the samples differently.
        """
        if not self.is_fitting:
            self._check_same_loader("Trainer.evaluate()", loader)
        before = self.batch, self.outputs, self.loss
        try:
            with self._evaluating():
                self._hooks.call("before_evaluation", self)
                for given in batches_of(loader):
                    self.batch = as_batch(given)
                    self._forward("evaluation", None)
                    self._hooks.call("after_evaluation_iteration", self)
                self._hooks.call("after_evaluation", self)
        finally:
            self.batch, self.outputs, self.loss = before
        return {name: value for name, value in self.metrics.items() if name.startswith("eval_")}

    def predict(self, loader: Iterable[Any], select: Callable[[Any], Any] | None = None) -> Any:
        """Return the outputs for all samples of a loader, of all ranks, on the host; None on stages that have none.

        They are in the order of the dataset if the loader does not shuffle, each sample once.

        Args:
            loader: Loader of inputs, or of pairs, whose targets are ignored.
            select: Function that takes what is wanted out of the outputs, such as their logits; optional.

        Collective: every rank must call it.

        Raises:
            ConfigError: It is not a loader, or several; on all ranks.
            DesyncError: The ranks' loaders divide the samples differently.
        """
        self._check_same_loader("Trainer.predict()", loader)
        found: list[Any] = []
        with self._evaluating():
            for given in batches_of(loader):
                batch = iter([as_batch(given)])
                result = self.booster.execute_pipeline(
                    batch, self.model, lambda *_: torch.zeros(()), return_loss=False, return_outputs=True
                )
                if result["outputs"] is not None:
                    outputs = result["outputs"] if select is None else select(result["outputs"])
                    found.append(map_tensors(torch.Tensor.cpu, self.booster.gather_for_metrics(outputs)))
        return join_batches(found) if found else None

    def _check_same_loader(self, call: str, loader: Any) -> None:
        lines: list[str] = []

        def check() -> None:
            check_loader(loader, "loader", self.booster.plugin.dp_size)
            lines.extend(fingerprint_of_loader(loader, "loader"))

        check_same_across_ranks(call, lines, error=error_of(check))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(modes[0][1])
            for module, was_training in modes:  # also of frozen layers that stay in evaluation mode
                module.training = was_training

    # Checkpoints; see Note [Saved positions].

    def save(
        self,
        path: str | PathLike[str],
        *,
        step: int | None = None,
        keep_last: int | None = None,
        use_async: bool = False,
    ) -> None:
        """Save the run for an exact resume by `fit(resume=path)`: all objects, the position, the hooks' states.

        Args:
            path: Directory.
            step: Number of the directory, keep_last and use_async: as of `Booster.save`.
            keep_last: Number of numbered directories that are kept.
            use_async: If True, write in the background.

        Collective: every rank must call it.

        Raises:
            ConfigError: The loader has no position to save.
        """
        progress = {
            "epoch": self.epoch + self._ends_epoch,
            "epoch_iteration": 0 if self._ends_epoch else self.epoch_iteration,
            "is_at_epoch_end": self._is_at_epoch_end and not self._ends_epoch,
            "iteration": self.iteration,
            "step": self.step,
            "loader_epoch": getattr(self.train_loader, "epoch", None),
            "accumulate": self.accumulate,
        }
        extra = {"trainer": progress, "metrics": dict(self.metrics), "hooks": self._hooks.state_dict()}
        self.booster.save(
            path,
            self.model,
            self.optimizer,
            self.lr_scheduler,
            self.train_loader,
            extra=extra,
            step=step,
            keep_last=keep_last,
            use_async=use_async,
        )

    def _load(self, resume: str | PathLike[str]) -> None:
        path: Any = latest_of(self._checkpoint_paths) if resume == _AUTO else resume
        objects = (self.model, self.optimizer, self.lr_scheduler, self.train_loader)
        extra = self.booster.load(path, *objects, missing_ok=resume == _AUTO)
        if extra is None and resume == _AUTO:
            return
        if not isinstance(extra, Mapping) or "trainer" not in extra:
            raise ConfigError(
                f"resume={str(resume)!r} is a checkpoint without the position of a Trainer, such as one that a loop of"
                " its own has saved: call booster.load() before, and fit() without resume"
            )
        saved = extra["trainer"]
        self.epoch, self.epoch_iteration = saved["epoch"], saved["epoch_iteration"]
        self.iteration, self.step = saved["iteration"], saved["step"]
        if saved["accumulate"] != self.accumulate:
            get_dist_logger("booster.trainer").warning(
                f"the run was saved with accumulate={saved['accumulate']}, and continues with"
                f" accumulate={self.accumulate}: steps have other batches",
                ranks=[0],
            )
        # With a larger batch of all ranks the rest of an epoch may hold no batch: the loader is in the next one.
        has_no_rest = self.epoch_iteration > 0 and saved["loader_epoch"] != getattr(self.train_loader, "epoch", None)
        self._is_at_epoch_end = saved["is_at_epoch_end"] or has_no_rest
        self.metrics = dict(extra["metrics"])
        self._hooks.load_state_dict(extra["hooks"])

    @property
    def _checkpoint_paths(self) -> list[Path]:
        return [one.path for one in self.hooks if isinstance(one, CheckpointHook)]
