"""FSDP2 parameter groups: one all-gather for the weights, one reduce-scatter for the gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from booster.comm import AllGather as Gathering
from booster.comm import ReduceScatter, group_rank, group_size, start_all_gather, start_reduce_scatter
from booster.core.compiling import EagerHook, not_compiled
from booster.core.plain_torch import refuse_tracing
from booster.errors import DesyncError
from booster.plugins.sharding.buffer_pool import BufferPool
from booster.plugins.sharding.collective_order import CollectiveKind, CollectiveOrder, CollectiveRequest
from booster.plugins.sharding.optimizer import written_weights_error
from booster.pytree import map_tensors

from .fsdp2_internals import AllGather, FSDP2ParamGroup, ShardedParam, hooked_tensors, replaced_parameter_error


class ParamGroupAllGather(AllGather):
    """All-gather of a parameter group's weights.

    Args:
        param_group: Parameter group.
    """

    def __init__(self, param_group: ParamGroup) -> None:
        self._param_group = param_group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the output buffer."""
        return self._param_group.allocate(math.prod(int(one) for one in size), dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Start the all-gather, in the collective order; it is in place, the input is a view of the output."""
        owner = self._param_group
        kind = CollectiveKind.BACKWARD_GATHER if owner.fsdp2.is_in_backward else CollectiveKind.FORWARD_GATHER
        owner.coordinator.synchronize(CollectiveRequest(kind, owner.index))
        work = start_all_gather(output_tensor, group)
        if async_op:
            return _AllGatherWork(work)
        work.wait()
        return None


class _AllGatherWork(dist.Work):
    def __init__(self, work: Gathering) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        return True


class InputGradHook:
    """Calls back in backward when the gradients of a module's inputs are ready.

    FSDP2 passes the inputs through an autograd function, whose outputs can't be modified in place: a block that begins
    with `x += ...` fails. Views can be modified. So here each input becomes a view of itself, with one multi-grad hook
    on all of them. If one is modified in place its hook is lost, and the end of the model's backward stands in for it.

    The hook keeps its graph alive. A `_HookGuard` on the module's outputs removes it when the graph could be freed.

    Args:
        module: Module that `fully_shard` was applied to.
        callback: Callback in backward when the inputs' gradients are ready.
    """

    def __init__(self, module: nn.Module, callback: Callable[..., None]) -> None:
        self._callback = callback
        self._handles: list[RemovableHandle] = []
        module.register_forward_hook(self.bind_to_outputs)

    def register(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with tensors replaced by hooked views."""
        views: list[torch.Tensor] = []

        def view(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            views.append(tensor.view_as(tensor))
            return views[-1]

        if not torch.is_grad_enabled():
            return args, kwargs
        viewed: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(view, (args, kwargs))
        if views:
            self._handles.append(register_multi_grad_hook(views, self._callback))
        return viewed

    def remove(self) -> None:
        """Remove the hooks of forwards that did not complete."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def bind_to_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        """Bind the lifetime of this forward's hooks to its outputs."""
        if not self._handles:
            return
        guard = _HookGuard(self._handles)
        self._handles = []

        def tie(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                tensor.register_hook(guard)
            return tensor

        map_tensors(tie, output)


class _HookGuard:
    """Removes hooks when it is garbage-collected."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def __call__(self, gradient: torch.Tensor) -> None:
        """No-op in backward."""

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", ()):  # a compiler makes copies without calling __init__
            handle.remove()


class ViewSafeOutputs:
    """Forward hook that runs before FSDP2's own.

    FSDP2 gathers weights for backward in a hook on each output tensor that it finds. This fails silently in two cases:
    if an output is a view that the caller modifies in place, autograd replaces the node that the hook is on; and in
    objects other than containers and dataclasses no tensor is found. In both, backward would read freed weights. So
    views are cloned, and once no tensor was found the weights of the module stay gathered until after backward. A
    weight that is returned, and a view of one, is cloned because its memory is freed, at the latest by a backward.

    Args:
        module: Module that `fully_shard` is about to be applied to.
        clones_views: If True, views are cloned; needed where the weights are freed after forward.
    """

    def __init__(self, module: nn.Module, *, clones_views: bool) -> None:
        self._clones_views = clones_views
        module.register_forward_hook(self)
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", module="torch")

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output for FSDP2 and the caller."""
        if torch.is_grad_enabled() and not hooked_tensors(output):
            assert isinstance(module, FSDPModule)
            module.set_reshard_after_forward(False, recurse=False)
        clones = (_is_weight, _is_view_in_graph) if self._clones_views else (_is_weight,)
        return map_tensors(lambda one: one.clone() if any(is_unsafe(one) for is_unsafe in clones) else one, output)


def _is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _is_view_in_graph(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor._base is not None and torch.is_grad_enabled()


# Note [Reduced gradients]
# FSDP2 gathers the weights, and gradients are reduced here: FSDP2 would allocate memory for the sums of each backward,
# cast them to the weights' dtype and add them to those of earlier backwards, parameter by parameter. A parameter group
# keeps the sums of the first backward, in fp32 or wider, until the gradients are cleared, and later reduce-scatters
# accumulate into them. With offload they are copied to host memory while backward continues, and added there when they
# are read. All trainable parameters take part in every reduce-scatter, and those that were trainable earlier in the
# accumulation, with zeros where this rank has not used them, because the ranks' inputs must have equal lengths. Which
# ones were used on any rank is all-reduced when the gradients are read.


class ParamGroup:
    """An FSDP2 parameter group with this library's collectives.

    Args:
        index: Index among the parameter groups of the model.
        name: Name of the module in the model.
        module: Module that `fully_shard` was applied to.
        fsdp2: FSDP2's parameter group.
        params: Parameters of the group.
        coordinator: Coordinator of all parameter groups of the model.
        pool: Memory for collectives, shared by all parameter groups of the model.
        compiled: Compiled layer of each module inside of one.

    Attributes:
        device: Device that the weights are gathered on.
        process_group: Ranks that the parameters are sharded over.
        num_ranks: Size of `process_group`.
        gather_dtype: Dtype of gathered weights in forward and backward.
        reduce_dtype: Dtype of the gradients in the reduce-scatter.
        grad_dtype: Dtype of the reduced gradients.
        on_gradients: Callback of a backward that produces gradients here, or None.
        reduces_grads: Whether backwards reduce gradients, or accumulate them unsharded.
    """

    def __init__(
        self,
        index: int,
        name: str,
        module: FSDPModule,
        fsdp2: FSDP2ParamGroup,
        params: Sequence[ShardedParam],
        coordinator: CollectiveOrder,
        pool: BufferPool,
        compiled: Mapping[nn.Module, nn.Module],
    ) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.fsdp2 = fsdp2
        self.params = tuple(params)
        self._pool = pool
        self.coordinator = coordinator
        self.device = fsdp2.device
        self.process_group = fsdp2.process_group
        self.num_ranks = group_size(self.process_group)
        self.gather_dtype: torch.dtype = fsdp2.mp_policy.param_dtype or self.params[0].shard.dtype
        self.reduce_dtype: torch.dtype = fsdp2.mp_policy.reduce_dtype or self.gather_dtype
        self.grad_dtype = self.reduce_dtype if self.reduce_dtype.itemsize >= 4 else torch.float32
        self._grad_buffer: torch.Tensor | None = None  # of this rank's shards of reduced gradients
        self._grad_params: tuple[ShardedParam, ...] = ()  # that it has gradients of
        # Sums of the last backward that are on their way to the host, of which parameters, and the end of the copy.
        self._arriving: tuple[torch.Tensor, tuple[ShardedParam, ...], torch.Event | None] | None = None
        self.on_gradients: Callable[[], None] | None = None
        self.reduces_grads = True
        self._has_graph_of_gradients = self._makes_graph = False
        self._running_submodule: nn.Module | None = None
        self._shown_versions: list[tuple[int, int] | None] = []
        self._install_collectives(module)
        self._hook_submodules(compiled)
        for one in self.params:
            one.gather_whole, one.reduce_dtype = partial(self._gather_whole, one), self.reduce_dtype

    def _hook_submodules(self, compiled: Mapping[nn.Module, nn.Module]) -> None:
        """Run FSDP2's forward hooks around submodules that are called directly, as by a method of the user's model."""
        module, holders = cast(nn.Module, self.module), [one for param in self.params for one in param.modules]
        inner = set(module.modules()) if compiled else set()
        layers = [compiled[one] for one in holders if compiled.get(one) in inner]
        for submodule in dict.fromkeys((*holders, *layers)):
            if submodule is module:
                continue
            enter: Callable[..., Any] = self._enter_submodule
            leave: Callable[..., Any] = self._leave_submodule
            if submodule in compiled:
                enter, leave = EagerHook(enter), EagerHook(leave)
            submodule.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            submodule.register_forward_hook(leave)

    def _enter_submodule(self, submodule: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if torch._C._current_graph_task_id() != -1:
            # Recomputation by activation checkpointing. The weights are gathered already if it is within the module's
            # backward, but not if it is of a call from outside of the module, before its gradient arrives.
            self.module.unshard()
            self._show_whole()
            return None
        if not self.fsdp2.is_idle:
            if self._running_submodule is submodule:  # a direct call that has raised
                self._running_submodule = None
            return None
        self._check_call()
        self._running_submodule = submodule
        self._unshard_for_inference()
        arguments = self.fsdp2.pre_forward(args, kwargs)
        self._show_whole()
        return arguments

    def _leave_submodule(self, submodule: nn.Module, args: Any, output: Any) -> Any:
        if self._running_submodule is not submodule:
            return output
        self._running_submodule = None
        self.input_hook.bind_to_outputs(submodule, args, output)
        output = self.fsdp2.post_forward(args, output)
        self._show_shards()
        return output

    # Weights that stay gathered after forward are shown while the module runs only: other ranks may not have run it.

    def _show_whole(self) -> None:
        if self.params[0].shown is not self.params[0].unsharded_param:
            for one in self.params:
                one.set_on_modules(cast(nn.Parameter, one.unsharded_param))

    def _show_shards(self) -> None:
        if self.params[0].shown is self.params[0].unsharded_param:
            for one in self.params:
                one.set_on_modules(one.parameter)

    @not_compiled
    def _begin_forward(self, *unused: Any) -> None:
        self._show_whole()
        self._shown_versions = self._versions()

    @not_compiled
    def _end_forward(self, *unused: Any) -> None:
        self._show_shards()
        # Autocast keeps casts of the gathered weights until its end: those of all layers together.
        if torch.is_autocast_enabled(self.device.type):
            torch.clear_autocast_cache()
        before, after = self._shown_versions, self._versions()
        if before != after:
            pairs = zip(self.params, before, after, strict=True)
            written = [param.name for param, old, new in pairs if old is not None and old != new]
            if written:
                raise written_weights_error(self.name or "the model", written)

    def _versions(self) -> list[tuple[int, int] | None]:
        """Return what changes where a forward writes to its weights, by parameter; None before the first all-gather."""
        shown = [param.unsharded_param for param in self.params]
        return [None if one is None else (one._version, one.untyped_storage()._cdata) for one in shown]

    @not_compiled
    def _check_call(self, *unused: Any) -> None:
        """Refuse tracing, and tensors that `torch.func.functional_call` has put into the user's modules."""
        refuse_tracing()
        for one in self.params:
            if one.is_replaced():
                raise replaced_parameter_error(one.name)

    def _unshard_for_inference(self, *unused: Any) -> None:
        """Gather the weights outside of inference mode.

        FSDP2 keeps the tensors of the first forward, and those of inference mode could not be trained later.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                self.module.unshard()

    def _install_collectives(self, module: FSDPModule) -> None:
        module.set_custom_all_gather(ParamGroupAllGather(self))
        module.set_requires_gradient_sync(False, recurse=False)  # FSDP2 accumulates those that were not taken
        self.input_hook = InputGradHook(cast(nn.Module, module), self._on_input_gradients)
        self.fsdp2.replace_backward(self._post_backward, self.input_hook.register, self._prepare_backward)
        cast(nn.Module, module).register_forward_pre_hook(self._unshard_for_inference, prepend=True)
        cast(nn.Module, module).register_forward_pre_hook(self._check_call, prepend=True)
        cast(nn.Module, module).register_forward_pre_hook(self._begin_forward)  # behind FSDP2's, which gathers
        cast(nn.Module, module).register_forward_hook(self._end_forward)

    @property
    def reduced_params(self) -> tuple[ShardedParam, ...]:
        """Parameters that take part in reductions."""
        for one in self.params:
            one.sync_requires_grad()
        return tuple([one for one in self.params if one.is_reduced])

    @torch.no_grad()
    def participate(self, kind: CollectiveKind) -> None:
        """Take part in a collective that only other ranks need: with the shard of the weights, or with zeros.

        Args:
            kind: Kind of collective; the shard of reduced gradients is accumulated.

        Raises:
            DesyncError: The collective is one that ranks can't take part in passively.
        """
        if kind is CollectiveKind.REDUCE:
            self.reduce({})
            return
        if kind is CollectiveKind.BACKWARD_GATHER and self.fsdp2.reshards_to_fewer_ranks:
            raise DesyncError(
                f"another rank uses {self.name!r} in a backward and this rank does not, which an integer"
                " reshard_after_forward does not support: pass True or False, or use the same modules on every rank"
            )
        self._gathered(self.gather_dtype, self.params)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a collective; the pool reuses it when no tensor refers to it any more.

        On accelerators the caching allocator is used instead, which is stream-aware.
        """
        if self.device.type != "cpu" or numel == 0:
            return torch.empty(numel, dtype=dtype, device=self.device)
        buffer = self._pool.acquire(numel * dtype.itemsize)
        memory = buffer.view(numel, dtype)
        self._pool.release(buffer)
        return memory

    # Weights.

    @torch.no_grad()
    def gather(self) -> dict[ShardedParam, torch.Tensor]:
        """Return unsharded weights in newly allocated memory. Collective over `process_group`."""
        gathered = self._gathered(self.params[0].shard.dtype, self.params)
        parts = gathered.split([one.padded_numel for one in self.params], dim=1)
        full_params: dict[ShardedParam, torch.Tensor] = {}
        for one, part in zip(self.params, parts, strict=True):
            rows = part.reshape(-1)[: math.prod(one.shape)]
            full_params[one] = rows.clone(memory_format=torch.contiguous_format).view(one.shape)
        return full_params

    @torch.no_grad()
    def _gather_whole(self, param: ShardedParam) -> torch.Tensor:
        """Return a weight that is read outside of the module; see Note [Weights outside of their modules]."""
        params: Sequence[ShardedParam] = (param,)
        dtype = param.shard.dtype
        if self.coordinator.is_in_pass:  # other ranks take part with the whole group, as they need not read it
            params, dtype = self.params, self.gather_dtype
            self.coordinator.synchronize(CollectiveRequest(self.coordinator.gather_kind, self.index))
        start = sum(one.padded_numel for one in params[: params.index(param)])
        rows = self._gathered(dtype, params)[:, start : start + param.padded_numel]
        return rows.reshape(-1)[: math.prod(param.shape)].view(param.shape)

    def _gathered(self, dtype: torch.dtype, params: Sequence[ShardedParam]) -> torch.Tensor:
        """Return the shards of all ranks with padding, each rank's in one row."""
        sizes = [one.padded_numel for one in params]
        buffer = self.allocate(sum(sizes) * self.num_ranks, dtype)
        rows = buffer.view(self.num_ranks, -1)
        for part, one in zip(rows[group_rank(self.process_group)].split(sizes), params, strict=True):
            part.copy_(one.padded_shard)
        start_all_gather(buffer, self.process_group).wait()
        return rows

    # Gradients.

    @property
    def has_unreduced_grads(self) -> bool:
        """Whether this rank has unreduced gradients."""
        return any(one.has_unreduced_grad for one in self.params)

    @property
    def has_reduced_grads(self) -> bool:
        """Whether there are reduced gradients."""
        return bool(self._grad_params) or self._arriving is not None

    def clear_grads(self, *, keep_used: bool = False) -> None:
        """Drop all gradients."""
        self._grad_buffer, self._grad_params, self._arriving = None, (), None
        for one in self.params:
            one.take_unreduced_grad()
            one.reduced_grad = None
            one.is_used = one.is_used and keep_used
            one.is_reduced = one.sync_requires_grad()

    def reduced_grads(self) -> torch.Tensor:
        """Return a buffer of the reduced gradients of `reduced_params`; missing ones become zeros."""
        self.add_arriving()
        params, buffer = self.reduced_params, self._grad_buffer
        if buffer is None or params != self._grad_params:
            self.coordinator.wait_in_flight()
            numel, device = sum(one.padded_numel for one in params), "cpu" if self.fsdp2.is_offloaded else self.device
            before = [(one, one.reduced_grad) for one in self._grad_params]
            buffer = torch.zeros(numel, dtype=self.grad_dtype, device=device)
            self._set_grads(buffer, params)
            for one, gradient in before:
                cast(torch.Tensor, one.reduced_grad).copy_(cast(torch.Tensor, gradient))
        return buffer

    def _set_grads(self, buffer: torch.Tensor, params: tuple[ShardedParam, ...]) -> None:
        self._grad_buffer, self._grad_params = buffer, params
        for one, gradient in zip(params, _views(buffer, params), strict=True):
            one.reduced_grad = gradient

    def take_unreduced_grads(self) -> dict[ShardedParam, torch.Tensor]:
        """Remove and return this rank's unreduced gradients, noting which parameters they are of."""
        grads: dict[ShardedParam, torch.Tensor] = {}
        for one in self.params:
            gradient = one.take_unreduced_grad()
            if gradient is not None:
                one.is_used = True
                grads[one] = gradient
        return grads

    @torch.no_grad()
    def reduce(self, grads: dict[ShardedParam, torch.Tensor]) -> None:
        """Start the reduce-scatter of gradients; `coordinator.wait_in_flight` ends it. Collective over `process_group`.

        Args:
            grads: This rank's unsharded gradients, zeros by default; emptied as soon as they are copied.
        """
        self.coordinator.wait_in_flight()
        params = self.reduced_params
        numel = sum([one.padded_numel for one in params])
        send_buffer = self.allocate(numel * self.num_ranks, self.reduce_dtype)
        self._write_rows(grads, params, send_buffer.view(self.num_ranks, -1))
        grads.clear()
        work = start_reduce_scatter(send_buffer, self.process_group)
        accumulate = bool(self._grad_params) and not self.fsdp2.is_offloaded
        output = self.reduced_grads() if accumulate else torch.empty(numel, dtype=self.grad_dtype, device=self.device)
        if not accumulate and not self.fsdp2.is_offloaded:
            self._set_grads(output, params)
        work.set_output(output, accumulate=accumulate)
        self.coordinator.in_flight = partial(self._finish_reduction, work, output, params, accumulate)

    def _write_rows(
        self, grads: Mapping[ShardedParam, torch.Tensor], params: Sequence[ShardedParam], rows: torch.Tensor
    ) -> None:
        """Write gradients as rows of one rank each, with padding."""
        if not grads:
            rows.zero_()
            return
        dtype, device = self.gather_dtype, self.device
        found = [grads[one] if one in grads else torch.zeros(one.shape, dtype=dtype, device=device) for one in params]
        if len({one.dtype for one in found}) > 1:  # those of earlier backwards are in `reduce_dtype`
            found = [one.to(self.reduce_dtype) for one in found]
        torch._chunk_cat(found, dim=0, num_chunks=self.num_ranks, out=rows)

    @torch.no_grad()
    def _finish_reduction(
        self, work: ReduceScatter, output: torch.Tensor, params: tuple[ShardedParam, ...], accumulate: bool
    ) -> None:
        work.wait(output, accumulate=accumulate)
        if self.fsdp2.is_offloaded:
            self.add_arriving()
            host, event = copy_to_host(output, is_pinned=self.fsdp2.is_pinned)
            self._arriving = host, params, event  # read in the step: backward continues meanwhile

    def add_arriving(self) -> None:
        """Wait for the sums of the last backward in host memory, and add them to those of earlier ones."""
        if self._arriving is None:
            return
        (buffer, params, event), self._arriving = self._arriving, None
        if event is not None and not event.query():  # the first layers' event, read first, is behind all others
            event.synchronize()
        if not self._grad_params:
            self._set_grads(buffer, params)
            return
        self.reduced_grads()
        sums = [one.reduced_grad for one in params if one.reduced_grad is not None]  # all have one
        with torch.no_grad():
            torch._foreach_add_(sums, _views(buffer, params))

    # Note [Graphs of gradients]
    # `torch.autograd.grad(..., create_graph=True)`, as of a gradient penalty, makes a graph that has saved the gathered
    # weights. FSDP2 frees their memory at the end of each backward, and in the next one gathers them again by hooks on
    # the outputs, which need not be part of it. So a backward that makes a graph leaves the weights gathered, and the
    # following ones, up to the step, gather those that are freed at their start, and free them at their end.

    def _prepare_backward(self) -> None:
        for param in self.params:
            param.sync_requires_grad()  # it may have been changed since the forward
        self._makes_graph = torch.is_grad_enabled()
        self._has_graph_of_gradients |= self._makes_graph

    def forget_graphs_of_gradients(self) -> None:
        """Note that the weights have changed, so that no earlier graph is used any more."""
        self._has_graph_of_gradients = False

    def gather_for_graph_of_gradients(self) -> None:
        """Gather the weights that a graph of gradients needs; see Note [Graphs of gradients]. Collective if any."""
        self._makes_graph = False
        if self._has_graph_of_gradients:
            self.module.unshard()

    def _on_input_gradients(self, *unused: Any) -> None:
        if not self._has_graph_of_gradients:
            self._post_backward()

    def _post_backward(self, *unused: Any) -> None:
        """Replacement of FSDP2's post-backward; see Note [Reduced gradients]."""
        if self._makes_graph:
            return
        if self.params[0].unsharded_param is None:
            return  # gradients loaded from a checkpoint, which FSDP2 cannot hold before the first all-gather
        if self.on_gradients is not None and self.has_unreduced_grads:
            self.on_gradients()
        grads = self.take_unreduced_grads() if self.reduces_grads else {}
        self.fsdp2.post_backward()  # frees the weights, before the reduction allocates memory
        if grads:
            self.coordinator.synchronize(CollectiveRequest(CollectiveKind.REDUCE, self.index))
            self.reduce(grads)


def copy_to_host(tensor: torch.Tensor, *, is_pinned: bool) -> tuple[torch.Tensor, torch.Event | None]:
    """Return a copy in host memory; if it is pinned, the host does not wait for it, and it is complete at an event."""
    host = tensor.to("cpu", non_blocking=is_pinned)
    event = torch.Event(device=tensor.device) if is_pinned else None
    if event is not None:
        event.record()
    return host, event


def _views(buffer: torch.Tensor, params: Sequence[ShardedParam]) -> list[torch.Tensor]:
    """Return the shards of parameters in a flat buffer with padding."""
    parts = buffer.split([one.padded_numel for one in params])
    return [part[: one.flat_range[1] - one.flat_range[0]] for one, part in zip(params, parts, strict=True)]
