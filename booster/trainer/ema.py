"""Moving average of the weights, kept beside the optimizer's states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from booster.comm import LOW_PRECISION, group_size, raise_on_all_ranks
from booster.errors import BoosterError, ConfigError, RankFailedError, add_note
from booster.interface import OptimizerWrapper
from booster.validation import check_count, check_flag, is_number

from .hook import Hook, TrainerState

# Note [Average of shards]
# The average of a weight is a state of the optimizer with the weight's shape: of the shard that this rank updates, in
# fp32 where that is an fp32 master. Averages are elementwise, so those of all shards together are the average that one
# process computes, without a message. As a state it moves with its shard, is saved under `<parameter name>.<name>`, and
# goes into any plugin. To compute with the averages, they change places with the weights by
# `OptimizerWrapper.write_weights`, which updates the model.
# Optimizers create their states where `optimizer.state[p]` is empty, so an average is added only after a parameter was
# updated: it starts with the value of that first update, as torch's `AveragedModel` does.


class EMAHook(Hook):
    """Exponential moving average of the weights, under every plugin; evaluations in `fit` run with it.

    Each rank averages what its optimizer updates, which takes as much memory as these parameters, and no communication.
    Averages are part of checkpoints, and go into any plugin with them. A step that a loss scaler skips is not counted.
    Buffers are not averaged.

    Args:
        decay: Weight of the average in `decay * average + (1 - decay) * weight`.
        every: Number of steps between updates.
        evaluates: If True, evaluations run with the averages.
        name: Name of the state in the optimizer, for several averages.
        priority: Position among the hooks.

    Raises:
        ConfigError: An argument is invalid; in `fit`: the weights are of low precision and have no masters, or the hook
            averages those of another optimizer.
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        every: int = 1,
        evaluates: bool = True,
        name: str = "ema",
        priority: int = 30,
    ) -> None:
        if not is_number(decay) or not 0.0 <= float(decay) < 1.0:
            raise ConfigError(
                f"EMAHook(decay={decay!r}): the weight of the average must be a number of at least 0 and below 1, such"
                " as 0.999"
            )
        check_count(every=every)
        check_flag("evaluates", evaluates)
        if not isinstance(name, str) or not name.isidentifier() or name == "master":
            raise ConfigError(f"EMAHook(name={name!r}): give the state a name such as 'ema', other than 'master'")
        self.priority = priority
        self._decay, self._every, self._evaluates, self._name = float(decay), every, evaluates, name
        self._trainer: TrainerState | None = None  # set when there may be averages
        self._is_applied = False
        self._is_exchanged = False  # whether the model has the averages as its weights

    def before_fit(self, trainer: TrainerState) -> None:
        if self._trainer is None:
            low = next((one for one in _trained(trainer.optimizer) if one.dtype in LOW_PRECISION), None)
            if low is not None:
                raise ConfigError(
                    f"EMAHook averages weights of {low.dtype} without fp32 master weights, to which an update of"
                    f" {1.0 - self._decay:.2g} of the difference is rounded away: boost the model in fp32 with"
                    " mixed_precision='bf16', or use a plugin with master_weights=True"
                )
            trainer.optimizer.register_step_hook(self._update)
        elif self._trainer.optimizer is not trainer.optimizer:
            raise ConfigError(
                "an EMAHook was given to a Trainer, and averages the weights of another optimizer: make one for each"
                " optimizer"
            )
        self._trainer = trainer

    @torch.no_grad()
    def _update(self) -> None:
        """Add the current weights to the averages where that is due. No communication."""
        trainer = self._trainer
        assert trainer is not None
        optimizer = trainer.optimizer
        # `trainer.step` is not counted yet. A step outside of `fit` belongs to another loop.
        is_due = (trainer.step + 1) % self._every == 0
        if not trainer.is_fitting or not is_due or optimizer.step_was_skipped:
            return
        optimizer.wait_for_weights()
        averages: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        for parameter in _trained(optimizer):
            state = optimizer.state.get(parameter)
            if state and self._name in state:
                averages.append(state[self._name])
                weights.append(parameter.detach())
            elif state or parameter.grad is not None or optimizer.model_parameter(parameter).grad is not None:
                # The step has updated the parameter, of which its optimizer may keep no state.
                optimizer.state[parameter][self._name] = parameter.detach().clone()
        if averages:
            torch._foreach_lerp_(averages, weights, 1.0 - self._decay)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings; the averages are in the optimizer.

        Raises:
            ConfigError: An evaluation has failed, and its averages are still the weights.
        """
        if self._is_exchanged and not self._is_applied:
            raise ConfigError(
                "a run is saved after an evaluation that failed, while its averages are still the model's weights: call"
                " Trainer.fit() or Trainer.evaluate() first, which exchange them again"
            )
        return {"decay": self._decay, "name": self._name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: that a checkpoint has the state says that it has averages."""

    def before_iteration(self, trainer: TrainerState) -> None:
        if not self._is_applied:  # exchanged by an evaluation that has failed
            self._use_averages(False)

    def before_evaluation(self, trainer: TrainerState) -> None:
        if self._evaluates and not self._is_applied:
            self._use_averages(True)

    def after_evaluation(self, trainer: TrainerState) -> None:
        if self._evaluates and not self._is_applied:
            self._use_averages(False)

    def _use_averages(self, is_wanted: bool) -> None:
        """Make the averages the model's weights, or the weights again. Collective if that is a change."""
        if self._trainer is None or self._is_exchanged == is_wanted:
            return
        optimizer = self._trainer.optimizer
        if optimizer.accumulation.is_open:
            raise ConfigError(
                "the averages of EMAHook change places with the weights in the middle of an accumulation, whose"
                " gradients belong to the weights: do it after optimizer.step()"
            )
        with torch.no_grad():
            optimizer.write_weights(lambda: self._swap(optimizer))
        self._is_exchanged = is_wanted

    def _swap(self, optimizer: OptimizerWrapper) -> None:
        for parameter in _trained(optimizer):
            average = optimizer.state.get(parameter, {}).get(self._name)
            if average is not None:
                weight = parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model has the averages as its weights: for saves, evaluations and predictions.

        Collective: every rank must enter and leave it.

        Raises:
            ConfigError: `fit` was not called, or there are accumulated gradients.
        """
        if self._trainer is None:
            raise ConfigError("EMAHook.applied() has no averages yet: call Trainer.fit() with the hook first")
        entered = ConfigError("EMAHook.applied() is entered already: leave its block first")
        raise_on_all_ranks(entered if self._is_applied else None)
        self._use_averages(True)
        self._is_applied = True
        try:
            yield
        except Exception as error:
            # An error of one rank alone would leave it waiting for the others here. Those of the library are on all.
            is_everywhere = isinstance(error, BoosterError) and not isinstance(error, RankFailedError)
            if group_size() > 1 and not is_everywhere:
                add_note(
                    error, "It was raised inside of EMAHook.applied(): the model still has the averages as weights."
                )
                raise
            self._restore()
            raise
        self._restore()

    def _restore(self) -> None:
        self._use_averages(False)
        self._is_applied = False


def _trained(optimizer: OptimizerWrapper) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (one for one in group["params"] if one.requires_grad and one.numel() > 0)
