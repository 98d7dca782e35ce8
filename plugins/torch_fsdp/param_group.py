"""FSDP2 parameter groups: one all-gather for the weights, one reduce-scatter for the gradients."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from booster.comm import AllGather as Gathering
from booster.comm import group_rank, group_size, start_all_gather, start_reduce_scatter
from booster.errors import DesyncError
from booster.plugins.sharding.buffer_pool import BufferPool

from .autograd_hooks import InputGradHook
from .collective_order import CollectiveKind, CollectiveOrder, CollectiveRequest


# One parameter has several tensors: the user's from before boost(), the sharded one that the model shows between
# forwards, and the gathered one that forwards use and that autograd accumulates the unreduced gradient into. The user
# sees one parameter. So all of them share one dictionary of attributes and of hooks, and the last assignment to
# requires_grad of any of them holds for all.
def _share_attributes(original: torch.Tensor, other: torch.Tensor) -> None:
    if other.__dict__ is original.__dict__:
        return
    original.__dict__.update(other.__dict__)
    other.__dict__ = original.__dict__
    with torch._C.DisableTorchFunctionSubclass():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(original, name) is None:
                setattr(original, name, OrderedDict())
            setattr(other, name, getattr(original, name))
    if type(other) is nn.Parameter:
        other.__class__ = type(original)  # type: ignore[assignment]


@contextmanager
def hide_post_accumulate_hooks(members: Iterable[ShardedParam]) -> Iterator[None]:
    """Hide the hooks of sharded parameters from FSDP2.

    FSDP2 would call them with the reduced gradient, which is still in flight here.
    """
    kept = [(one.parameter, hooks) for one in members if (hooks := one.parameter._post_accumulate_grad_hooks)]
    for parameter, _ in kept:
        parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameter, hooks in kept:
            parameter._post_accumulate_grad_hooks = hooks


@dataclass(slots=True, eq=False)
class ShardedParam:
    """A sharded parameter of a parameter group.

    Attributes:
        name: First name in the model.
        names: All names in the model.
        original: The user's tensor from before boost(), emptied.
        parameter: DTensor that the model shows between forwards.
        state: FSDP2's `FSDPParam`.
        rank: This rank's index in the group that the parameter is sharded over.
        is_used: Whether a backward of this accumulation produced a gradient.
        data_ptr: Data pointer of this rank's shard when the model was boosted.
        shape: Shape of the unsharded parameter.
        padded_numel: Elements of every rank's shard, with padding.
        flat_range: This rank's flat range of the row-major parameter.
    """

    name: str
    names: tuple[str, ...]
    original: nn.Parameter = field(repr=False)
    parameter: nn.Parameter
    state: FSDPParam = field(repr=False)
    rank: int
    is_used: bool = False
    data_ptr: int = field(init=False, repr=False)
    shape: tuple[int, ...] = field(init=False, repr=False)
    padded_numel: int = field(init=False, repr=False)
    flat_range: tuple[int, int] = field(init=False, repr=False)
    _requires_grad: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.data_ptr = self.state._sharded_param_data.data_ptr()
        self.shape = tuple(self.parameter.shape)
        self.padded_numel = self.state.padded_sharded_param_size.numel()
        numel = math.prod(self.shape)
        start = min(numel, self.rank * self.padded_numel)
        self.flat_range = (start, min(numel, start + self.padded_numel))
        self._requires_grad = self.parameter.requires_grad
        _share_attributes(self.original, self.parameter)
        self.state._setattr_on_modules = self._set_on_modules  # type: ignore[assignment, method-assign]

    def _set_on_modules(self, parameter: nn.Parameter) -> None:
        """Replacement of `FSDPParam._setattr_on_modules`."""
        _share_attributes(self.original, parameter)
        parameter.requires_grad_(self.requires_grad)
        FSDPParam._setattr_on_modules(self.state, parameter)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard without padding, flat, in the memory that FSDP2 gathers from."""
        start, stop = self.flat_range
        return self.state._sharded_param_data[: stop - start]

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter requires gradients."""
        return self.sync_requires_grad()

    def sync_requires_grad(self) -> bool:
        """Apply the last change of requires_grad on any of the tensors to all of them, and return it."""
        info = self.state._module_info
        tensors = [self.original, self.parameter, getattr(info.module, info.param_name)]
        if any(one.requires_grad != self._requires_grad for one in tensors):
            self._requires_grad = not self._requires_grad
            for one in tensors:
                one.requires_grad_(self._requires_grad)
        return self._requires_grad

    @property
    def has_unreduced_grad(self) -> bool:
        """Whether this rank has an unreduced gradient."""
        full_param = getattr(self.state, "_unsharded_param", None)
        return self.state.unsharded_accumulated_grad is not None or (
            full_param is not None and full_param.grad is not None
        )

    def unreduced_grad(self) -> torch.Tensor | None:
        """Return this rank's unreduced, unsharded gradient, still scaled."""
        accumulated = self.state.unsharded_accumulated_grad
        full_param = getattr(self.state, "_unsharded_param", None)
        fresh: torch.Tensor | None = None if full_param is None else full_param.grad
        if accumulated is None or fresh is None:
            return fresh if accumulated is None else accumulated
        return accumulated + fresh

    def clear_unreduced_grad(self) -> None:
        """Drop the unreduced gradient."""
        self.state.unsharded_accumulated_grad = None
        full_param = getattr(self.state, "_unsharded_param", None)
        if full_param is not None:
            full_param.grad = None


def allocate(pool: BufferPool, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for a collective; the pool reuses it when no tensor refers to it any more.

    On accelerators the caching allocator is used instead, which is stream-aware.
    """
    numel = math.prod(int(one) for one in size)
    if device.type != "cpu" or numel == 0:
        return torch.empty(numel, dtype=dtype, device=device)
    buffer = pool.take(numel * dtype.itemsize)
    memory = buffer.view(numel, dtype)
    pool.release(buffer)
    return memory


class ParamGroupAllGather(AllGather):
    """All-gather of a parameter group's weights.

    Args:
        param_group: Parameter group.
    """

    def __init__(self, param_group: ParamGroup) -> None:
        self._param_group = param_group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the output buffer."""
        return allocate(self._param_group.pool, [int(one) for one in size], dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Start the all-gather, in the collective order; it is in place, the input is a view of the output."""
        owner = self._param_group
        in_backward = owner.group._training_state in (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)
        kind = CollectiveKind.BACKWARD_GATHER if in_backward else CollectiveKind.FORWARD_GATHER
        owner.coordinator.synchronize(CollectiveRequest(kind, owner.index))
        work = start_all_gather(output_tensor, group)
        if async_op:
            return _AllGatherWork(work)
        work.wait()
        return None


class ParamGroupReduceScatter(ReduceScatter):
    """Reduce-scatter into a parameter group's buffer of reduced gradients.

    FSDP2 calls `allocate` for the input (unsharded), then for the output (this rank's shard).

    Args:
        param_group: Parameter group.
    """

    def __init__(self, param_group: ParamGroup) -> None:
        self._param_group = param_group
        self._has_input = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an input buffer, or the group's reduced gradients as output."""
        sizes = [int(one) for one in size]
        self._has_input = not self._has_input
        if self._has_input:
            return allocate(self._param_group.pool, sizes, dtype, device)
        return self._param_group.reduce_output(math.prod(sizes), dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatter in the collective order. `op` is ignored: the reduction is always a sum."""
        self._param_group.reduce(input_tensor, output_tensor)


class _AllGatherWork(dist.Work):
    def __init__(self, work: Gathering) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        return True


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
        process_group: Ranks that the parameters are sharded over.
        num_ranks: Size of `process_group`.
        reduce_dtype: Dtype of the gradients in the reduce-scatter.
        grad_dtype: Dtype of the reduced gradients.
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
        self.coordinator = coordinator
        self.device = group.device
        assert isinstance(group.mesh_info, FSDPMeshInfo)
        self.process_group = group.mesh_info.shard_process_group
        self.num_ranks = group_size(self.process_group)
        policy = group.mp_policy
        self.reduce_dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or self.params[0].shard.dtype
        self.grad_dtype = self.reduce_dtype if self.reduce_dtype.itemsize >= 4 else torch.float32
        self._offloads = any(one.state.offload_to_cpu for one in self.params)
        # Whether gradients are read from FSDP2's: with one rank (no collective), or with CPU offload.
        self._reads_fsdp_grads = self.num_ranks == 1 or self._offloads
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
    def trainable_params(self) -> tuple[ShardedParam, ...]:
        """Trainable parameters, those that take part in reductions."""
        return tuple(one for one in self.params if one.requires_grad)

    @torch.no_grad()
    def participate(self, kind: CollectiveKind) -> None:
        """Take part in a collective that only other ranks need: with the shard of the weights, or with zeros.

        Args:
            kind: Kind of collective; the shard of reduced gradients is accumulated.

        Raises:
            DesyncError: The collective is one that ranks can't take part in passively.
        """
        if kind is CollectiveKind.REDUCE:
            self.reduce_unreduced_grads(contributes=False)
            return
        if kind is CollectiveKind.BACKWARD_GATHER and self.group._use_post_forward_mesh:
            raise DesyncError(
                f"another rank uses {self.name!r} in a backward and this rank does not, which an integer"
                " reshard_after_forward does not support: pass True or False, or use the same modules on every rank"
            )
        self._gathered(self.params[0].state.mp_policy.param_dtype)

    # Weights.

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

    # Gradients.

    @property
    def has_unreduced_grads(self) -> bool:
        """Whether this rank has unreduced gradients."""
        return any(one.has_unreduced_grad for one in self.params)

    def grad_shard_of(self, member: ShardedParam) -> torch.Tensor | None:
        """Return this rank's shard of a parameter's reduced gradient, flat, or None if there is none."""
        if not self.has_reduced_grads or member not in self._buffer_params:
            return None
        assert self._grad_buffer is not None
        start = sum(one.padded_numel for one in self._buffer_params[: self._buffer_params.index(member)])
        first, last = member.flat_range
        return self._grad_buffer[start : start + last - first]

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
            self.coordinator.wait_in_flight()
            self.reduced_grads()
        elif self._grad_buffer is None or members != self._buffer_params:
            numel = sum(one.padded_numel for one in members)
            self._grad_buffer = torch.empty(numel, dtype=self.grad_dtype, device=self.device)
            self._buffer_params = members

    def reduce(self, send_buffer: torch.Tensor, output: torch.Tensor) -> None:
        """Reduce-scatter gradients, in the collective order. Collective over `process_group`.

        Args:
            send_buffer: Unsharded gradients, ordered by rank.
            output: Tensor returned by `reduce_output`.
        """
        if self.num_ranks == 1:
            output.copy_(send_buffer)
            return
        self.coordinator.synchronize(CollectiveRequest(CollectiveKind.REDUCE, self.index))
        work = start_reduce_scatter(send_buffer, self.process_group)
        if self._reads_fsdp_grads:
            work.wait(output, accumulate=False)
            return
        accumulate, self.has_reduced_grads = self.has_reduced_grads, True
        if self.device.type != "cpu":
            work.wait(output, accumulate=accumulate)  # in the current stream, so the host does not wait
            return
        work.set_output(output, accumulate=accumulate)
        self.coordinator.wait_in_flight()
        self.coordinator.in_flight = lambda: work.wait(output, accumulate=accumulate)

    def _post_backward(self, *unused: Any) -> None:
        """Replacement of `FSDPParamGroup.post_backward`; see Note [Gradient buffer]."""
        if not hasattr(self.params[0].state, "_unsharded_param"):
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
        self.coordinator.wait_in_flight()
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
        context = self.group.comm_ctx
        if self.device.type != "cpu" and hasattr(context, "reduce_scatter_stream"):  # it may still reduce
            torch.accelerator.current_stream().wait_stream(context.reduce_scatter_stream)
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


def _without_inference_mode(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    # Tensors allocated under inference mode could not be trained later; FSDP2 keeps those of the first forward.
    with torch.inference_mode(False), torch.no_grad():
        function(*args, **kwargs)


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
            assert isinstance(group.mesh_info, FSDPMeshInfo)
            rank = group_rank(group.mesh_info.shard_process_group)
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
