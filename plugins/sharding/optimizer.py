"""Base of optimizer wrappers with sharded parameters: gradient norm, clipping, step, checkpoint state."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.comm import (
    LOW_PRECISION,
    all_reduce_max,
    all_reduce_numbers,
    all_reduce_sum,
    any_rank_or_different,
    collective_device,
    group_size,
    host_group,
    host_value,
    raise_on_all_ranks,
)
from booster.core.accumulation import nonfinite_mark
from booster.core.plain_torch import refuse_unwrapped_steps
from booster.core.shard_aware import follow_weights, full_step
from booster.core.shard_spec import is_sharded
from booster.device import current_device
from booster.errors import ConfigError, format_list
from booster.fault_tolerance.progress import in_phase
from booster.interface import LossScaler, OptimizerWrapper, Shard, ShardAware, Shards, TensorSlice
from booster.kernels.flat_buffers import sum_of_squares, supports_sum_of_squares
from booster.plugins.base import DistributedModel
from booster.plugins.step_settings import Hyperparameters, StepSettings

from .config import GradClipConfig, ShardGroups
from .elementwise import takes_empty_groups
from .optimizer_state import ShardedOptimizerState, ShardedPendingGradients
from .step_in_parts import Arrival, step_as_they_arrive, wait_for_all


@torch.no_grad()
def norm_over_ranks(
    gradients: Sequence[torch.Tensor],
    norm_type: float,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the norm of a gradient that is sharded over the group, as a 0-dim tensor, equal on all ranks.

    Args:
        gradients: This rank's shards.
        norm_type: Order of the norm; `float("inf")` is allowed.
        group: Ranks that hold the gradient, each element on one of them.
        dtype: Dtype of the result; sums are in fp64.

    Collective over the group: one small all-reduce. The result is on the device of the group's communication.
    """
    device = collective_device(group)
    if norm_type == 2.0 and supports_sum_of_squares(gradients):
        total = torch.tensor([sum_of_squares(gradients)], dtype=torch.float64, device=device)
        return all_reduce_sum(total, group).sqrt().reshape(()).to(dtype)
    norms: list[torch.Tensor] = []  # a rank may own no elements
    for given in dict.fromkeys(gradient.dtype for gradient in gradients):
        of_dtype = [gradient for gradient in gradients if gradient.dtype == given]
        norms += torch._foreach_norm(of_dtype, norm_type, torch.float32 if given in LOW_PRECISION else None)
    stacked = torch.stack([torch.zeros((), dtype=torch.float64, device=device), *(norm.to(device) for norm in norms)])
    if math.isinf(norm_type):
        # A maximum may drop nan, because comparisons with it are false: a separate flag is reduced.
        extremes = torch.stack([stacked.nan_to_num(nan=0.0, posinf=math.inf).max(), stacked.isnan().any().double()])
        largest, has_nan = all_reduce_max(extremes, group)
        return torch.where(has_nan > 0, torch.full_like(largest, math.nan), largest).to(dtype)
    total = all_reduce_sum(stacked.pow(norm_type).sum().reshape(1), group)
    return total.pow(1.0 / norm_type).reshape(()).to(dtype)


class ShardedOptimizer(OptimizerWrapper):
    """Optimizer wrapper whose `param_groups` hold this rank's shards in place of trainable parameters.

    Frozen parameters stay in the groups unsharded. All other entries of a group are those of the user's optimizer.

    Args:
        optim: The user's optimizer, elementwise or `ShardAware`.
        model: The boosted model.
        groups: Process groups of the shards.
        updates_on_host: If True, gradients and optimizer states are in host memory, also with an accelerator.
        clip: Clipping at every step.
        loss_scaler: Loss scaler for fp16; optional, defaults to no scaling.

    Attributes:
        shards: This rank's shards.
        logical_groups: Names and unsharded parameters of every param group.
    """

    model: DistributedModel
    shards: Shards

    def __init__(
        self,
        optim: Optimizer,
        model: DistributedModel,
        groups: ShardGroups,
        *,
        updates_on_host: bool = False,
        clip: GradClipConfig,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        super().__init__(optim, model, data_parallel_group=groups.data_parallel_group)
        self.loss_scaler = loss_scaler
        self._groups = groups
        self._grad_norm_group = groups.shard_group if groups.grad_norm_group is None else groups.grad_norm_group
        if updates_on_host:  # a norm of the host's gradients, which the host needs, does not wait for the device
            self._grad_norm_group = host_group(self._grad_norm_group)
        self._clip = clip
        self._cached_norm: torch.Tensor | None = None
        self._arriving: list[Arrival] = []
        self._is_stepping = False
        self._synchronizes = True
        refuse_unwrapped_steps(self, "does not have the other ranks' gradients")
        self._model_param_of: dict[int, nn.Parameter] = {}
        named = reversed(list(model.unwrap().named_parameters()))
        self._names = {id(parameter): model.logical_name(name) for name, parameter in named}
        self.logical_groups: list[list[tuple[str, nn.Parameter]]] = []
        model.register_load_hook(self._refresh_masters)
        model.register_master_slices(self._master_slices)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally, unsharded, in backwards of the block, where the strategy can keep them."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    # Implemented by the strategy.

    @abstractmethod
    def _step_shards(self) -> None:
        """Step the user's optimizer, with the gradients of all shards."""

    @abstractmethod
    def _finish_step(self) -> None:
        """Copy the updated shards into the model on all ranks. Collective."""

    @abstractmethod
    def _refresh_masters(self) -> None:
        """Copy externally changed weights into the masters."""

    def follow_weights(self, shard: Shard) -> None:
        """Copy changed model weights into their master shard."""
        follow_weights(shard)

    @abstractmethod
    def _shard_memory(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield shards with the memory that they must be views of."""

    @abstractmethod
    def _publish_weights(self) -> None:
        """Copy this rank's shards into the model on all ranks. Collective."""

    @abstractmethod
    def _reshard(self, indices: Sequence[int]) -> None:
        """Shard the trainable, unsharded parameters of these param groups. Collective."""

    @abstractmethod
    def _check_weights(self) -> None:
        """Check that updates still reach the model.

        Raises:
            ConfigError: The memory of a weight was replaced.
        """

    @abstractmethod
    def local_gradients(self) -> dict[str, torch.Tensor]:
        """Return this rank's unreduced, scaled gradients by name, in the parameters' shapes."""

    @abstractmethod
    def reduced_gradients(self, allocate: Collection[str] | None = None) -> list[tuple[Shard, torch.Tensor]]:
        """Return the reduced, scaled gradients, summed over the ranks, shard by shard, without a copy.

        Args:
            allocate: If given, drop all gradients and allocate zeros for these parameters, for the caller to fill.

        Without `allocate`, collective over the data-parallel ranks. With it, no communication; all ranks must pass the
        same names.
        """

    @abstractmethod
    def set_local_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Set this rank's unreduced, scaled gradient of a parameter."""

    @property
    def gradient_shards(self) -> Sequence[Shard]:
        """Shards for which this rank holds reduced gradients; by default those that it updates."""
        return self.shards.parts

    # Sharding.

    def _record_group(self, index: int) -> None:
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
        """Add a param group to the user's optimizer and shard it.

        Collective: all ranks must add the same group.

        Raises:
            ConfigError: There are accumulated gradients, or a parameter does not belong to the model.
        """
        self._check_no_accumulated_gradients("add_param_group()")
        given = param_group["params"]
        members = [given] if isinstance(given, torch.Tensor) else list(given)
        foreign = [tuple(one.shape) for one in members if id(one) not in self._names]
        if foreign:
            raise ConfigError(
                f"add_param_group() got {len(foreign)} parameters that are not the model's (the first has shape"
                f" {foreign[0]}): add parameters of the model that was boosted with this optimizer"
            )
        known = {id(parameter): name for group in self.logical_groups for name, parameter in group}
        again = [known[id(one)] for one in members if id(one) in known]
        if again:
            raise ConfigError(
                f"add_param_group() got {again[0]!r}, which is in a param group already: change the values of that"
                " group, as of optimizer.param_groups[0], or give the other parameters"
            )
        self.optim.add_param_group({**param_group, "params": members})
        self._record_group(len(self.param_groups) - 1)
        self._reshard([len(self.param_groups) - 1])

    def _shard_unfrozen(self) -> None:
        """Shard parameters that were unfrozen after boost()."""
        found = [index for index, group in enumerate(self.param_groups) if any(True for _ in self._unfrozen(group))]
        if found:
            self._check_no_accumulated_gradients("unfreezing a parameter")
            sharded = {id(one) for one in self._model_param_of.values()}
            for index in found:
                new = list(map(id, self._unfrozen(self.param_groups[index])))
                if not sharded.isdisjoint(new) or any(one not in self._names for one in new):
                    raise ConfigError(
                        f"the parameters of optimizer.param_groups[{index}], this rank's shards, were replaced: add"
                        " modules before boost(), frozen if they train later, and give their parameters to"
                        " optimizer.add_param_group()"
                    )
            self._reshard(found)

    def _unfrozen(self, group: Mapping[str, Any]) -> Iterator[nn.Parameter]:
        """Yield the parameters of a param group that train and are not sharded."""
        return (one for one in group["params"] if one.requires_grad and id(one) not in self._model_param_of)

    def _check_no_accumulated_gradients(self, what: str) -> None:
        if self._accumulation.is_open:
            raise ConfigError(
                f"{what} with accumulated gradients would change how they are sharded over the ranks: do it"
                " after optimizer.step() and zero_grad()"
            )

    # Gradients.

    def _begin_accumulation(self, num_items: float | None) -> None:
        self._shard_unfrozen()
        super()._begin_accumulation(num_items)

    def _unscale_gradients(self) -> None:
        accumulation = self._accumulation
        may_have_others = not accumulation.is_unscaled and accumulation.num_backwards == 0 and self.loss_scaler is None
        if may_have_others and self._any_rank([self._has_gradients()])[0]:
            # From a plain loss.backward(), or from another boosted model's backward through this model.
            self._check_unfrozen()
            accumulation.count_backward(None)
        super()._unscale_gradients()
        if self._accumulation.is_unscaled:
            self._accumulation.was_unscaled = True  # the local gradients are released

    def _check_unfrozen(self) -> None:
        """Check that a plain backward followed no unfreezing, which only the boosted optimizer's shards."""
        unfrozen = {id(one) for group in self.param_groups for one in self._unfrozen(group)}
        names = [name for group in self.logical_groups for name, one in group if id(one) in unfrozen]
        if names:
            raise ConfigError(
                f"{names[0]!r} trains since boost(), where it was frozen, and a plain loss.backward() has computed its"
                " gradient: write booster.backward(loss, optimizer), which divides it over the ranks first"
            )

    def _check_no_foreign_gradients(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Check that no `.grad` of the model, which is left empty in backward, was set by hand."""
        for name, parameter in named:
            if parameter.grad is not None:
                raise ConfigError(
                    f"the .grad of {name!r} was set by hand, and the plugin keeps gradients elsewhere: write"
                    " booster.backward(loss, optimizer), and change gradients in optimizer.register_gradient_hook(...)"
                )

    def _check_no_plain_backward(self) -> None:
        error = None
        if self._has_gradients():
            error = ConfigError(
                "some gradients did not come from booster.backward(loss, optimizer) with this optimizer, and lack its"
                " loss scale: replace loss.backward() by booster.backward(loss, optimizer). A loss that goes through"
                " two boosted models takes one of them in half precision with a loss scale of its own: use bf16 or fp32"
            )
        raise_on_all_ranks(error, self.data_parallel_group)

    def _gradients(self) -> list[torch.Tensor]:
        # Gradients of the shards, scaled or not.
        return [parameter.grad for parameter in self._optimized_parameters() if parameter.grad is not None]

    def _wait_for_gradients(self) -> None:
        """Wait until all gradients have arrived on the host; see Note [Arriving gradients]."""
        arriving, self._arriving = self._arriving, []
        wait_for_all(arriving)

    def _counted_gradients(self) -> list[torch.Tensor]:
        """Return the elements that this rank contributes to the gradient norm."""
        self._wait_for_gradients()
        found = []
        for parameter in self._optimized_parameters():
            if parameter.grad is not None:
                shard = self.shards.shard_of(parameter)
                found += [parameter.grad] if shard is None else shard.owned(parameter.grad)
        return found

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._wait_for_gradients()
        for parameter in self._optimized_parameters():
            if parameter.grad is not None:
                shard = self.shards.shard_of(parameter)
                yield self._names[id(parameter)] if shard is None else shard.name, parameter.grad

    def _on_gradients_changed(self) -> None:
        self._cached_norm = None

    @functools.cached_property
    def _norm_dtype(self) -> torch.dtype:
        """fp64 if any parameter of the model is, also if it is on another rank."""
        is_double = any(one.dtype is torch.float64 for one in self.model.logical_parameters())
        return torch.float64 if is_double else torch.float32

    def _total_norm(self, norm_type: float) -> torch.Tensor:
        if norm_type == 2.0 and self._cached_norm is not None:
            norm = self._cached_norm
        else:
            norm = norm_over_ranks(self._counted_gradients(), norm_type, self._grad_norm_group, self._norm_dtype)
        return norm if self._accumulation.factors is None else self._accumulation.factors.unscaled_norm(norm)

    def _any_nonfinite(self, gradients: Sequence[torch.Tensor]) -> bool:
        counted = self._counted_gradients()
        # They have elements that another rank contributes to the norm, such as tp replicas.
        sharded = (part.parameter for part in self.shards.parts if is_sharded(part.model_param))
        non_primary = [parameter.grad for parameter in sharded if parameter.grad is not None]
        counted += nonfinite_mark(non_primary)  # reaches all ranks of the group
        norm = self._cached_norm = norm_over_ranks(counted, 2.0, self._grad_norm_group, self._norm_dtype)
        if group_size(self._grad_norm_group) == group_size():
            return not host_value(torch.isfinite(norm))
        # One number for all: the host waits for the device once.
        world = None if norm.device == collective_device() else host_group()
        num_nonfinite = all_reduce_sum((~torch.isfinite(norm)).double().reshape(1), world)
        found_anywhere = host_value(num_nonfinite, fake=0.0) > 0
        if found_anywhere:
            self._cached_norm = torch.where(torch.isfinite(norm), torch.full_like(norm, math.nan), norm)
        return found_anywhere

    def _apply_factors(self) -> None:
        self._wait_for_gradients()
        if self._accumulation.factors is not None:
            self._cached_norm = None  # of the scaled gradients
        super()._apply_factors()

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor | None:
        norm = super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)
        self._cached_norm = None
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        super().clip_grad_by_value(clip_value)
        self._cached_norm = None

    @in_phase("step")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update this rank's shards and all-gather the weights; skip if a scaled gradient overflowed on any rank.

        Args:
            closure: Function that computes the loss and calls backward; called once, before the step.

        Collective: all ranks must call it.

        Raises:
            ConfigError: The memory of a weight was replaced, or gradients came from another backward.
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

    def _update_parameters(self) -> None:
        self._is_stepping = True
        try:
            self._run_on_all_ranks(self._step_shards)
        except Exception:
            # What was updated is published: a caller who continues needs equal weights on all ranks. Not where other
            # ranks may be in collectives of the optimizer's own, or have agreed that the next call retries.
            is_alone = isinstance(self.optim, ShardAware) or self._may_fail_locally
            if not is_alone and self._accumulation.num_backwards > 0:
                self._finish_step()
            raise
        finally:
            self._is_stepping = False
        if self._accumulation.num_backwards > 0:
            self._finish_step()

    def _end_step(self) -> None:
        self.model.synchronize_buffers()
        super()._end_step()

    def _step_parts(self) -> None:
        """Call the step of the user's elementwise optimizer.

        A param group may be empty on this rank, which never happens in one process. Optimizers that are not known to
        handle this get a placeholder of one element, and their per-group counters stay equal on all ranks.
        """
        held = {shard.group_index for shard in self.shards.parts}
        home = next((shard.parameter.device for shard in self.shards.parts), current_device())
        placeholders: dict[int, nn.Parameter] = {}
        for index, group in enumerate(() if takes_empty_groups(self.optim) else self.logical_groups):
            if index not in held and any(parameter.requires_grad for _, parameter in group):
                placeholders[index] = nn.Parameter(torch.zeros(1, device=home))
                placeholders[index].grad = torch.zeros_like(placeholders[index], requires_grad=False)
        try:
            for index, placeholder in placeholders.items():
                self.param_groups[index]["params"].append(placeholder)
            self.optim.step()
        finally:
            for index, placeholder in placeholders.items():
                members = self.param_groups[index]["params"]
                members[:] = [one for one in members if one is not placeholder]
                self.optim.state.pop(placeholder, None)

    def _step_fused(
        self, model_params: Mapping[nn.Parameter, torch.Tensor], gradients: Mapping[nn.Parameter, torch.Tensor]
    ) -> None:
        step = partial(super()._step_fused, model_params, gradients)
        is_retried = getattr(self.optim, "may_fail_locally", False)
        if self._arriving and (is_retried or isinstance(self.optim, ShardAware)):  # in one call, with all gradients
            self._wait_for_gradients()
        arriving, self._arriving = self._arriving, []
        if arriving:
            step_as_they_arrive(self.optim, arriving, step)
        else:
            step()

    def _call_user_method(self, method: Callable[[], Any]) -> Any:
        if self._is_stepping:  # called by a user's hook in a step, which publishes the weights itself
            return method()
        self._is_stepping = True
        try:
            return super()._call_user_method(method)
        finally:
            self._is_stepping = False

    def _has_copies(self) -> bool:
        return True

    def _holds_any(self, parameters: frozenset[int]) -> bool:
        whole = (one for group in self.logical_groups for _, one in group)
        shards = (shard.parameter for shard in self.shards.parts)
        return any(id(one) in parameters and one.requires_grad for one in (*whole, *shards))

    def _unscale_param_grads(self, parameters: frozenset[int]) -> None:
        raise ConfigError(
            "torch's clipping was called with parameters whose gradients the boosted optimizer holds, so it would see"
            " none or only this rank's: write booster.clip_grad_norm_(optimizer, max_norm), or for values"
            " optimizer.clip_grad_by_value(clip_value)"
        )

    def _any_rank(self, flags: Sequence[bool]) -> list[bool]:
        return [number > 0 for number in all_reduce_numbers([float(one) for one in flags], self.data_parallel_group)]

    def _any_rank_in_step(self, flags: Sequence[bool]) -> list[bool]:
        """Return the logical or of each flag over the data-parallel ranks, which compare the settings of the step.

        Raises:
            DesyncError: These differ.

        Collective over the data-parallel ranks.
        """
        settings, group = self._current_settings(), self._groups.control_group or self.data_parallel_group
        agreed, differs = any_rank_or_different(flags, settings.bytes(), group)
        if any(differs):
            raise settings.error(group)
        settings.forget_clipping()
        return agreed

    @cached_property
    def step_settings(self) -> StepSettings:
        """What ranks compare of a step."""
        return StepSettings()

    def _current_settings(self) -> StepSettings:
        settings = self.step_settings
        settings.num_steps, settings.hyperparameters = self._num_steps, Hyperparameters.of(self.optim)
        settings.note_items(self._accumulation.num_items, self._accumulation.num_averaged)
        return settings

    def _note_clipping(self, limit: float) -> None:
        self.step_settings.note_clipping(limit)

    @torch.no_grad()
    def _restore_memory(self) -> None:
        for parameter, memory in self._shard_memory():
            if parameter.numel() > 0 and parameter.data_ptr() != memory.data_ptr():
                memory.copy_(parameter.detach().view(memory.shape))
                parameter.data = memory.view(parameter.shape)

    def _run_on_all_ranks(self, update: Callable[[], Any]) -> None:
        with full_step(self.optim):
            super()._run_on_all_ranks(update)

    def _clip_to_max_norm(self) -> None:
        accumulation = self._accumulation
        if self._clip.max_norm <= 0 or accumulation.has_stepped:
            return
        self._unscale_gradients()  # includes gradients of a plain loss.backward()
        if accumulation.num_backwards == 0:
            return
        norm_of_user = accumulation.norm
        self.clip_grad_by_norm(float(self._clip.max_norm), float(self._clip.norm_type))
        if norm_of_user is not None:
            accumulation.norm = self._last_norm = norm_of_user

    def model_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the model's parameter for a parameter of `param_groups`, which may be a shard of it."""
        return self._model_param_of.get(id(parameter), parameter)

    def group_parameters(self, index: int) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.logical_groups[index]]

    def group_masters(self, index: int) -> list[nn.Parameter]:
        parts = [self.shards.shard_of(parameter) for parameter in self.param_groups[index]["params"]]
        return [part.parameter for part in parts if part is not None and part.has_master]

    def checkpoint_state(self) -> ShardedOptimizerState:
        return ShardedOptimizerState(self)

    def pending_gradients(self) -> ShardedPendingGradients:
        return ShardedPendingGradients(self)


def written_weights_error(where: str, names: Iterable[str]) -> ConfigError:
    """Return the error of a module's forward that writes to the gathered weights of these names."""
    return ConfigError(
        f"the forward of {where} wrote to its weights ({format_list(map(repr, names), 3)}), as nn.Embedding does with"
        " max_norm: what was gathered for it is thrown away, and the change with it. Leave that out, change weights"
        " between steps inside of `with model.gathered():`, or use a plugin that keeps weights whole"
    )


def replaced_memory_error(name: str) -> ConfigError:
    """Return the error of updating a parameter whose memory was replaced."""
    return ConfigError(
        f"the memory of {name!r} was replaced after boost(), by model.to(), .half(), .data = or the like, so that the"
        " optimizer's updates would not reach the model: do it before boost(), and write values into the memory that is"
        " there, as by parameter.data.copy_(values), under FSDP inside of `with model.gathered():`"
    )
