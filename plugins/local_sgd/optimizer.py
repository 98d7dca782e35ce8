"""Model and optimizer of local SGD: rounds of local steps, their averages, and what a checkpoint keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.comm import all_reduce_sum, broadcast, group_rank, group_size, sum_dtype
from booster.core.optimizer_state import is_owned
from booster.core.plain_torch import refuse_unwrapped_steps
from booster.errors import CheckpointError
from booster.fault_tolerance.progress import in_phase
from booster.interface import (
    AccumulatedGradients,
    ModelWrapper,
    OptimizerState,
    OptimizerWrapper,
    TensorSlice,
    TensorSpec,
    own_key,
)

_BUCKET_BYTES = 32 * 2**20
_OUTER_MOMENTUM = own_key("momentum", "outer")

# Note [Rounds]
# A round is `period` local steps, then the average. At its start all ranks hold the same weights, the *anchors*; in it
# each rank holds its own. The outer optimizer updates the anchors by the mean over ranks of (anchor - weight), and all
# ranks start the next round from them. Without an outer optimizer the next weights are the mean, and no anchors are
# kept. Averaged are all parameters that were trained in the round: a mean of equal numbers may be rounded.
# Saves happen between rounds only, where model and anchors are one.


class LocalModel(ModelWrapper):
    """Boosted model of `LocalSGDPlugin`.

    Attributes:
        steps_in_round: Number of steps since the last average.
    """

    steps_in_round: int = 0

    def require_equal_copies(self) -> None:
        if self.steps_in_round > 0 and group_size() > 1:
            raise CheckpointError(
                f"after step {self.steps_in_round} of a round, in its middle, each rank has its own weights: save after"
                " a multiple of the plugin's `period` steps, or call optimizer.end_round() before"
            )


class LocalOptimizer(OptimizerWrapper):
    """Boosted optimizer of `LocalSGDPlugin`; see Note [Rounds].

    Args:
        optim: The user's optimizer.
        model: Boosted model.
        period: Steps of a round.
        own_group: Group of this rank alone; None in a world of one.
    """

    def __init__(
        self,
        optim: Optimizer,
        model: LocalModel,
        *,
        period: int,
        own_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(optim, model, data_parallel_group=own_group)
        self._local_model = model
        self._period = period
        self._outer: torch.optim.SGD | None = None
        self._anchors: dict[nn.Parameter, nn.Parameter] = {}
        self._trained: dict[nn.Parameter, None] = {}  # in this round, in order
        self._is_in_round = False
        refuse_unwrapped_steps(
            self, "does not count steps of a round, so that the ranks' weights would never be averaged"
        )
        model.register_load_hook(self._restart_round)

    def set_outer_optimizer(self, lr: float, momentum: float, *, nesterov: bool) -> None:
        """Update the anchors by SGD, instead of taking the mean of the weights."""
        self._anchors = _copies_of(self._optimized_parameters())
        self._outer = torch.optim.SGD(list(self._anchors.values()), lr=lr, momentum=momentum, nesterov=nesterov)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._outer is not None:
            added = _copies_of(self.param_groups[-1]["params"])
            self._anchors |= added
            self._outer.add_param_group({"params": list(added.values())})

    def outer_momentum(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the momentum of the outer optimizer, equal on all ranks; None before the first round has ended."""
        if self._outer is None:
            return None
        momentum: torch.Tensor | None = self._outer.state.get(self._anchors[parameter], {}).get("momentum_buffer")
        return momentum

    def reset_outer_momentum(self, parameters: Sequence[nn.Parameter]) -> None:
        """Clear all momentum of the outer optimizer, and allocate that of some parameters, for a load to fill."""
        if self._outer is not None:
            self._outer.state.clear()
            for parameter in parameters:
                self._outer.state[self._anchors[parameter]]["momentum_buffer"] = torch.zeros_like(parameter)

    def _update_parameters(self) -> None:
        with self._stepping():
            super()._update_parameters()

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        with self._stepping():
            return super()._step_with_closure(closure)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self._begin_round()
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    @torch.no_grad()
    def _begin_round(self) -> None:
        """In the first step of a round, take over weights that were written between rounds."""
        if self._is_in_round or self._outer is None:
            return
        self._is_in_round = True
        if self.master_weights is not None:
            self.master_weights.refresh()
        for parameter, anchor in self._anchors.items():
            anchor.copy_(parameter)

    def _end_step(self) -> None:
        # Before hooks of the step, which may save or evaluate.
        self._trained.update(dict.fromkeys(one for one in self._optimized_parameters() if one.requires_grad))
        self._local_model.steps_in_round += 1
        if self._local_model.steps_in_round >= self._period:
            self.end_round()
        super()._end_step()

    @in_phase("step")
    @torch.no_grad()
    def end_round(self) -> None:
        """Average the ranks' weights now, and start a round; for the end of a training whose last round is short.

        The first rank's buffers become those of all. Does nothing at the start of a round.

        Collective: every rank must call it.
        """
        trained = list(self._trained)
        if self._outer is None:
            for parameter, mean in zip(trained, _means_over_ranks(trained), strict=True):
                parameter.copy_(mean)
        else:
            self._step_outer(self._outer, trained)
        if trained:
            broadcast(self.model.buffers())
        self._trained.clear()
        self._local_model.steps_in_round, self._is_in_round = 0, False

    def _step_outer(self, outer: torch.optim.SGD, trained: Sequence[nn.Parameter]) -> None:
        anchors = [self._anchors[one] for one in trained]
        moved = (anchor - one for anchor, one in zip(anchors, trained, strict=True))
        for anchor, delta in zip(anchors, _means_over_ranks(moved), strict=True):
            anchor.grad = delta.to(anchor.dtype)
        outer.step()
        outer.zero_grad()
        for anchor, parameter in zip(anchors, trained, strict=True):
            parameter.copy_(anchor)

    @torch.no_grad()
    def _restart_round(self) -> None:
        """Start a round from weights that were loaded, which are equal on all ranks."""
        self._trained.clear()
        self._local_model.steps_in_round, self._is_in_round = 0, False

    def checkpoint_state(self) -> LocalState:
        return LocalState(self)

    def pending_gradients(self) -> LocalGradients:
        return LocalGradients(self)


def _copies_of(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
    return {one: nn.Parameter(one.detach().clone()) for one in parameters}


def _means_over_ranks(tensors: Iterator[torch.Tensor] | Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the mean over all ranks of each tensor, in its dtype; low-precision ones are summed in fp32.

    At most one bucket of `_BUCKET_BYTES`, or one tensor, is in memory beside them. Collective.
    """
    bucket: list[torch.Tensor] = []

    def flush() -> Iterator[torch.Tensor]:
        flat = torch.cat([one.detach().reshape(-1).to(sum_dtype(one.dtype)) for one in bucket])
        all_reduce_sum(flat).div_(group_size())
        for one, mean in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
            yield mean.view(one.shape).to(one.dtype)
        bucket.clear()

    for tensor in tensors:
        if bucket and (bucket[0].dtype != tensor.dtype or sum(one.nbytes for one in bucket) >= _BUCKET_BYTES):
            yield from flush()
        bucket.append(tensor)
    if bucket:
        yield from flush()


class LocalGradients(AccumulatedGradients):
    """Accumulated gradients of local SGD: each rank's own."""

    @property
    def data_rank(self) -> int:
        return group_rank()

    @property
    def num_data_ranks(self) -> int:
        return group_size()

    def check(self) -> None:
        super().check()
        model = self.optimizer.model
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = [name for name, one in model.state_dict().items() if one.is_floating_point()]
        own = [name for name in buffers if name not in parameters]
        if own and self.num_data_ranks > 1:
            raise CheckpointError(
                f"in the middle of an accumulation each rank has its own values of buffers such as {own[0]!r}, of which"
                " a checkpoint keeps one: save after the step that ends a round"
            )


class LocalState(OptimizerState):
    """States of local SGD in a checkpoint.

    Those of rank 0 have the names that all plugins read. Those of the others, and the momentum of the outer optimizer,
    are stored besides, and only this plugin reads them. Ranks that were not there take the states of rank 0.
    """

    optimizer: LocalOptimizer

    def values(self) -> dict[str, Any]:
        self.optimizer.model.require_equal_copies()
        return super().values()

    def allocate(self, specs: Mapping[str, TensorSpec], values: Mapping[str, Any]) -> list[TensorSlice]:
        of_rank_0 = {self._own_name(name): name for name in specs if not is_owned(name)}
        super().allocate({name: specs.get(own, specs[name]) for own, name in of_rank_0.items()}, values)
        named = self.named_parameters().items()
        self.optimizer.reset_outer_momentum([one for name, one in named if f"{name}.{_OUTER_MOMENTUM}" in specs])
        parts = [
            part if part.name in specs else replace(part, name=of_rank_0.get(part.name, part.name))
            for part in self.slices()
        ]
        return [part for part in parts if part.name in specs]

    def _state_slices(self, name: str, parameter: nn.Parameter) -> Iterator[TensorSlice]:
        for part in super()._state_slices(name, parameter):
            yield replace(part, name=self._own_name(part.name), primary=True)
        momentum = self.optimizer.outer_momentum(parameter)
        if momentum is not None:
            yield TensorSlice.full(f"{name}.{_OUTER_MOMENTUM}", momentum, primary=self.optimizer.model.writes(name))

    @staticmethod
    def _own_name(name: str) -> str:
        """Return the name of this rank's state, from that of rank 0's."""
        if group_rank() == 0:
            return name
        parameter, key = name.rsplit(".", 1)
        return f"{parameter}.{own_key(key, f'rank{group_rank()}')}"
