"""FSDP2 parameter groups: one all-gather for the weights, one reduce-scatter for the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from booster.comm import group_rank, group_size, start_all_gather, start_reduce_scatter
from booster.errors import DesyncError
from booster.plugins.sharding.buffer_pool import BufferPool
from booster.plugins.torch_fsdp.collectives import UnitAllGather, UnitReduceScatter, room
from booster.plugins.torch_fsdp.coordination import Coordinator, Served, Task, TaskKind
from booster.plugins.torch_fsdp.members import Member, without_reduced_gradient_hooks
from booster.plugins.torch_fsdp.watching import InputWatch

__all__ = ["Unit", "groups_of", "units_of"]

# Note [Sums of a unit]
# FSDP2 allocates memory for the reduced gradients of each backward, casts them to the weights' dtype and adds them to
# those of earlier backwards. Here a parameter group has one flat buffer for reduced gradients, in fp32 or wider, that
# lives as long as the model. The reduce-scatter accumulates straight into it, and the gradients that FSDP2 then makes
# of it are dropped. All trainable parameters take part in every reduce-scatter, with zeros where this rank has not used
# them, because the ranks' inputs must have equal lengths. Which ones were used on any rank is all-reduced when the
# gradients are read.


class Unit:
    """An FSDP2 parameter group with this library's collectives.

    Args:
        index: Index among the parameter groups of the model.
        name: Name of the module in the model.
        module: Module that `fully_shard` was applied to.
        group: FSDP2's parameter group.
        members: Parameters of the group.
        coordinator: Coordinator of all parameter groups of the model.
        pool: Memory for collectives, shared by all parameter groups of the model.

    Attributes:
        device: Device that the weights are gathered on.
        on_gradients: Callback of a backward that produces gradients here, or None.
    """

    def __init__(
        self,
        index: int,
        name: str,
        module: FSDPModule,
        group: FSDPParamGroup,
        members: Sequence[Member],
        coordinator: Coordinator,
        pool: BufferPool,
    ) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.group = group
        self.members = tuple(members)
        self.pool = pool
        self._coordinator = coordinator
        self.device = group.device
        self._offloads = any(one.state.offload_to_cpu for one in self.members)
        self._sums: torch.Tensor | None = None
        self._summed: tuple[Member, ...] = ()
        self.has_sums = False
        self.on_gradients: Callable[[], None] | None = None
        self._running_part: nn.Module | None = None
        self._take_over(module)
        self._watch_parts()

    def _watch_parts(self) -> None:
        """Run FSDP2's forward hooks around submodules that are called directly, as by a method of the user's model."""
        infos = [member.state._module_info for member in self.members]
        owners = {owner: None for info in infos for owner in (info.module, *info.shared_modules)}
        for owner in owners:
            if owner is not cast(nn.Module, self.module):
                owner.register_forward_pre_hook(self._enter_part, prepend=True, with_kwargs=True)
                owner.register_forward_hook(self._leave_part)

    def _enter_part(self, part: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        state = self.module._get_fsdp_state()
        is_idle = state._training_state is TrainingState.IDLE and self.group._training_state is TrainingState.IDLE
        # Recomputation by activation checkpointing runs in backward, where the weights are gathered already.
        if not is_idle or torch._C._current_graph_task_id() != -1:
            return None
        self._running_part = part
        entered: tuple[Any, Any] = state._pre_forward(cast(nn.Module, self.module), args, kwargs)
        return entered

    def _leave_part(self, part: nn.Module, args: Any, output: Any) -> Any:
        if self._running_part is not part:
            return output
        self._running_part = None
        self.inputs.tie(part, args, output)
        return self.module._get_fsdp_state()._post_forward(cast(nn.Module, self.module), args, output)

    def _take_over(self, module: FSDPModule) -> None:
        module.set_custom_all_gather(UnitAllGather(self))
        module.set_custom_reduce_scatter(UnitReduceScatter(self))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if self.device.type == "cpu" and hasattr(module, "_set_unshard_async_op"):
            module._set_unshard_async_op(True)  # gloo has no streams: an immediate wait would prevent overlap
        self.group.post_backward = self._post_backward  # type: ignore[method-assign]
        self.group.unshard = partial(_in_normal_memory, self.group.unshard)  # type: ignore[method-assign]
        self.group.wait_for_unshard = partial(_in_normal_memory, self.group.wait_for_unshard)  # type: ignore[method-assign]
        self.inputs = InputWatch(module, self._post_backward)  # type: ignore[arg-type]
        self.group._register_post_backward_hook = self.inputs.watch  # type: ignore[method-assign]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Ranks that the parameters are sharded over."""
        return _shard_group(self.group)

    @property
    def num_ranks(self) -> int:
        """Size of `process_group`."""
        return group_size(self.process_group)

    @property
    def trained(self) -> tuple[Member, ...]:
        """Trainable parameters, those that take part in reductions."""
        return tuple(one for one in self.members if one.trains)

    @property
    def served(self) -> Served:
        """Callbacks by which this rank takes part in collectives that other ranks need."""
        return Served(gather=self._serve_gather, reduce=lambda: self.reduce_local(gives=False))

    # Weights.

    def arrive_to_gather(self) -> None:
        """Return when the all-gather of these weights is next in the collective order. Collective."""
        in_backward = self.group._training_state in (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)
        kind = TaskKind.BACKWARD_GATHER if in_backward else TaskKind.FORWARD_GATHER
        self._coordinator.arrive(Task(kind, self.index))

    def reshard(self) -> None:
        """Free gathered weights, which do not follow changes of the shards."""
        self.group._to_sharded()

    @torch.no_grad()
    def gather(self, dtype: torch.dtype | None = None) -> dict[Member, torch.Tensor]:
        """Return unsharded weights in newly allocated memory. Collective over `process_group`.

        Args:
            dtype: Dtype of the weights; optional, defaults to that of the shards.
        """
        found: dict[Member, torch.Tensor] = {}
        buffer = self._gathered(dtype)
        grid, start = buffer.view(self.num_ranks, -1), 0
        for one in self.members:
            rows = grid[:, start : start + one.piece_numel].reshape(-1)
            found[one] = whole = torch.empty(one.shape, dtype=rows.dtype, device=rows.device)
            whole.view(-1).copy_(rows[: whole.numel()])
            start += one.piece_numel
        return found

    def _gathered(self, dtype: torch.dtype | None) -> torch.Tensor:
        numel = sum(one.piece_numel for one in self.members)
        dtype = dtype or self.members[0].piece.dtype
        buffer = room(self.pool, (numel * self.num_ranks,), dtype, self.device)
        rank, start = group_rank(self.process_group), 0
        own = buffer[rank * numel : (rank + 1) * numel]
        for one in self.members:
            own[start : start + one.piece_numel].copy_(one.state._sharded_param_data)
            start += one.piece_numel
        start_all_gather(buffer, self.process_group).wait()
        return buffer

    @torch.no_grad()
    def _serve_gather(self, in_backward: bool) -> None:
        if in_backward and self.group._use_post_forward_mesh:
            raise DesyncError(
                f"another rank uses {self.name!r} in a backward and this rank does not, which an integer"
                " reshard_after_forward does not support: pass True or False, or use the same modules on every rank"
            )
        self._gathered(self.members[0].state.mp_policy.param_dtype)

    # Gradients.

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of the gradients in the reduce-scatter."""
        policy, own = self.group.mp_policy, self.members[0].piece.dtype
        return policy.reduce_dtype or policy.param_dtype or own

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype of the reduced gradients."""
        return self.reduce_dtype if self.reduce_dtype.itemsize >= 4 else torch.float32

    @property
    def has_local(self) -> bool:
        """Whether this rank has unreduced gradients."""
        return any(one.has_local_gradient for one in self.members)

    def gradient_of(self, member: Member) -> torch.Tensor | None:
        """Return this rank's shard of a parameter's reduced gradient, flat, or None if there is none."""
        if not self.has_sums or member not in self._summed:
            return None
        assert self._sums is not None
        start = self._start_of(member)
        first, last = member.span
        return self._sums[start : start + last - first]

    def _start_of(self, member: Member) -> int:
        return sum(one.piece_numel for one in self._summed[: self._summed.index(member)])

    def forget_gradients(self, *, keeps_use: bool = False) -> None:
        """Drop all gradients and keep the buffer."""
        self.has_sums = False
        for one in self.members:
            one.forget_local_gradient()
            one.is_used = one.is_used and keeps_use

    def sums(self) -> torch.Tensor:
        """Return the buffer of reduced gradients for the current trainable parameters; new ones start as zeros."""
        members = self.trained
        if self._sums is not None and self.has_sums and members == self._summed:
            return self._sums
        kept = {one: grad.clone() for one in members if (grad := self.gradient_of(one)) is not None}
        numel = sum(one.piece_numel for one in members)
        if self._sums is None or members != self._summed:
            home = torch.device("cpu") if self._offloads else self.device
            self._sums = torch.empty(numel, dtype=self.sum_dtype, device=home)
            self._summed = members
        self._sums.zero_()
        self.has_sums = True
        for one, gradient in kept.items():
            own = self.gradient_of(one)
            assert own is not None
            own.copy_(gradient)
        return self._sums

    def output_of_reduction(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the output tensor that FSDP2 passes to the reduce-scatter."""
        if self._is_collected:
            return torch.empty(numel, dtype=dtype, device=self.device)
        self._prepare_sums()
        assert self._sums is not None
        assert self._sums.numel() == numel
        return self._sums

    def _prepare_sums(self) -> None:
        """Allocate the buffer; its content is undefined unless `has_sums`."""
        members = self.trained
        if self.has_sums and members != self._summed:
            self._coordinator.finish_flight()
            self.sums()
        elif self._sums is None or members != self._summed:
            numel = sum(one.piece_numel for one in members)
            self._sums = torch.empty(numel, dtype=self.sum_dtype, device=self.device)
            self._summed = members

    @property
    def _is_collected(self) -> bool:
        """Whether gradients are read from FSDP2's: with one rank (no collective), or with CPU offload."""
        return self.num_ranks == 1 or self._offloads

    def reduce(self, payload: torch.Tensor, output: torch.Tensor) -> None:
        """Reduce-scatter gradients, in the collective order. Collective over `process_group`.

        Args:
            payload: Unsharded gradients, ordered by rank.
            output: Tensor returned by `output_of_reduction`.
        """
        if self.num_ranks == 1:
            output.copy_(payload)
            return
        self._coordinator.arrive(Task(TaskKind.REDUCE, self.index))
        flight = start_reduce_scatter(payload, self.process_group)
        if self._is_collected:
            flight.finish(output, accumulate=False)
            return
        accumulate, self.has_sums = self.has_sums, True
        if self.device.type != "cpu":
            flight.finish(output, accumulate=accumulate)  # in the current stream, so the host does not wait
            return
        flight.aim(output, accumulate=accumulate)
        self._coordinator.fly(lambda: flight.finish(output, accumulate=accumulate))

    def _post_backward(self, *unused: Any) -> None:
        """Replacement of `FSDPParamGroup.post_backward`; see Note [Sums of a unit]."""
        if not self.members[0].was_gathered:
            return  # gradients loaded from a checkpoint, which FSDP2 cannot hold before the first all-gather
        if self.on_gradients is not None and self.has_local:
            self.on_gradients()
        if self.group.reduce_grads and self._note_use():
            self._complete_gradients()
        with without_reduced_gradient_hooks(self.members):
            FSDPParamGroup.post_backward(self.group)
        self._collect_gradients()

    def _note_use(self) -> bool:
        used = [one for one in self.members if one.has_local_gradient]
        for one in used:
            one.is_used = True
        return bool(used)

    @torch.no_grad()
    def _complete_gradients(self) -> None:
        """Give every trainable parameter a gradient, all of one dtype."""
        keeps = any(one.state.unsharded_accumulated_grad is not None for one in self.members)
        for one in self.trained:
            gradient = one.local_gradient()
            whole = one.state.unsharded_param
            if gradient is None:
                gradient = torch.zeros_like(whole, requires_grad=False)
            if keeps:
                one.forget_local_gradient()
                one.state.unsharded_accumulated_grad = gradient.to(self.reduce_dtype)
            elif whole.grad is None:
                whole.grad = gradient

    @torch.no_grad()
    def _collect_gradients(self) -> None:
        for one in self.members:
            gradient: Any = one.state.sharded_param.grad
            if gradient is None:
                continue
            one.state.sharded_param.grad = None
            if self._is_collected:
                if one.state.grad_offload_event is not None:
                    one.state.grad_offload_event.synchronize()
                    one.state.grad_offload_event = None
                self.sums()
                own = self.gradient_of(one)
                assert own is not None
                own.add_(gradient._local_tensor.reshape(-1))

    @torch.no_grad()
    def reduce_local(self, *, gives: bool = True) -> None:
        """Reduce-scatter unreduced gradients outside of FSDP2's backward. Collective over `process_group`.

        Args:
            gives: If True, this rank contributes its gradients; otherwise zeros, and it keeps its gradients.
        """
        self._coordinator.finish_flight()
        if gives:
            self._note_use()
        members = self.trained
        numel = sum(one.piece_numel for one in members)
        payload = torch.zeros(numel * self.num_ranks, dtype=self.reduce_dtype, device=self.device)
        grid, start = payload.view(self.num_ranks, -1), 0
        for one in members if gives else ():
            gradient = one.local_gradient()
            if gradient is not None:
                _spread(gradient.reshape(-1), grid[:, start : start + one.piece_numel])
                one.forget_local_gradient()
            start += one.piece_numel
        self._wait_for_reductions()
        flight = start_reduce_scatter(payload, self.process_group)
        if self._offloads:
            output = torch.empty(numel, dtype=self.sum_dtype, device=self.device)
            flight.finish(output, accumulate=False)
            self.sums().add_(output.to("cpu"))
            return
        self._prepare_sums()
        assert self._sums is not None
        accumulate, self.has_sums = self.has_sums, True
        flight.finish(self._sums, accumulate=accumulate)

    def _wait_for_reductions(self) -> None:
        """Order the current stream behind FSDP2's reduce-scatter stream."""
        context = self.group.comm_ctx
        if self.device.type != "cpu" and hasattr(context, "reduce_scatter_stream"):
            torch.accelerator.current_stream().wait_stream(context.reduce_scatter_stream)


def _in_normal_memory(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    # Tensors allocated under inference mode could not be trained later; FSDP2 keeps those of the first forward.
    with torch.inference_mode(False), torch.no_grad():
        function(*args, **kwargs)


def _shard_group(group: FSDPParamGroup) -> dist.ProcessGroup:
    assert isinstance(group.mesh_info, FSDPMeshInfo)
    return group.mesh_info.shard_process_group


def _spread(flat: torch.Tensor, grid: torch.Tensor) -> None:
    parts = flat.split(grid.shape[1]) if grid.shape[1] else ()
    for row, part in zip(grid, parts, strict=False):
        row[: part.numel()].copy_(part)


def groups_of(module: FSDPModule) -> list[FSDPParamGroup]:
    """Return FSDP2's parameter groups of a module; empty if the module has no parameters of its own."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 there was one at most
        group = state._fsdp_param_group
        groups = [] if group is None else [group]
    return list(groups)


def units_of(
    modules: Iterable[tuple[str, FSDPModule]],
    names_of: dict[int, tuple[str, ...]],
    originals: dict[int, nn.Parameter],
    coordinator: Coordinator,
    pool: BufferPool,
) -> Iterator[Unit]:
    """Yield the parameter groups of modules, in order.

    Args:
        modules: Names and modules that `fully_shard` was applied to, in model order.
        names_of: All names of each sharded parameter, by its `id`.
        originals: The user's parameter from before boost(), by the same `id`.
        coordinator: Coordinator of all parameter groups of the model.
        pool: Memory for collectives.
    """
    index = 0
    for name, module in modules:
        for group in groups_of(module):
            rank = group_rank(_shard_group(group))
            members = [_member(state, names_of, originals, rank) for state in group.fsdp_params]
            yield Unit(index, name, module, group, members, coordinator, pool)
            index += 1


def _member(
    state: FSDPParam, names_of: dict[int, tuple[str, ...]], originals: dict[int, nn.Parameter], rank: int
) -> Member:
    assert state.sharded_state is ShardedState.SHARDED
    shown = state.sharded_param
    names = names_of[id(shown)]
    return Member(name=names[0], names=names, original=originals[id(shown)], parameter=shown, state=state, rank=rank)
