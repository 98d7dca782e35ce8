"""Statistics of the steps since the last record, on one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from booster.fault_tolerance.progress import SAVE_PHASES, StepCallback

# Breakdown of the time of a step: phases by name, and the remaining wall-clock time.
OTHER = "other"
PHASES = ("forward", "backward", "clip", "step", "data", "communication", "evaluate", "save", "load", OTHER)
NON_TRAINING_PHASES = ("evaluate", "save", "load")  # excluded from the time that throughput refers to

_TOKEN_NAMES = ("input_ids", "decoder_input_ids", "tokens")
_TOKEN_DTYPES = (torch.int32, torch.int64)


class StepStats(StepCallback):
    """Statistics of one training thread since the last record.

    Args:
        model: Boosted model whose batches are counted.
        optimizer: Optimizer of the model, whose steps are counted.
        tokens: Callable that returns the number of tokens in a forward's arguments; optional, defaults to
            `count_tokens`.
        on_step: Callable that runs after each step.

    Attributes:
        num_steps: Number of finished steps.
        num_skipped: Number of steps that were skipped because gradients overflowed.
        loss_sum: Sum of the losses.
        loss_weight: Divisor of the sum: number of backward calls, or of the items that the losses sum over.
        num_tokens: Tokens or samples of this rank. A batch that several ranks compute together is divided among them.
        unit: "tokens" or "samples".
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        tokens: Callable[[tuple[Any, ...], dict[str, Any]], int] | None,
        on_step: Callable[[], None],
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._tokens = tokens
        self._on_step = on_step
        self.unit = "tokens"
        self.clear()

    def clear(self) -> None:
        self.num_steps = self.num_skipped = 0
        self.loss_sum: Any = 0.0
        self.loss_weight = 0.0
        self.num_tokens = 0.0
        self._seconds: defaultdict[str | None, float] = defaultdict(float)

    def seconds_by_phase(self) -> dict[str, float]:
        """Return the seconds of each of `PHASES`; their sum is the time of all phases."""
        seconds = {name: self._seconds[name] for name in PHASES if name != OTHER}
        seconds["save"] += sum(self._seconds[name] for name in SAVE_PHASES)
        return {**seconds, OTHER: sum(self._seconds.values()) - sum(seconds.values())}

    def on_time(self, name: str | None, seconds: float) -> None:
        self._seconds[name] += seconds

    def on_forward(self, model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if model is not self._model:
            return
        count: float
        if self._tokens is None:
            count, self.unit = count_tokens(arguments, keywords)
        else:
            count = self._tokens(arguments, keywords)
        self.num_tokens += count / model.model_parallel_size

    def on_loss(self, optimizer: Any, loss: torch.Tensor, num_items: float | None) -> None:
        if optimizer is not self._optimizer:
            return
        detached = loss.detach()
        # On an accelerator float() would synchronize the device.
        self.loss_sum = self.loss_sum + (float(detached) if detached.device.type == "cpu" else detached.float())
        self.loss_weight += 1.0 if num_items is None else float(num_items)

    def on_step_end(self, optimizer: Any) -> None:
        if optimizer is self._optimizer:
            self.num_steps += 1
            self.num_skipped += optimizer.step_was_skipped
            self._on_step()


def count_tokens(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[int, str]:
    """Count the tokens or samples in the arguments of a forward.

    Args:
        arguments: Positional arguments; one may be a mapping of named tensors.
        keywords: Keyword arguments.

    Returns:
        Number of elements of `input_ids`, or of the first tensor if it is a 2-d integer tensor, and "tokens"; else the
        length of the first tensor and "samples".
    """
    named = {**keywords}
    for argument in arguments:
        if isinstance(argument, Mapping):
            named.update(argument)
    for name in _TOKEN_NAMES:
        if isinstance(named.get(name), torch.Tensor):
            return named[name].numel(), "tokens"
    flat = [part for one in arguments for part in (one if isinstance(one, (list, tuple)) else [one])]
    tensors = (one for one in [*flat, *named.values()] if isinstance(one, torch.Tensor))
    first = next(tensors, None)
    if first is None:
        return 0, "samples"
    if first.dim() == 2 and first.dtype in _TOKEN_DTYPES:
        return first.numel(), "tokens"
    return (first.shape[0] if first.dim() else 1), "samples"
