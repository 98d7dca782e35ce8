"""ColossalAI's `initialize` and engine, over the Booster: for scripts with a configuration file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from .booster import Booster
from .comm import check_same_across_ranks
from .core.model_wrapper import LabeledBatch
from .engine_config import EngineConfig, read_engine_config
from .errors import ConfigError
from .interface import Boosted, ModelWrapper, OptimizerWrapper
from .launch.config import Config
from .launch.launch import get_config
from .trainer.gradient_handlers import attach_gradient_handlers
from .validation import error_of

_Trained: TypeAlias = tuple[ModelWrapper, OptimizerWrapper, Callable[[Any, Any], Tensor]]


def initialize(
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable[[Any, Any], Tensor],
    train_dataloader: DataLoader[Any] | None = None,
    test_dataloader: DataLoader[Any] | None = None,
    lr_scheduler: LRScheduler | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
) -> tuple[Engine, DataLoader[Any] | None, DataLoader[Any] | None, LRScheduler | None]:
    """Return an engine with the features of a configuration, both loaders with this rank's samples, and the scheduler.

    Args:
        model: Any `nn.Module`.
        optimizer: Optimizer of its parameters.
        criterion: Function of (outputs, labels) that returns the loss.
        train_dataloader: Plain loader of (data, labels); its batch size is per rank.
        test_dataloader: Plain loader, likewise.
        lr_scheduler: Scheduler of the optimizer; step it where `Engine.step` returns True, or once an epoch.
        config: Dict or path of a Python file with `parallel`, `fp16` and such; optional, defaults to the launch's.

    Raises:
        ConfigError: The configuration asks for what cannot happen; on all ranks.

    Collective: every rank must call it, with equal arguments.
    """
    read: list[EngineConfig] = []

    def check() -> None:
        loaded = get_config() if config is None else Config.load(config)
        read.append(read_engine_config(loaded.to_dict()))

    error = error_of(check)
    check_same_across_ranks("initialize()", [] if error else read[0].fingerprint, error=error)
    asked = read[0]
    booster = asked.new_booster()
    boosted = booster.boost(model, optimizer, criterion, train_dataloader, lr_scheduler)
    if test_dataloader is not None:
        test_dataloader = booster.prepare_dataloader(test_dataloader)
    return Engine(booster, boosted, asked), boosted[3], test_dataloader, boosted[4]


class Engine:
    """Boosted `model`, `optimizer` and `criterion`, and their `booster`, in one object; `initialize` makes it."""

    def __init__(self, booster: Booster, boosted: Boosted, config: EngineConfig) -> None:
        self.booster, self._config = booster, config
        self.model, self.optimizer, self.criterion = cast("_Trained", boosted[:3])
        attach_gradient_handlers(booster, self.model, self.optimizer, config.gradient_handlers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        return self.model(*args, **kwargs)

    def zero_grad(self) -> None:
        """Clear the gradients; no effect in the middle of a `gradient_accumulation`."""
        if self.optimizer.num_microbatches == 0:
            self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of a loss, as one of the batches of a `gradient_accumulation`. Collective."""
        with self.booster.accumulate(self.model, self.optimizer, self._config.gradient_accumulation):
            self.booster.backward(loss, self.optimizer)

    def step(self) -> bool:
        """Clip and update the weights; in the middle of an accumulation do nothing and return False. Collective."""
        if self.optimizer.num_microbatches > 0:
            return False
        if self._config.clip_grad_norm > 0:
            self.booster.clip_grad_norm_(self.optimizer, self._config.clip_grad_norm)
        self.optimizer.step()
        return True

    def train(self) -> None:
        """Set training mode of the model."""
        self.model.train()

    def eval(self) -> None:
        """Set evaluation mode of the model."""
        self.model.eval()

    def execute_schedule(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, Tensor | None]:
        """Run the next batch through the pipeline or model; return outputs (on the last stage), labels and loss.

        Args:
            data_iter: Iterator of (data, labels): data as a tensor, or a dict of the model's arguments.
            forward_only: If True, compute no gradients.
            return_loss: If True, return the loss, else None.
            return_output_label: If True, return outputs and labels, else None for both.

        Collective: every rank must call it.
        """
        labels: Any = None

        def batches() -> Iterator[LabeledBatch]:
            nonlocal labels
            for batch in data_iter:
                if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                    raise ConfigError(
                        f"execute_schedule() got a batch of class {type(batch).__name__}, and takes (data, labels): let"
                        " the dataset return a pair, with data as a tensor or a dict of the model's arguments"
                    )
                labels = batch[1]
                yield LabeledBatch(batch[0], labels)

        given = batches() if hasattr(data_iter, "__next__") else data_iter
        steps = self._config.gradient_accumulation
        with nullcontext() if forward_only else self.booster.accumulate(self.model, self.optimizer, steps):
            result = self.booster.execute_pipeline(
                given,
                self.model,
                lambda outputs, batch: self.criterion(outputs, batch.targets),
                None if forward_only else self.optimizer,
                return_loss,
                return_output_label,
            )
        return result["outputs"], labels if return_output_label else None, result["loss"]
