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
from booster.plugins.torch_fsdp.collectives import ParamGroupAllGather, ParamGroupReduceScatter, allocate
from booster.plugins.torch_fsdp.coordination import CollectiveKind, CollectiveOrder, CollectiveRequest, PassiveCallbacks
from booster.plugins.torch_fsdp.members import ShardedParam, hide_post_accumulate_hooks
from booster.plugins.torch_fsdp.watching import InputGradHook

__all__ = ["ParamGroup", "build_param_groups", "fsdp_param_groups"]

# Note [Gradient buffer]
# FSDP2 allocates memory for the reduced gradients of each backward, casts them to the weights' dtype and adds them to
# those of earlier backwards. Here a parameter group has one flat buffer for reduced gradients, in fp32 or wider, that
# lives as long as the model. The reduce-scatter accumulates straight into it, and the gradients that FSDP2 then makes
# of it are dropped. All trainable parameters take part in every reduce-scatter, with zeros where this rank has not used
# them, because the ranks' inputs must have equal lengths. Which ones were used on any rank is all-reduced when the
# gradients are read.


class ParamGroup:
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
        members: Sequence[ShardedParam],
        coordinator: CollectiveOrder,
        pool: BufferPool,
    ) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.group = group
        self.params = tuple(members)
        self.pool = pool
        self._coordinator = coordinator
        self.device = group.device
        self._offloads = any(one.state.offload_to_cpu for one in self.params)
        self._grad_buffer: torch.Tensor | None = None
        self._buffer_params: tuple[ShardedParam, ...] = ()
        self.has_reduced_grads = False
        self.on_gradients: Callable[[], None] | None = None
        self._running_submodule: nn.Module | None = None
        self._install_collectives(module)
        self._hook_submodules()

    def _hook_submodules(self) -> None:
        """Run FSDP2's forward hooks around submodules that are called directly, as by a method of the user's model."""
        infos = [member.state._module_info for member in self.params]
        submodules = {submodule: None for info in infos for submodule in (info.module, *info.shared_modules)}
        for submodule in submodules:
            if submodule is not cast(nn.Module, self.module):
                submodule.register_forward_pre_hook(self._enter_submodule, prepend=True, with_kwargs=True)
                submodule.register_forward_hook(self._leave_submodule)

    def _enter_submodule(self, submodule: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        state = self.module._get_fsdp_state()
        is_idle = state._training_state is TrainingState.IDLE and self.group._training_state is TrainingState.IDLE
        # Recomputation by activation checkpointing runs in backward, where the weights are gathered already.
        if not is_idle or torch._C._current_graph_task_id() != -1:
            return None
        self._running_submodule = submodule
        hooked: tuple[Any, Any] = state._pre_forward(cast(nn.Module, self.module), args, kwargs)
        return hooked

    def _leave_submodule(self, submodule: nn.Module, args: Any, output: Any) -> Any:
        if self._running_submodule is not submodule:
            return output
        self._running_submodule = None
        self.input_hook.bind_to_outputs(submodule, args, output)
        return self.module._get_fsdp_state()._post_forward(cast(nn.Module, self.module), args, output)

    def _install_collectives(self, module: FSDPModule) -> None:
        module.set_custom_all_gather(ParamGroupAllGather(self))
        module.set_custom_reduce_scatter(ParamGroupReduceScatter(self))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if self.device.type == "cpu" and hasattr(module, "_set_unshard_async_op"):
            module._set_unshard_async_op(True)  # gloo has no streams: an immediate wait would prevent overlap
        self.group.post_backward = self._post_backward  # type: ignore[method-assign]
        self.group.unshard = partial(_without_inference_mode, self.group.unshard)  # type: ignore[method-assign]
        self.group.wait_for_unshard = partial(_without_inference_mode, self.group.wait_for_unshard)  # type: ignore[method-assign]
        self.input_hook = InputGradHook(module, self._post_backward)  # type: ignore[arg-type]
        self.group._register_post_backward_hook = self.input_hook.register  # type: ignore[method-assign]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Ranks that the parameters are sharded over."""
        return _shard_group(self.group)

    @property
    def num_ranks(self) -> int:
        """Size of `process_group`."""
        return group_size(self.process_group)

    @property
    def trainable_params(self) -> tuple[ShardedParam, ...]:
        """Trainable parameters, those that take part in reductions."""
        return tuple(one for one in self.params if one.requires_grad)

    @property
    def passive(self) -> PassiveCallbacks:
        """Callbacks by which this rank takes part in collectives that other ranks need."""
        return PassiveCallbacks(
            gather=self._participate_in_gather, reduce=lambda: self.reduce_unreduced_grads(contributes=False)
        )

    # Weights.

    def synchronize_gather(self) -> None:
        """Return when the all-gather of these weights is next in the collective order. Collective."""
        in_backward = self.group._training_state in (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)
        kind = CollectiveKind.BACKWARD_GATHER if in_backward else CollectiveKind.FORWARD_GATHER
        self._coordinator.synchronize(CollectiveRequest(kind, self.index))

    def reshard(self) -> None:
        """Free gathered weights, which do not follow changes of the shards."""
        self.group._to_sharded()

    @torch.no_grad()
    def gather(self, dtype: torch.dtype | None = None) -> dict[ShardedParam, torch.Tensor]:
        """Return unsharded weights in newly allocated memory. Collective over `process_group`.

        Args:
            dtype: Dtype of the weights; optional, defaults to that of the shards.
        """
        full_params: dict[ShardedParam, torch.Tensor] = {}
        buffer = self._gathered(dtype)
        grid, start = buffer.view(self.num_ranks, -1), 0
        for one in self.params:
            rows = grid[:, start : start + one.padded_numel].reshape(-1)
            full_params[one] = full_param = torch.empty(one.shape, dtype=rows.dtype, device=rows.device)
            full_param.view(-1).copy_(rows[: full_param.numel()])
            start += one.padded_numel
        return full_params

    def _gathered(self, dtype: torch.dtype | None) -> torch.Tensor:
        numel = sum(one.padded_numel for one in self.params)
        dtype = dtype or self.params[0].shard.dtype
        buffer = allocate(self.pool, (numel * self.num_ranks,), dtype, self.device)
        rank, start = group_rank(self.process_group), 0
        own = buffer[rank * numel : (rank + 1) * numel]
        for one in self.params:
            own[start : start + one.padded_numel].copy_(one.state._sharded_param_data)
            start += one.padded_numel
        start_all_gather(buffer, self.process_group).wait()
        return buffer

    @torch.no_grad()
    def _participate_in_gather(self, in_backward: bool) -> None:
        if in_backward and self.group._use_post_forward_mesh:
            raise DesyncError(
                f"another rank uses {self.name!r} in a backward and this rank does not, which an integer"
                " reshard_after_forward does not support: pass True or False, or use the same modules on every rank"
            )
        self._gathered(self.params[0].state.mp_policy.param_dtype)

    # Gradients.

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of the gradients in the reduce-scatter."""
        policy, own = self.group.mp_policy, self.params[0].shard.dtype
        return policy.reduce_dtype or policy.param_dtype or own

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype of the reduced gradients."""
        return self.reduce_dtype if self.reduce_dtype.itemsize >= 4 else torch.float32

    @property
    def has_unreduced_grads(self) -> bool:
        """Whether this rank has unreduced gradients."""
        return any(one.has_unreduced_grad for one in self.params)

    def grad_shard_of(self, member: ShardedParam) -> torch.Tensor | None:
        """Return this rank's shard of a parameter's reduced gradient, flat, or None if there is none."""
        if not self.has_reduced_grads or member not in self._buffer_params:
            return None
        assert self._grad_buffer is not None
        start = self._start_of(member)
        first, last = member.flat_range
        return self._grad_buffer[start : start + last - first]

    def _start_of(self, member: ShardedParam) -> int:
        return sum(one.padded_numel for one in self._buffer_params[: self._buffer_params.index(member)])

    def clear_grads(self, *, keep_used: bool = False) -> None:
        """Drop all gradients and keep the buffer."""
        self.has_reduced_grads = False
        for one in self.params:
            one.clear_unreduced_grad()
            one.is_used = one.is_used and keep_used

    def reduced_grads(self) -> torch.Tensor:
        """Return the buffer of reduced gradients for the current trainable parameters; new ones start as zeros."""
        members = self.trainable_params
        if self._grad_buffer is not None and self.has_reduced_grads and members == self._buffer_params:
            return self._grad_buffer
        kept = {one: grad.clone() for one in members if (grad := self.grad_shard_of(one)) is not None}
        numel = sum(one.padded_numel for one in members)
        if self._grad_buffer is None or members != self._buffer_params:
            device = torch.device("cpu") if self._offloads else self.device
            self._grad_buffer = torch.empty(numel, dtype=self.grad_dtype, device=device)
            self._buffer_params = members
        self._grad_buffer.zero_()
        self.has_reduced_grads = True
        for one, gradient in kept.items():
            own = self.grad_shard_of(one)
            assert own is not None
            own.copy_(gradient)
        return self._grad_buffer

    def reduce_output(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the output tensor that FSDP2 passes to the reduce-scatter."""
        if self._reads_fsdp_grads:
            return torch.empty(numel, dtype=dtype, device=self.device)
        self._allocate_grad_buffer()
        assert self._grad_buffer is not None
        assert self._grad_buffer.numel() == numel
        return self._grad_buffer

    def _allocate_grad_buffer(self) -> None:
        """Allocate the buffer; its content is undefined unless `has_reduced_grads`."""
        members = self.trainable_params
        if self.has_reduced_grads and members != self._buffer_params:
            self._coordinator.wait_in_flight()
            self.reduced_grads()
        elif self._grad_buffer is None or members != self._buffer_params:
            numel = sum(one.padded_numel for one in members)
            self._grad_buffer = torch.empty(numel, dtype=self.grad_dtype, device=self.device)
            self._buffer_params = members

    @property
    def _reads_fsdp_grads(self) -> bool:
        """Whether gradients are read from FSDP2's: with one rank (no collective), or with CPU offload."""
        return self.num_ranks == 1 or self._offloads

    def reduce(self, send_buffer: torch.Tensor, output: torch.Tensor) -> None:
        """Reduce-scatter gradients, in the collective order. Collective over `process_group`.

        Args:
            send_buffer: Unsharded gradients, ordered by rank.
            output: Tensor returned by `reduce_output`.
        """
        if self.num_ranks == 1:
            output.copy_(send_buffer)
            return
        self._coordinator.synchronize(CollectiveRequest(CollectiveKind.REDUCE, self.index))
        work = start_reduce_scatter(send_buffer, self.process_group)
        if self._reads_fsdp_grads:
            work.wait(output, accumulate=False)
            return
        accumulate, self.has_reduced_grads = self.has_reduced_grads, True
        if self.device.type != "cpu":
            work.wait(output, accumulate=accumulate)  # in the current stream, so the host does not wait
            return
        work.set_output(output, accumulate=accumulate)
        self._coordinator.set_in_flight(lambda: work.wait(output, accumulate=accumulate))

    def _post_backward(self, *unused: Any) -> None:
        """Replacement of `FSDPParamGroup.post_backward`; see Note [Gradient buffer]."""
        if not self.params[0].was_gathered:
            return  # gradients loaded from a checkpoint, which FSDP2 cannot hold before the first all-gather
        if self.on_gradients is not None and self.has_unreduced_grads:
            self.on_gradients()
        if self.group.reduce_grads and self._mark_used():
            self._fill_missing_grads()
        with hide_post_accumulate_hooks(self.params):
            FSDPParamGroup.post_backward(self.group)
        self._take_fsdp_grads()

    def _mark_used(self) -> bool:
        used = [one for one in self.params if one.has_unreduced_grad]
        for one in used:
            one.is_used = True
        return bool(used)

    @torch.no_grad()
    def _fill_missing_grads(self) -> None:
        """Give every trainable parameter a gradient, all of one dtype."""
        accumulates = any(one.state.unsharded_accumulated_grad is not None for one in self.params)
        for one in self.trainable_params:
            gradient = one.unreduced_grad()
            full_param = one.state.unsharded_param
            if gradient is None:
                gradient = torch.zeros_like(full_param, requires_grad=False)
            if accumulates:
                one.clear_unreduced_grad()
                one.state.unsharded_accumulated_grad = gradient.to(self.reduce_dtype)
            elif full_param.grad is None:
                full_param.grad = gradient

    @torch.no_grad()
    def _take_fsdp_grads(self) -> None:
        for one in self.params:
            gradient: Any = one.state.sharded_param.grad
            if gradient is None:
                continue
            one.state.sharded_param.grad = None
            if self._reads_fsdp_grads:
                if one.state.grad_offload_event is not None:
                    one.state.grad_offload_event.synchronize()
                    one.state.grad_offload_event = None
                self.reduced_grads()
                own = self.grad_shard_of(one)
                assert own is not None
                own.add_(gradient._local_tensor.reshape(-1))

    @torch.no_grad()
    def reduce_unreduced_grads(self, *, contributes: bool = True) -> None:
        """Reduce-scatter unreduced gradients outside of FSDP2's backward. Collective over `process_group`.

        Args:
            contributes: If True, this rank contributes its gradients; otherwise zeros, and it keeps its gradients.
        """
        self._coordinator.wait_in_flight()
        if contributes:
            self._mark_used()
        members = self.trainable_params
        numel = sum(one.padded_numel for one in members)
        send_buffer = torch.zeros(numel * self.num_ranks, dtype=self.reduce_dtype, device=self.device)
        grid, start = send_buffer.view(self.num_ranks, -1), 0
        for one in members if contributes else ():
            gradient = one.unreduced_grad()
            if gradient is not None:
                _copy_to_rows(gradient.reshape(-1), grid[:, start : start + one.padded_numel])
                one.clear_unreduced_grad()
            start += one.padded_numel
        self._wait_reduce_scatter_stream()
        work = start_reduce_scatter(send_buffer, self.process_group)
        if self._offloads:
            output = torch.empty(numel, dtype=self.grad_dtype, device=self.device)
            work.wait(output, accumulate=False)
            self.reduced_grads().add_(output.to("cpu"))
            return
        self._allocate_grad_buffer()
        assert self._grad_buffer is not None
        accumulate, self.has_reduced_grads = self.has_reduced_grads, True
        work.wait(self._grad_buffer, accumulate=accumulate)

    def _wait_reduce_scatter_stream(self) -> None:
        """Order the current stream behind FSDP2's reduce-scatter stream."""
        context = self.group.comm_ctx
        if self.device.type != "cpu" and hasattr(context, "reduce_scatter_stream"):
            torch.accelerator.current_stream().wait_stream(context.reduce_scatter_stream)


def _without_inference_mode(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    # Tensors allocated under inference mode could not be trained later; FSDP2 keeps those of the first forward.
    with torch.inference_mode(False), torch.no_grad():
        function(*args, **kwargs)


def _shard_group(group: FSDPParamGroup) -> dist.ProcessGroup:
    assert isinstance(group.mesh_info, FSDPMeshInfo)
    return group.mesh_info.shard_process_group


def _copy_to_rows(flat: torch.Tensor, grid: torch.Tensor) -> None:
    rows = flat.split(grid.shape[1]) if grid.shape[1] else ()
    for row, values in zip(grid, rows, strict=False):
        row[: values.numel()].copy_(values)


def fsdp_param_groups(module: FSDPModule) -> list[FSDPParamGroup]:
    """Return FSDP2's parameter groups of a module; empty if the module has no parameters of its own."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 there was one at most
        group = state._fsdp_param_group
        groups = [] if group is None else [group]
    return list(groups)


def build_param_groups(
    modules: Iterable[tuple[str, FSDPModule]],
    names_of: dict[int, tuple[str, ...]],
    originals: dict[int, nn.Parameter],
    coordinator: CollectiveOrder,
    pool: BufferPool,
) -> Iterator[ParamGroup]:
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
        for group in fsdp_param_groups(module):
            rank = group_rank(_shard_group(group))
            members = [_sharded_param(state, names_of, originals, rank) for state in group.fsdp_params]
            yield ParamGroup(index, name, module, group, members, coordinator, pool)
            index += 1


def _sharded_param(
    state: FSDPParam, names_of: dict[int, tuple[str, ...]], originals: dict[int, nn.Parameter], rank: int
) -> ShardedParam:
    assert state.sharded_state is ShardedState.SHARDED
    parameter = state.sharded_param
    names = names_of[id(parameter)]
    return ShardedParam(
        name=names[0], names=names, original=originals[id(parameter)], parameter=parameter, state=state, rank=rank
    )
