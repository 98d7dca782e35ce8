"""What every optimizer over shards does alike: norm, clipping, step, and what a checkpoint asks of it."""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.comm import all_reduce_numbers, group_size, raise_on_all_ranks
from booster.device import current_device
from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper, Shard, ShardAware, Shards, TensorSlice
from booster.interface.gradient_norm import any_nonfinite
from booster.interface.mixed_precision import LossScaler
from booster.interface.parameter_layout import is_sharded
from booster.interface.shards import NeedsFullStep
from booster.phases import in_phase
from booster.plugins.sharding.elementwise import takes_empty_groups
from booster.plugins.sharding.masters import follow_weights
from booster.plugins.sharding.norms import norm_over_ranks
from booster.plugins.sharding.states import ShardedOptimizerState, ShardedPendingGradients

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(OptimizerWrapper):
    """An optimizer whose `param_groups` hold this rank's shards in place of parameters that train.

    Parameters that don't train stay in the groups, whole; everything else in a group is the user's own, live.

    Args:
        optim: The user's optimizer, elementwise or `ShardAware`.
        model: The boosted model.
        data_parallel_group: All ranks among which data are divided; None: the world.
        shard_group: The ranks among them that share the shards; None: the world.
        counting_group: The ranks that hold every element of the gradient between them, and count each once; None:
            those of `shard_group`.
        max_norm: Gradients are clipped to this norm at every step; 0: they are not.
        norm_type: Order of that norm.
        loss_scaler: Of half precision; None: losses are not scaled.
        is_primary: True on the rank that writes what all ranks hold alike.

    Attributes:
        shards: This rank's shards.
        logical_groups: For every param group the names and parameters that it is made of.
    """

    shards: Shards

    def __init__(
        self,
        optim: Optimizer,
        model: ModelWrapper,
        *,
        data_parallel_group: dist.ProcessGroup | None,
        shard_group: dist.ProcessGroup | None,
        counting_group: dist.ProcessGroup | None = None,
        max_norm: float,
        norm_type: float,
        loss_scaler: LossScaler | None = None,
        is_primary: bool = True,
    ) -> None:
        super().__init__(optim, model, data_parallel_group=data_parallel_group, is_primary=is_primary)
        self.loss_scaler = loss_scaler
        self._counting_group = shard_group if counting_group is None else counting_group
        self._max_norm = max_norm
        self._norm_type = norm_type
        self._known_norm: torch.Tensor | None = None
        self._is_stepping = False
        optim.register_step_pre_hook(partial(_refuse_step_of_its_own, weakref.ref(self)))
        self._num_own_step_hooks = 1
        self._working_of: dict[int, nn.Parameter] = {}
        named = reversed(list(model.unwrap().named_parameters()))
        self._names = {id(parameter): model.logical_name(name) for name, parameter in named}
        self.logical_groups: list[list[tuple[str, nn.Parameter]]] = []
        model.register_load_hook(self._refresh_masters)
        model.register_exact_copies(self._master_slices)

    # What a strategy has to say.

    @abstractmethod
    def _refresh_masters(self) -> None:
        """Takes over weights that were changed from outside."""

    def follow_weights(self, shard: Shard) -> None:
        """Takes the model's weights over into a shard that is a copy of them."""
        follow_weights(shard)

    @abstractmethod
    def _shard_memory(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yields shards with the memory that they must be views of, so that the model follows them."""

    @abstractmethod
    def _publish_weights(self) -> None:
        """Brings this rank's shards into the model, on all ranks. Collective."""

    @abstractmethod
    def _reshard(self, indices: Sequence[int]) -> None:
        """Shards the parameters of these param groups that train and are still whole. Collective."""

    @abstractmethod
    def _check_weights(self) -> None:
        """Raises if updates would not reach the model any more.

        Raises:
            ConfigError: They would not.
        """

    @abstractmethod
    def local_gradients(self) -> dict[str, torch.Tensor]:
        """Returns this rank's raw gradients that were not reduced yet, by name, in the parameters' shapes."""

    @abstractmethod
    def reduced_gradients(self, allocate: Collection[str] | None = None) -> list[tuple[Shard, torch.Tensor]]:
        """Returns the raw gradients that were summed over the ranks already, shard by shard, as live memory.

        Args:
            allocate: Forget all gradients, and make zeros of these parameters, to be filled; None: as it is.

        Without `allocate` collective over the data-parallel ranks; with it no communication, and every rank gives the
        same names.
        """

    @abstractmethod
    def set_local_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Makes a raw gradient in the parameter's shape this rank's own, to be reduced with the others'."""

    @property
    def gradient_shards(self) -> Sequence[Shard]:
        """The parts in which this rank has sums over the ranks: those that it updates, unless a strategy differs."""
        return self.shards.parts

    # Sharding.

    def _note_group(self, index: int) -> None:
        parameters = self.param_groups[index]["params"]
        self.logical_groups.append([(self._names[id(parameter)], parameter) for parameter in parameters])

    def _use_shards(self, shards: Shards) -> None:
        self.shards = shards
        if isinstance(self.optim, ShardAware):
            self.optim.use_shards(shards)

    def _master_slices(self) -> list[TensorSlice]:
        masters = (shard for shard in self.shards.parts if shard.has_master)
        return [part for shard in masters for part in shard.slices(shard.name, shard.parameter.detach())]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the user's optimizer and shards it.

        Collective: every rank must add the same group.

        Raises:
            ConfigError: Gradients wait for their step, or a parameter is not the model's.
        """
        self._check_nothing_waits("add_param_group()")
        given = param_group["params"]
        members = [given] if isinstance(given, torch.Tensor) else list(given)
        foreign = [tuple(one.shape) for one in members if id(one) not in self._names]
        if foreign:
            raise ConfigError(
                f"add_param_group() got {len(foreign)} parameters that are not the model's (the first has shape"
                f" {foreign[0]}): add parameters of the model that was boosted with this optimizer"
            )
        self.optim.add_param_group({**param_group, "params": members})
        self._note_group(len(self.param_groups) - 1)
        self._reshard([len(self.param_groups) - 1])

    def _shard_unfrozen(self) -> None:
        """Notices parameters that were frozen when they came here and train now."""
        found = [
            index
            for index, group in enumerate(self.param_groups)
            if any(one.requires_grad and id(one) not in self._working_of for one in group["params"])
        ]
        if found:
            self._check_nothing_waits("unfreezing a parameter")
            self._reshard(found)

    def _check_nothing_waits(self, what: str) -> None:
        if self._accumulation.is_open:
            raise ConfigError(
                f"{what} while gradients wait for their step would change how they are divided among the ranks: do it"
                " after optimizer.step() and zero_grad()"
            )

    # Gradients.

    def _begin_accumulation(self, num_items: float | None) -> None:
        self._shard_unfrozen()
        super()._begin_accumulation(num_items)

    def _needs_no_unscaling(self) -> bool:
        return False  # they are neither reduced nor averaged

    def _unscale_gradients(self) -> None:
        window = self._accumulation
        may_have_others = not window.is_unscaled and window.num_backwards == 0 and self.loss_scaler is None
        if may_have_others and self._any_rank_has_gradients():
            # Of a plain loss.backward(), or of another boosted model's backward that reaches into this one.
            window.count_backward(None)
        super()._unscale_gradients()
        if self._accumulation.is_unscaled:
            self._accumulation.was_unscaled = True  # the local gradients are gone

    def _any_rank_has_gradients(self) -> bool:
        return self._any_rank([self._has_gradients()])[0]

    def _check_no_plain_backward(self) -> None:
        error = None
        if self._has_gradients():
            error = ConfigError(
                "some gradients did not come from booster.backward(loss, optimizer) with this optimizer, and lack its"
                " loss scale: replace loss.backward() by booster.backward(loss, optimizer). A loss that goes through"
                " two boosted models takes one of them in half precision with a loss scale of its own: use bf16 or fp32"
            )
        raise_on_all_ranks(error, self.data_parallel_group)

    def _can_fuse_unscaling(self) -> bool:
        return self._fused_update is not None and not self._has_hooks()

    def _gradients(self) -> list[torch.Tensor]:
        # The shards' own, raw or not: their sums are in fp32 already.
        return [parameter.grad for parameter in self._optimized_parameters() if parameter.grad is not None]

    def _counted_gradients(self) -> list[torch.Tensor]:
        """Returns the elements of the gradients that no other rank of the counting group counts."""
        found = []
        for parameter in self._optimized_parameters():
            if parameter.grad is not None:
                shard = self.shards.shard_of(parameter)
                found += [parameter.grad] if shard is None else shard.owned(parameter.grad)
        return found

    def _uncounted_gradients(self) -> list[torch.Tensor]:
        """Returns gradients of which another rank of the counting group counts elements, as of copies over tp ranks."""
        cut = (part.parameter for part in self.shards.parts if is_sharded(part.model_param))
        return [parameter.grad for parameter in cut if parameter.grad is not None]

    def _named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter in self._optimized_parameters():
            if parameter.grad is not None:
                shard = self.shards.shard_of(parameter)
                yield self._names[id(parameter)] if shard is None else shard.name, parameter.grad

    def _total_norm(self, norm_type: float) -> torch.Tensor:
        if norm_type == 2.0 and self._known_norm is not None:
            norm = self._known_norm
        else:
            norm = norm_over_ranks(self._counted_gradients(), norm_type, self._counting_group)
        return norm if self._accumulation.factors is None else self._accumulation.factors.unscaled_norm(norm)

    def _any_nonfinite(self, gradients: Sequence[torch.Tensor]) -> bool:
        counted, uncounted = self._counted_gradients(), self._uncounted_gradients()
        if any_nonfinite(uncounted):
            counted.append(uncounted[0].new_full((1,), math.nan))  # which no rank of the group misses then
        self._known_norm = norm_over_ranks(counted, 2.0, self._counting_group)
        found = not bool(torch.isfinite(self._known_norm))
        if group_size(self._counting_group) == group_size():
            return found
        found_anywhere = all_reduce_numbers([float(found)])[0] > 0
        if found_anywhere and not found:
            self._known_norm = torch.full_like(self._known_norm, math.nan)
        return found_anywhere

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor | None:
        norm = super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)
        self._known_norm = None
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        super().clip_grad_by_value(clip_value)
        self._known_norm = None

    @in_phase("step")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates this rank's shards, or skips if a loss-scaled gradient overflowed on any rank; spreads the weights.

        Args:
            closure: Computes the loss and calls backward; called once, before the step.

        Collective: every rank must call it.

        Raises:
            ConfigError: The model's weights are no longer where they were put, or gradients came from another backward.
        """
        result = None
        if closure is not None and not self._defers_step:
            with torch.enable_grad():
                result = closure()
        if not self._defers_step:
            self._check_weights()
            self._clip_to_max_norm()
        super().step()
        return result

    def _step_parts(self) -> None:
        """Calls the user's step, which updates every element by itself.

        In one process no group that trains is without parameters, so a foreign class need not be ready for that: where
        this rank holds nothing of a group, a placeholder of one element takes part. What the class counts in its groups
        stays the same on all ranks.
        """
        held = {shard.group_index for shard in self.shards.parts}
        lacking = [index for index, group in enumerate(self.logical_groups) if index not in held and _trains(group)]
        home = next((shard.parameter.device for shard in self.shards.parts), current_device())
        placeholders = {} if takes_empty_groups(self.optim) else {index: _placeholder(home) for index in lacking}
        try:
            for index, placeholder in placeholders.items():
                self.param_groups[index]["params"].append(placeholder)
            self.optim.step()
        finally:
            for index, placeholder in placeholders.items():
                members = self.param_groups[index]["params"]
                members[:] = [one for one in members if one is not placeholder]
                self.optim.state.pop(placeholder, None)

    def _call_own(self, method: Callable[[], Any]) -> Any:
        if self._is_stepping:  # by a hook of the user's in a step, which publishes what it writes
            return method()
        self._is_stepping = True
        try:
            return super()._call_own(method)
        finally:
            self._is_stepping = False

    def _has_copies(self) -> bool:
        return True

    def _uses_param_grads(self) -> bool:
        return False

    def _holds_any(self, parameters: frozenset[int]) -> bool:
        whole = (one for group in self.logical_groups for _, one in group)
        shards = (shard.parameter for shard in self.shards.parts)
        return any(id(one) in parameters and one.requires_grad for one in (*whole, *shards))

    def _unscale_param_grads(self, parameters: frozenset[int]) -> None:
        raise ConfigError(
            "torch's clipping was given parameters whose gradients the boosted optimizer keeps, so that it finds none,"
            " or this rank's alone: write booster.clip_grad_norm_(optimizer, max_norm), or for values"
            " optimizer.clip_grad_by_value(clip_value)"
        )

    def _any_rank(self, flags: Sequence[bool]) -> list[bool]:
        return [number > 0 for number in all_reduce_numbers([float(one) for one in flags], self.data_parallel_group)]

    @torch.no_grad()
    def _restore_memory(self) -> None:
        for parameter, memory in self._shard_memory():
            if parameter.numel() > 0 and parameter.data_ptr() != memory.data_ptr():
                memory.copy_(parameter.detach().view(memory.shape))
                parameter.data = memory.view(parameter.shape)

    def _run_on_all_ranks(self, update: Callable[[], Any]) -> None:
        whole_step = self.optim.full_step() if isinstance(self.optim, NeedsFullStep) else nullcontext()
        with whole_step:
            super()._run_on_all_ranks(update)

    def _clip_to_max_norm(self) -> None:
        window = self._accumulation
        if self._max_norm <= 0 or window.has_stepped:
            return
        self._unscale_gradients()  # which finds the gradients of a plain loss.backward()
        if window.num_backwards == 0:
            return
        norm_of_user = window.norm
        self.clip_grad_by_norm(self._max_norm, self._norm_type)
        if norm_of_user is not None:
            window.norm = self._last_norm = norm_of_user

    def model_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the model's parameter for one of `param_groups`, which may hold a shard of it."""
        return self._working_of.get(id(parameter), parameter)

    def group_parameters(self, index: int) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.logical_groups[index]]

    def group_masters(self, index: int) -> list[nn.Parameter]:
        parts = [self.shards.shard_of(parameter) for parameter in self.param_groups[index]["params"]]
        return [part.parameter for part in parts if part is not None and part.has_master]

    def checkpoint_state(self) -> ShardedOptimizerState:
        return ShardedOptimizerState(self)

    def pending_gradients(self) -> ShardedPendingGradients:
        return ShardedPendingGradients(self)


def _trains(group: Sequence[tuple[str, nn.Parameter]]) -> bool:
    return any(parameter.requires_grad for _, parameter in group)


def _placeholder(device: torch.device) -> nn.Parameter:
    placeholder = nn.Parameter(torch.zeros(1, device=device))
    placeholder.grad = torch.zeros_like(placeholder, requires_grad=False)
    return placeholder


def _refuse_step_of_its_own(wrapper: weakref.ref[ShardedOptimizer], *_: Any) -> None:
    alive = wrapper()
    if alive is not None and not alive._is_stepping:
        raise ConfigError(
            f"step() was called on the {type(alive.optim).__name__} that went into boost(), which knows nothing of the"
            " other ranks' gradients: call step() and zero_grad() on the optimizer that boost() returned"
        )
