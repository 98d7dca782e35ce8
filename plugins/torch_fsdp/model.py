"""Model wrapper of FSDP2: unsharded state dicts, temporary full parameters and deep copies of the user's model."""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from booster.comm import all_gather_equal, broadcast, raise_on_all_ranks
from booster.core.model_wrapper import batch_on_device
from booster.core.plain_torch import refuse_tracing, refuse_transforms
from booster.errors import CheckpointError, ConfigError
from booster.interface import TensorSlice
from booster.kernels.checksum import tensor_crc32
from booster.plugins.base import DistributedModel, check_save_pretrained, refuse_conversion
from booster.plugins.sharding.collective_order import CollectiveKind, CollectiveOrder
from booster.plugins.sharding.deferred_init import sharded_copy_error
from booster.plugins.sharding.optimizer import replaced_memory_error

from .fsdp2_internals import DEEPCOPY, ShardedParam, detached_from_fsdp, original_class, replaced_parameter_error
from .param_group import ParamGroup
from .shard_update import Param, ReplicatedParams

_models: weakref.WeakSet[FSDPModel] = weakref.WeakSet()


class FSDPModel(DistributedModel):
    """The boosted model. Each rank holds a shard of the weights, and the full weights of a group while it runs.

    The parameters of the user's module are DTensors between forwards. `state_dict()` returns unsharded weights, and
    `with model.gathered():` puts them into the module. Both are collective.

    Args:
        module: The user's model, to which `fully_shard` was applied.
        groups: Parameter groups of the model.
        replicated_params: Replicated parameters, which belong to no parameter group.
        collective_order: Coordinator of the parameter groups.
        device: Device that the model computes on.
        is_primary: If True, this rank writes data that all ranks hold.
        writes_shards: If True, this rank writes its shards; False on the other replicas.
        broadcasts_buffers: If True, buffers are made equal on all ranks after each step in training.

    Attributes:
        fsdp_groups: Parameter groups.
        sharded_params: Sharded parameters of all parameter groups.
        fsdp_params: All parameters, sharded and replicated.
        param_of: Sharded or replicated parameter, by the `id` of the model's parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[ParamGroup],
        replicated_params: ReplicatedParams,
        collective_order: CollectiveOrder,
        *,
        device: torch.device,
        is_primary: bool,
        writes_shards: bool,
        broadcasts_buffers: bool,
    ) -> None:
        super().__init__(module, None, is_primary=is_primary, broadcasts_buffers=broadcasts_buffers)
        self._compute_device_type = device.type  # not that of the shards, which may be offloaded
        self.fsdp_groups = tuple(groups)
        self.replicated_params = replicated_params
        self.collective_order = collective_order
        self._writes_shards = writes_shards
        self._is_gathered = self._has_evaluated = False
        self.sharded_params = [param for group in self.fsdp_groups for param in group.params]
        self.fsdp_params: list[Param] = [*self.sharded_params, *replicated_params.params]
        self.param_of = {id(param.parameter): param for param in self.fsdp_params}
        collective_order.participants = [group.participate for group in self.fsdp_groups]
        for one in module.modules():
            if isinstance(one, FSDPModule):
                vars(one)[DEEPCOPY] = functools.partial(_refuse_copy, original_class(one))
        check_save_pretrained(module, _holds_shards)
        _hook_autograd_grad()
        _models.add(self)

    def describe_groups(self) -> str:
        """Return the parameter groups as text for the log."""
        groups = ", ".join(
            f"{group.name or 'the root'} ({sum(math.prod(one.shape) for one in group.params)})"
            for group in self.fsdp_groups
        )
        replicated = ", ".join(one.name for one in self.replicated_params.params)
        count = len(self.fsdp_groups)
        return f"{count} parameter groups (elements): {groups or 'none'}; replicated: {replicated or 'none'}"

    # Running.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward with its own arguments and result.

        Collective: weights are all-gathered.
        """
        self._begin_run(args, kwargs)
        if self._is_gathered:  # as FSDP2 does outside of `gathered()`
            args, kwargs = batch_on_device((args, kwargs), torch.device(self._compute_device_type))
        with self._reset_on_error():
            outputs = super().forward(*args, **kwargs)
        self._end_run()
        return outputs

    @property
    def _is_local_forward(self) -> bool:
        """Whether forwards need no other rank: on full weights, or recomputed by activation checkpointing."""
        # Recomputation is part of the backward, and may stop early.
        return self._is_gathered or torch._C._current_graph_task_id() != -1

    def _begin_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_local_forward:
            refuse_tracing()
            refuse_transforms()
            self.check_not_moved()
            self._has_evaluated = False
            self._begin_training_forward()
            self.collective_order.begin_pass(CollectiveKind.FORWARD_BEGIN, torch.is_grad_enabled())

    def _end_run(self) -> None:
        if not self._is_local_forward:
            self.collective_order.synchronize_end(CollectiveKind.FORWARD_END)
            if not torch.is_grad_enabled():
                self._has_evaluated = True

    def unwrap(self) -> nn.Module:
        """Return the user's model. An evaluation leaves weights gathered, which are freed: writes to them are lost."""
        if self._has_evaluated:
            self._has_evaluated = False
            self.reshard()
        return super().unwrap()

    def _run_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._reset_on_error():
            return super()._run_method(method, *args, **kwargs)

    def check_not_moved(self) -> None:
        """Check that neither the memory of the shards nor parameters of modules were replaced.

        Raises:
            ConfigError: Updates would not reach the model.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for param in self.sharded_params:
                replacement = param.replacement()
                if replacement == "memory":
                    raise replaced_memory_error(param.name)
                if replacement is not None:
                    raise replaced_parameter_error(param.name)

    @contextmanager
    def collecting(self, *, synchronizes: bool) -> Iterator[None]:
        """Context that autograd runs in. Collective on exit.

        Args:
            synchronizes: If True, gradients are reduced; otherwise each rank accumulates them unsharded.

        Raises:
            ConfigError: The model is inside of `gathered()`, where gradients are not collected.
        """
        self.check_not_gathered("backward()")
        for group in self.fsdp_groups:
            group.reduces_grads = synchronizes
        self.collective_order.begin_pass(CollectiveKind.BACKWARD_BEGIN, synchronizes)
        with self._reset_on_error():
            for group in self.fsdp_groups:
                group.gather_for_graph_of_gradients()
            yield
        self.collective_order.synchronize_end(CollectiveKind.BACKWARD_END)

    @contextmanager
    def _reset_on_error(self) -> Iterator[None]:
        """Reset FSDP2's iteration state if a forward or backward raises."""
        try:
            yield
        except BaseException as error:
            if self._is_local_forward:
                raise
            self.collective_order.abort_pass()
            reset = getattr(self.module, "reset_iter_state", None)
            if reset is not None and self.fsdp_groups:
                self.fsdp_groups[0].fsdp2.order_streams()
                reset()
            for group in self.fsdp_groups:
                group.input_hook.remove()
            if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
                raise ConfigError(
                    "a weight was used while it was sharded: a module reads weights of, or calls a submodule of, one of"
                    f" {', '.join(repr(group.name) for group in self.fsdp_groups if group.name)} from outside. Give an"
                    " auto_wrap_policy that wraps both together, such as torch.distributed.fsdp's"
                    " ModuleWrapPolicy({Block})"
                ) from error
            raise

    def reshard(self) -> None:
        """Free gathered weights, which do not follow changes of the shards."""
        if not self._is_gathered:
            for group in self.fsdp_groups:
                group.fsdp2.reshard()

    def bump_versions(self) -> None:
        """Bump the weights' version counters, so that backward through an older graph raises."""
        for group in self.fsdp_groups:
            group.forget_graphs_of_gradients()
        weights = [one.unsharded_param if isinstance(one, ShardedParam) else one.parameter for one in self.fsdp_params]
        torch.autograd.graph.increment_version([one for one in weights if one is not None])

    def check_not_gathered(self, call: str) -> None:
        """Check that a call is not made inside of `gathered()`.

        Raises:
            ConfigError: It is. Gradients are not collected there, and its weights overwrite the shards at its end.
        """
        if self._is_gathered:
            raise ConfigError(f"{call} inside of `with model.gathered():`: leave the block first")

    def clear_grads(self, *, keep_used: bool = False) -> None:
        """Drop all gradients."""
        self.collective_order.wait_in_flight()
        for group in self.fsdp_groups:
            group.clear_grads(keep_used=keep_used)
        self.replicated_params.clear_grads(keep_used=keep_used)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model, those of its optimizer as `optimizer.zero_grad()` does."""
        super().zero_grad(set_to_none)
        if self._optimizer is None:
            self.clear_grads()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FSDPModel:
        refuse_conversion(self.module, fn, "shards have it")
        return self

    # Whole weights.

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Yield the user's model with unsharded weights, in the dtype of the shards; changes to them are kept.

        A forward inside is not collective, so a single rank may run the model, for example to generate. Needs memory
        for the full model. Collective on entry and on exit.

        Raises:
            ConfigError: The ranks have made different changes, which are all discarded.
        """
        if self._is_gathered:
            yield self.module
            return
        try:
            with self._unsharded():
                try:
                    yield self.module
                finally:  # also if the caller's code raises on this rank, as the comparison is collective
                    self._check_same_weights()
                    for param in self.sharded_params:
                        start, stop = param.flat_range
                        param.shard.detach().copy_(param.shown.detach().reshape(-1)[start:stop])
        finally:  # masters follow the changes before an error
            self.notify_loaded()

    @contextmanager
    def _unsharded(self) -> Iterator[None]:
        """Context in which the user's module is free of FSDP2 and has unsharded weights, in the dtype of the shards.

        Collective on entry, over the ranks that the parameters are sharded over.
        """
        self.reshard()
        full_params = {param: full for group in self.fsdp_groups for param, full in group.gather().items()}
        with detached_from_fsdp(self.module):
            for param, full_param in full_params.items():
                param.set_on_modules(nn.Parameter(full_param, requires_grad=param.sync_requires_grad()))
            self._is_gathered = True
            try:
                yield
            finally:
                self._is_gathered = False
                for param in full_params:
                    param.set_on_modules(param.parameter)

    def _check_same_weights(self) -> None:
        digests = all_gather_equal(torch.tensor([tensor_crc32(*self.module.parameters())])).tolist()
        if len(set(digests)) > 1:
            broadcast([one.parameter for one in self.replicated_params.params])
            raise ConfigError(
                "the weights were changed inside of `with model.gathered():`, and on the ranks"
                f" {[rank for rank, one in enumerate(digests) if one != digests[0]]} differently from rank 0: make the"
                " same changes on every rank. All changes are discarded (of parameters that are whole on every rank,"
                " rank 0's are kept)"
            )

    @torch.no_grad()
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the `state_dict` of the user's model with unsharded tensors, copied, on every rank. Collective."""
        self.require_complete()
        if self._is_gathered:
            return self.module.state_dict(*args, **kwargs)
        self.reshard()
        state = self.module.state_dict(*args, **(kwargs | {"keep_vars": True}))
        known = self.param_of.keys() | {id(buffer) for buffer in self.module.buffers()}
        if any(isinstance(value, torch.Tensor) and id(value) not in known for value in state.values()):
            with self._unsharded():  # a hook or get_extra_state() computes values from weights
                state = self.module.state_dict(*args, **(kwargs | {"keep_vars": True}))
                copies = {id(one): one.detach().clone() for one in state.values() if isinstance(one, torch.Tensor)}
        else:
            copies = self._copies(state)
        for name, value in list(state.items()):
            state[name] = copies.get(id(value), value)  # tied ones stay tied
        return state

    def _copies(self, state: Mapping[str, Any]) -> dict[int, torch.Tensor]:
        """Return copies of a state's tensors by `id`, gathered one parameter group at a time. Collective."""
        asked = {id(value): value for value in state.values() if isinstance(value, torch.Tensor)}
        copies: dict[int, torch.Tensor] = {}
        for group in self.fsdp_groups:
            if any(id(param.parameter) in asked for param in group.params):
                copies |= {id(param.parameter): full_param for param, full_param in group.gather().items()}
        return copies | {key: value.detach().clone() for key, value in asked.items() if key not in copies}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load unsharded weights into the user's model; fp32 master weights are updated.

        An error on any rank leaves the model unchanged on all of them.

        Collective: every rank loads the same state.

        Raises:
            ConfigError: assign=True, which would detach the parameters from the optimizer.
            RuntimeError: Names or shapes do not match.
            RankFailedError: The load failed on another rank.
        """
        if assign or self._is_gathered:
            return super().load_state_dict(state_dict, strict, assign)
        self.reshard()
        # torch copies the tensors that match before it raises.
        shards = [one.shard if isinstance(one, ShardedParam) else one.parameter.detach() for one in self.fsdp_params]
        backups = [(one, one.clone()) for one in (*shards, *self.module.buffers())]
        error: Exception | None = None
        result = None
        try:
            result = self.module.load_state_dict(self._sharded(state_dict), strict=strict)
        except Exception as caught:  # raised on all ranks below
            error = caught
        try:
            raise_on_all_ranks(error)
        except BaseException:
            for tensor, before in backups:
                tensor.copy_(before)
            raise
        self.notify_loaded()
        return result

    def _sharded(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with DTensors of this rank's shards instead of unsharded weights."""
        by_name = {name: param for param in self.sharded_params for name in param.names}
        found = dict(state_dict)
        for name, value in state_dict.items():
            param = by_name.get(name)
            if param is None or not isinstance(value, torch.Tensor) or tuple(value.shape) != param.shape:
                continue
            full_tensor = value.full_tensor() if isinstance(value, DTensor) else value
            found[name] = param.sharded(full_tensor)
        return found

    def notify_loaded(self) -> None:
        self.reshard()
        super().notify_loaded()
        self.bump_versions()

    def _copy_module(self, memo: dict[int, Any]) -> nn.Module:
        with nullcontext() if self._is_gathered else self._unsharded():
            return copy.deepcopy(self.module, memo)

    # Interface of CheckpointIO.

    def tensor_slices(self) -> list[TensorSlice]:
        if self._is_gathered:
            return super().tensor_slices()
        self.reshard()
        buffers = {id(buffer) for buffer in self.module.buffers()}
        slices: list[TensorSlice] = []
        for names, value in self._named_state(self.param_of):
            found = self.param_of.get(id(value))
            if found is None and isinstance(value, DTensor):
                raise CheckpointError(
                    f"{names[0]!r} of the model's state is computed from sharded weights, by a hook or"
                    " get_extra_state(): save inside of `with model.gathered():`"
                )
            if isinstance(found, ShardedParam):
                if found.shard.numel() > 0:
                    slices.append(self._slice_of(names[0], found))
            else:
                is_shared = found is not None
                is_computed = found is None and id(value) not in buffers
                slices.append(
                    TensorSlice.full(
                        names[0], value.detach(), primary=self._is_primary, shared=is_shared, is_computed=is_computed
                    )
                )
        return slices

    def _slice_of(self, name: str, param: ShardedParam) -> TensorSlice:
        start, stop = param.flat_range
        row = math.prod(param.shape[1:])
        return TensorSlice(
            name=name,
            dtype=param.shard.dtype,
            global_shape=param.shape,
            box=((start // row, (stop - start) // row), *((0, size) for size in param.shape[1:])),
            span=(0, stop - start),
            tensor=param.shard,
            primary=self._writes_shards,
        )

    def tied_names(self) -> dict[str, tuple[str, ...]]:
        if self._is_gathered:
            return super().tied_names()
        return {names[0]: tuple(names[1:]) for names, _ in self._named_state(self.param_of) if len(names) > 1}


def _holds_shards(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())  # not inside of `gathered()`


def _refuse_copy(module_class: type[nn.Module], memo: dict[int, Any]) -> nn.Module:
    """Replacement of FSDP2's `__deepcopy__`, which raises another error."""
    raise sharded_copy_error(module_class)


@functools.cache
def _hook_autograd_grad() -> None:
    """Let `torch.autograd.grad` refuse weights of models: it finds no gradient of a shard, and local ones of others."""
    grad = torch.autograd.grad

    @functools.wraps(grad)
    def checked(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(inputs, (torch.Tensor, GradientEdge, Mapping)):
            inputs = tuple(inputs)  # it may be a generator
        refuse_weights("torch.autograd.grad()", inputs)
        return grad(outputs, inputs, *args, **kwargs)

    torch.autograd.grad = checked


def refuse_weights(call: str, inputs: Any) -> None:
    """Raise `ConfigError` if a model's sharded weights are among the tensors whose gradients a call computes."""
    if torch.compiler.is_compiling():
        return
    members = inputs.values() if isinstance(inputs, Mapping) else tree_leaves(inputs)
    given = {id(one) for one in members if isinstance(one, (DTensor, nn.Parameter))}
    for param in (param for model in list(_models) for param in model.sharded_params) if given else ():
        if not given.isdisjoint(map(id, (param.original, param.parameter, param.unsharded_param))):
            raise ConfigError(
                f"{call} with the weight {param.name!r}, which TorchFSDPPlugin shards over the"
                " ranks: write booster.backward(loss, optimizer), after which optimizer.named_gradients() has"
                " this rank's shards, or use TorchDDPPlugin. Gradients of inputs, as of a gradient penalty, may"
                " be computed by torch.autograd.grad()"
            )
