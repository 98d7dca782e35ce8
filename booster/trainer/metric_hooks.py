"""Hooks of losses and metrics: means over all ranks, each sample once, and what follows from them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from booster.comm import all_gather_equal, all_gather_numbers, all_gather_text, group_rank
from booster.errors import ConfigError
from booster.validation import check_count, is_non_nan_number

from .batches import num_samples_of, targets_of
from .hook import Hook, TrainerState, hook_name


class _RankSum:
    """Weighted sum of a rank's losses, which stays on the device until it is read."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._sum: Any = 0.0
        self._weight = 0.0

    def add(self, value: torch.Tensor | None, weight: float = 1.0) -> None:
        if value is not None:  # a pipeline without broadcast_loss has it on its last stage only
            self._sum = self._sum + _as_fp64(value) * weight
            self._weight += weight

    def gather(self) -> list[list[float]]:
        """Return sum and weight of every rank. Collective."""
        local = torch.tensor([[float(self._sum), self._weight]], dtype=torch.float64)
        return all_gather_equal(local).tolist()  # type: ignore[no-any-return]

    def mean(self) -> float:
        """Return the mean over all ranks; nan without values. Collective."""
        rows = self.gather()
        weight = math.fsum(row[1] for row in rows)
        return math.fsum(row[0] for row in rows) / weight if weight else math.nan

    def load(self, rows: Sequence[Sequence[float]], num_ranks: int) -> None:
        """Load a result of `gather`; on another number of ranks the first one has all, weighted as of these ranks."""
        rank = group_rank()
        if len(rows) == num_ranks:
            self._sum, self._weight = rows[rank]
        elif rank == 0:
            totals = (math.fsum(column) for column in zip(*rows, strict=True))
            self._sum, self._weight = (total * num_ranks / len(rows) for total in totals)


class LossHook(Hook):
    """Mean losses: `epoch_loss` over an epoch's batches and the ranks, `eval_loss` over the samples of evaluations.

    A Trainer adds one if it is given none. The samples that pad the last batch count in `eval_loss`, as the criterion
    has averaged them already; a `MetricHook` counts each sample once.

    Args:
        priority: Position among the hooks.
    """

    def __init__(self, *, priority: int = 0) -> None:
        self.priority = priority
        self._epoch, self._evaluation = _RankSum(), _RankSum()

    def before_epoch(self, trainer: TrainerState) -> None:
        self._epoch.clear()

    def after_iteration(self, trainer: TrainerState) -> None:
        self._epoch.add(trainer.loss)

    def after_epoch(self, trainer: TrainerState) -> None:
        trainer.metrics["epoch_loss"] = self._epoch.mean()
        self._epoch.clear()

    def before_evaluation(self, trainer: TrainerState) -> None:
        self._evaluation.clear()

    def after_evaluation_iteration(self, trainer: TrainerState) -> None:
        self._evaluation.add(trainer.loss, num_samples_of(trainer.batch))

    def after_evaluation(self, trainer: TrainerState) -> None:
        trainer.metrics["eval_loss"] = self._evaluation.mean()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the current epoch, by rank. Collective."""
        return {"epoch": self._epoch.gather()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`. Collective."""
        self._epoch.clear()
        self._epoch.load(state["epoch"], len(all_gather_numbers([0])))


class MetricHook(Hook):
    """A metric of evaluations, exact over the ranks: each sample counts once.

    Args:
        metric: A function of (outputs, targets), or an object with `update(outputs, targets)`, `compute()` and
            `reset()`, such as any metric of torchmetrics. A function returns a tensor with one row per sample, whose
            mean over all elements is the metric; or a pair of such tensors, whose sums are divided. An object is
            updated with the outputs and targets of all ranks, and must not sum over ranks once more; those of
            torchmetrics are told so.
        name: The result is `trainer.metrics["eval_<name>"]`; optional, defaults to the function's name or the class's
            in lower case. A `compute()` that returns a dict adds its keys.
        outputs: Function that takes the tensor (or nested tensors) with one row per sample out of the model's outputs;
            optional, by default the outputs themselves, or their `logits`.
        targets: The same for targets; optional, defaults to the `labels` of a mapping.
        priority: Position among the hooks.

    Raises:
        ConfigError: `metric` is neither.
    """

    needs_outputs = ("evaluation",)

    def __init__(
        self,
        metric: Any,
        name: str | None = None,
        *,
        outputs: Callable[[Any], Any] | None = None,
        targets: Callable[[Any], Any] | None = None,
        priority: int = 10,
    ) -> None:
        self._is_object = all(callable(getattr(metric, one, None)) for one in ("update", "compute", "reset"))
        if isinstance(metric, type) or not (self._is_object or callable(metric)):
            raise ConfigError(
                f"MetricHook(metric={metric!r}) is neither a function of (outputs, targets) nor an object with"
                " update(), compute() and reset(): pass one, such as torchmetrics.F1Score('multiclass', num_classes=9)"
            )
        modules: Sequence[Any] = list(metric.modules()) if isinstance(metric, nn.Module) else []
        for one in modules:
            if hasattr(one, "distributed_available_fn"):  # of torchmetrics: every rank has all samples already
                one.distributed_available_fn = _is_never_distributed
        self.priority = priority
        self._metric = metric
        self.name = name or getattr(metric, "__name__", type(metric).__name__).lower()
        self._outputs_of = _logits_of if outputs is None else outputs
        self._targets_of = _labels_of if targets is None else targets
        self._sum = self._count = 0.0
        self._has_outputs = False

    def before_evaluation(self, trainer: TrainerState) -> None:
        self._sum = self._count = 0.0
        self._has_outputs = False
        if self._is_object:
            self._metric.reset()

    def after_evaluation_iteration(self, trainer: TrainerState) -> None:
        if trainer.outputs is None:  # another stage of the pipeline has them
            return
        self._has_outputs = True
        gather = trainer.booster.gather_for_metrics
        outputs = self._outputs_of(trainer.outputs)
        targets = _on_device_of(outputs, self._targets_of(targets_of(trainer.batch)))
        if self._is_object:
            gathered = gather((outputs, targets))
            if hasattr(self._metric, "to"):
                self._metric.to(trainer.booster.device)
            self._metric.update(*gathered)
            return
        sums, counts = self._rows(outputs, targets)
        gathered_sums, gathered_counts = gather((sums, counts))
        self._sum += float(gathered_sums.sum())
        self._count += float(gathered_counts.sum())

    def _rows(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sum and number of values of each sample."""
        values = self._metric(outputs, targets)
        values, counts = values if isinstance(values, tuple) else (values, None)
        if not isinstance(values, torch.Tensor) or values.dim() == 0:
            raise ConfigError(
                f"the metric {self.name} returned a {type(values).__name__} without a row per sample, and a mean of"
                " means over ranks is not the mean: return the value of every sample, as outputs.argmax(1) == targets"
            )
        counts = torch.ones_like(values) if counts is None else counts
        return _sum_of_rows(values), _sum_of_rows(counts)

    def after_evaluation(self, trainer: TrainerState) -> None:
        found: dict[str, float] | None = None
        if self._has_outputs and self._is_object:
            found = _as_floats(self.name, self._metric.compute())
        elif self._has_outputs:
            found = {self.name: self._sum / self._count if self._count else math.nan}
        for name, value in _first_of_ranks(found, hook_name(self)).items():
            trainer.metrics[f"eval_{name}"] = value


def _is_never_distributed() -> bool:
    return False


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which samples or tokens have their largest logit at the target, and which count: those without -100.

    Args:
        outputs: Logits, of shape (samples, ..., classes).
        targets: Classes, of shape (samples, ...).
    """
    counted = targets != -100
    return (outputs.argmax(-1) == targets) & counted, counted


class AccuracyHook(MetricHook):
    """`eval_accuracy`: the share of samples, or of tokens whose label is not -100, with the largest logit at the label.

    Args:
        name: As of `MetricHook`; optional, defaults to "accuracy".
        outputs: As of `MetricHook`.
        targets: As of `MetricHook`.
        priority: Position among the hooks.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        outputs: Callable[[Any], Any] | None = None,
        targets: Callable[[Any], Any] | None = None,
        priority: int = 10,
    ) -> None:
        super().__init__(accuracy, name, outputs=outputs, targets=targets, priority=priority)


def _logits_of(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


def _labels_of(targets: Any) -> Any:
    return targets.get("labels", targets) if isinstance(targets, Mapping) else targets


def _on_device_of(outputs: Any, targets: Any) -> Any:
    both = isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)
    return targets.to(outputs.device) if both else targets


def _sum_of_rows(values: torch.Tensor) -> torch.Tensor:
    return _as_fp64(values).reshape(len(values), -1).sum(1)


def _as_fp64(values: torch.Tensor) -> torch.Tensor:
    values = values.detach()
    return (values.cpu() if values.device.type == "mps" else values).double()  # MPS has no fp64


def _as_floats(name: str, computed: Any) -> dict[str, float]:
    if isinstance(computed, Mapping):
        return {f"{name}_{key}": float(value) for key, value in computed.items()}
    return {name: float(computed)}


def _first_of_ranks(found: dict[str, float] | None, name: str) -> dict[str, float]:
    """Return the values of the first rank that has any, on all ranks. Collective."""
    texts = all_gather_text(f"Trainer.evaluate(), the result of {name}", [json.dumps(found)])
    values = (json.loads(text) for (text,) in texts)
    first: dict[str, float] = next((one for one in values if one is not None), {})
    return first


def monitored_metric(metrics: Mapping[str, float], name: str, owner: str) -> float:
    """Return a metric; raise `ConfigError` that names the hook if there is none of that name."""
    if name not in metrics:
        raise ConfigError(
            f"{owner} monitors {name!r}, and the metrics are {', '.join(sorted(metrics)) or 'none'}: choose one of"
            " these, or add the hook that computes it"
        )
    return metrics[name]


class BestValue:
    """The best value of a metric so far.

    Args:
        monitor: Name in `trainer.metrics`.
        mode: "min" or "max".
        min_delta: A smaller improvement does not count.
        owner: Name of the hook, for messages.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(self, monitor: Any, mode: Any, min_delta: Any, owner: str) -> None:
        if not isinstance(monitor, str) or not monitor:
            raise ConfigError(f"{owner} was given {monitor!r} for a metric: give its name, such as 'eval_loss'")
        if mode not in ("min", "max"):
            raise ConfigError(
                f"{owner}(mode={mode!r}): the best {monitor} is the smallest, 'min', or the largest, 'max'"
            )
        if not is_non_nan_number(min_delta) or min_delta < 0:
            raise ConfigError(f"{owner}(min_delta={min_delta!r}): an improvement is a number of at least 0")
        self.monitor, self.value = monitor, None
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = float(min_delta)
        self._owner = owner

    value: float | None

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metric has improved, which a nan has not; raise `ConfigError` if there is none."""
        now = monitored_metric(metrics, self.monitor, self._owner)
        is_better = self.value is None or self._sign * (self.value - now) > self._min_delta
        if math.isnan(now) or not is_better:
            return False
        self.value = now
        return True


class EarlyStopHook(Hook):
    """Ends training, on all ranks, when a metric of the evaluations in `fit` has stopped improving.

    Args:
        monitor: Name in `trainer.metrics`.
        wait: Number of evaluations without an improvement after which training ends.
        mode: "min" or "max".
        min_delta: A smaller improvement does not count.
        priority: Position among the hooks.

    Raises:
        ConfigError: An argument is invalid; at the first evaluation: there is no metric of that name.
    """

    def __init__(
        self,
        monitor: str = "eval_loss",
        *,
        wait: int = 3,
        mode: str = "min",
        min_delta: float = 0.0,
        priority: int = 60,
    ) -> None:
        check_count(wait=wait)
        self.priority = priority
        self._best = BestValue(monitor, mode, min_delta, "EarlyStopHook")
        self._wait = wait
        self._num_without = 0

    @property
    def best(self) -> float | None:
        """Best value so far; None before the first evaluation."""
        return self._best.value

    def before_fit(self, trainer: TrainerState) -> None:
        if not trainer.has_evaluation:
            raise ConfigError("EarlyStopHook needs evaluations, and fit() has no eval_loader: pass one")
        trainer.stop(self._num_without >= self._wait)  # a run that was stopped, and is resumed

    def after_evaluation(self, trainer: TrainerState) -> None:
        if not trainer.is_fitting:
            return
        self._num_without = 0 if self._best.update(trainer.metrics) else self._num_without + 1
        trainer.stop(self._num_without >= self._wait)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and the number of evaluations since."""
        return {"best": self._best.value, "num_without": self._num_without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`."""
        self._best.value, self._num_without = state["best"], state["num_without"]
