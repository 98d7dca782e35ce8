"""The part of torch's FSDP2 that is used here and is not public; no other module of this folder accesses any of it.

FSDP2's setters determine the all-gather, the synchronization of gradients and resharding after forward. They do not
give access to the rest, which stands here with the reason. tests/unit/test_fsdp2_internals.py
checks that every name exists with the expected signature.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather  # the base of custom all-gathers
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only

from booster.core.compiling import not_compiled
from booster.errors import ConfigError
from booster.lazy_init.materialize import METADATA_FUNCTIONS
from booster.plugins.sharding.collective_order import is_any_pass_running

# FSDP2's search for tensors in outputs; before torch 2.13 it searched pytrees.
_collect: Callable[[Any], Sequence[torch.Tensor]] | None = getattr(_common_utils, "collect_grad_tensors", None)


def hooked_tensors(output: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of an output that FSDP2 finds, to register its backward hooks on."""
    if _collect is not None:
        return _collect(output)
    return [one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad]


# Note [Parts of sharded weights]
# DTensor gathers a view across the sharded dimension, such as a row, into a copy, and a write to it is lost without a
# word; random numbers for it differ from those of one process. So the tensor that the model shows between forwards is
# of a subclass. What operators return for it is, too, and knows whether it is such a copy. The operators themselves run
# on plain DTensors.
#
# Note [Weights outside of their modules]
# A penalty, a distance from other weights or a module may read a parameter whose module does not run. An operator that
# builds a graph, runs within a forward or takes other tensors as well is then given the whole weight, gathered anew,
# and its gradient arrives in the unsharded parameter, as those of the parameter's own module do. All other operators
# see the DTensor. All ranks must read the same between forwards; within one, ranks may differ, as in Note [Collective
# order].
class ShardedWeight(DTensor):
    """Weight between forwards; see Note [Parts of sharded weights] and Note [Weights outside of their modules]."""

    __slots__ = ()

    @classmethod
    @not_compiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # where operators of DTensors fail, such as detach()
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_function__(func, types, args, kwargs)
        if func not in _READS_NO_WEIGHTS:
            args, kwargs = _with_whole_weights(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if isinstance(result, DTensor) and any(one.is_partial() for one in result.placements):
                # Of all ranks' shards: `item()` would give that of this rank's.
                placements = [Replicate() if one.is_partial() else one for one in result.placements]
                result = result.redistribute(placements=placements)
                result.__class__ = cls
            return result

    @classmethod
    @not_compiled
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        returned: dict[int, DTensor] = {}  # what writes return is what was given

        def plain(tensor: DTensor) -> DTensor:
            if type(tensor) is not cls:
                return tensor
            one = DTensor(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)
            returned[id(one)] = tensor
            return one

        def weight(tensor: DTensor) -> DTensor:
            if id(tensor) in returned:
                return returned[id(tensor)]
            tensor.__class__ = cls  # type: ignore[assignment]
            if is_view:
                tensor.__dict__["_is_copy"] = _is_copy(sources[0]) or not _has_memory_of(tensor, sources[0])
            return tensor

        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ConfigError(
                f"{func} draws random numbers for a weight that is sharded over the ranks, of which each would draw the"
                " same ones for its shard: draw them inside of `with model.gathered():`, with equal seeds on all ranks"
            )
        schema = func._schema
        given = [*args, *(kwargs.get(one.name) for one in schema.arguments[len(args) :])]
        sources = [one for one in tree_leaves(given) if isinstance(one, cls)]
        for argument, value in zip(schema.arguments, given, strict=True):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and any(_is_copy(one) for one in tree_leaves(value)):
                raise ConfigError(
                    "a write to a part of a weight that is sharded over the ranks would be lost: the part is a copy,"
                    " gathered from all ranks. Write to it inside of `with model.gathered():`, or to the whole weight"
                )
            if is_written and argument.kwarg_only and value is not None and len(sources) == 1:
                raise ConfigError(
                    f"{func} was to write a weight that is sharded over the ranks, of which each has a part, and would"
                    " give every part the first values: write it inside of `with model.gathered():`"
                )
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        plain_args, plain_kwargs = tree_map_only(DTensor, plain, (tuple(args), kwargs))
        try:
            return tree_map_only(DTensor, weight, func(*plain_args, **plain_kwargs))
        except (RuntimeError, NotImplementedError) as error:
            if not any(text in str(error) for text in _UNSUPPORTED):
                raise
            raise RuntimeError(
                f"{error} A weight is sharded over the ranks here: use this operator, and other tensors together with"
                " it, inside of `with model.gathered():`"
            ) from error


# Of DTensor's errors.
_UNSUPPORTED = ("mixed torch.Tensor and DTensor", "not supported", "sharding strategy", "Sharding propagation failed")
_READS_NO_WEIGHTS = METADATA_FUNCTIONS | {
    *(one for name, one in vars(nn.init).items() if name.endswith("_") and callable(one)),  # of writes
    *(torch.Tensor.data.__get__, torch.Tensor.data.__set__),  # type: ignore[attr-defined]
    *(torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__deepcopy__, torch.Tensor.__repr__),
}
_VIEWS_LIKE_OTHERS = {torch.Tensor.view_as, torch.Tensor.expand_as, torch.Tensor.reshape_as}
_WRITING_OPERATORS = {
    "__setitem__",
    *(f"__i{one}__" for one in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")),
    *(f"__i{one}__" for one in ("and", "or", "xor", "lshift", "rshift")),
}
_param_of: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()  # by `id` of `parameter`


def _with_whole_weights(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return an operator's arguments, with whole weights where it reads them; see the note above."""
    name = func.__name__
    writes = name in _WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__"))
    written = {id(one) for one in tree_leaves([args[:1] if writes else (), kwargs.get("out")])}
    tensors = {id(one): one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
    read = {key: one for key, one in tensors.items() if isinstance(one, ShardedWeight) and key not in written}
    params = {key: _param_of[key] for key in read if key in _param_of}
    is_in_pass = is_any_pass_running()
    is_in_graph = torch.is_grad_enabled() and any(param.parameter.requires_grad for param in params.values())
    others = [] if func in _VIEWS_LIKE_OTHERS else [one for one in tensors.values() if not isinstance(one, DTensor)]
    is_mixed = any(one.dim() > 0 or one.requires_grad for one in others)
    is_detached = func is torch.Tensor.detach and not is_in_pass
    if is_detached or not (is_mixed or is_in_pass or is_in_graph):
        return args, kwargs

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in params:
            param = params[id(tensor)]
            leaf = tensor if param.unsharded_param is None else param.unsharded_param
            return cast(torch.Tensor, _WholeWeight.apply(leaf, param.gather_whole(), param))
        if id(tensor) in read and not is_in_pass:
            with torch._C.DisableTorchFunctionSubclass():
                return cast(DTensor, tensor).full_tensor()
        return tensor

    replaced: tuple[Any, Any] = tree_map_only(torch.Tensor, whole, (args, kwargs))
    return replaced


class _WholeWeight(torch.autograd.Function):
    """Returns a gathered weight, whose gradient is that of the unsharded parameter."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, weight: torch.Tensor, param: ShardedParam) -> torch.Tensor:
        ctx.unused_param = param if leaf is param.parameter else None  # FSDP2 makes the leaf when it gathers first
        return weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        if ctx.unused_param is None:
            return gradients[0], None, None
        before, gradient = ctx.unused_param.take_unreduced_grad(), gradients[0].to(ctx.unused_param.reduce_dtype)
        ctx.unused_param.set_accumulated_grad(gradient if before is None else before + gradient)
        return None, None, None


def _is_copy(tensor: Any) -> bool:
    return isinstance(tensor, ShardedWeight) and tensor.__dict__.get("_is_copy", False)


def _has_memory_of(view: DTensor, source: DTensor) -> bool:
    """Whether a view is in the memory of its source; without elements it is."""
    local, of_source = view._local_tensor, source._local_tensor
    return local.numel() == 0 or local.untyped_storage().data_ptr() == of_source.untyped_storage().data_ptr()


# One parameter has several tensors: the user's from before boost(), the sharded one that the model shows between
# forwards, and the unsharded one that forwards use and that autograd accumulates the unreduced gradient into. The user
# sees one parameter. So all of them share one dictionary of attributes and of hooks, and the last assignment to
# requires_grad of any of them holds for all.
def _share_attributes(original: torch.Tensor, other: torch.Tensor) -> None:
    original.__dict__.update(other.__dict__)
    other.__dict__ = original.__dict__
    with torch._C.DisableTorchFunctionSubclass():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(original, name) is None:
                setattr(original, name, OrderedDict())
            setattr(other, name, getattr(original, name))


def replaced_parameter_error(name: str) -> ConfigError:
    """Return the error for a parameter that the model has no more."""
    return ConfigError(
        f"{name!r} was replaced by another parameter after boost(), such as by tying weights, a parametrization or"
        " pruning, and FSDP would put its own back: do it before boost(); torch.func.functional_call works inside of"
        " `with model.gathered():`"
    )


class ShardedParam:
    """A sharded parameter of a parameter group.

    The optimizer updates the shard in place, so its memory must be that which FSDP2 gathers from, and a step reads and
    clears gradients that were not reduced. FSDP2 shows neither.

    Args:
        names: All names in the model.
        original: The user's tensor from before boost(), emptied.
        fsdp_param: FSDP2's `FSDPParam`.
        rank: This rank's index in the group that the parameter is sharded over.

    Attributes:
        name: First name in the model.
        parameter: DTensor that the model shows between forwards.
        unsharded_param: Parameter that forwards use, whose memory is freed between them; None before the first
            all-gather.
        is_used: Whether a backward of this accumulation produced a gradient.
        reduced_grad: This rank's shard of the reduced gradient, flat, or None.
        reduce_dtype: Dtype in which its gradients are reduced.
        gather_whole: Returns the unsharded weight in other memory; see Note [Weights outside of their modules].
        is_reduced: Whether it takes part in reductions: it is trainable, or was in this accumulation.
        shape: Shape of the unsharded parameter.
        padded_numel: Elements of every rank's shard, with padding.
        flat_range: This rank's flat range of the row-major parameter.
        modules: Modules that hold the parameter; several if it is tied.
    """

    def __init__(self, names: tuple[str, ...], original: nn.Parameter, fsdp_param: FSDPParam, rank: int) -> None:
        self.names, self.name = names, names[0]
        self.original, self._user_class = original, type(original)
        self.fsdp_param = fsdp_param
        self.rank = rank
        self.parameter: nn.Parameter = fsdp_param.sharded_param
        self.reduce_dtype: torch.dtype
        self.gather_whole: Callable[[], torch.Tensor]
        self.unsharded_param: nn.Parameter | None = None
        self.is_used = False
        self.reduced_grad: torch.Tensor | None = None
        self._requires_grad = self.is_reduced = self.parameter.requires_grad
        self._data_ptr = self.padded_shard.data_ptr()
        # An assignment to `.data` gives a tensor another storage. That of a DTensor is empty, and not its shard's.
        self._storages = [(self.parameter, self.parameter.untyped_storage())]
        self.shape = tuple(self.parameter.shape)
        self.padded_numel = fsdp_param.padded_sharded_param_size.numel()
        numel = math.prod(self.shape)
        start = min(numel, rank * self.padded_numel)
        self.flat_range = (start, min(numel, start + self.padded_numel))
        _share_attributes(self.original, self.parameter)
        self.parameter.__class__ = ShardedWeight  # type: ignore[assignment]
        _param_of[id(self.parameter)] = self
        info = fsdp_param._module_info
        self.modules: list[nn.Module] = [info.module, *info.shared_modules]
        names_in_modules = [info.param_name, *info.shared_param_names]
        self._places = [(module._parameters, name) for module, name in zip(self.modules, names_in_modules, strict=True)]
        self._is_plain = all(type(module).__setattr__ is nn.Module.__setattr__ for module in self.modules)
        self.fsdp_param._setattr_on_modules = self.set_on_modules  # type: ignore[assignment, method-assign]

    def set_on_modules(self, parameter: nn.Parameter) -> None:
        """Show a tensor of this parameter in the model; replacement of `FSDPParam._setattr_on_modules`."""
        if parameter.__dict__ is not self.original.__dict__:  # the first time
            _share_attributes(self.original, parameter)
            if type(parameter) is nn.Parameter:
                parameter.__class__ = self._user_class  # type: ignore[assignment]
            if parameter is getattr(self.fsdp_param, "_unsharded_param", None):
                self.unsharded_param = parameter
                self._storages.append((parameter, parameter.untyped_storage()))
        with torch._C.DisableTorchFunctionSubclass():
            if parameter.requires_grad is not self.sync_requires_grad():
                parameter.requires_grad_(self._requires_grad)
        if not self._is_plain:
            FSDPParam._setattr_on_modules(self.fsdp_param, parameter)
            return
        for parameters, name in self._places:  # FSDP2's takes ten calls, four times a step for each parameter
            parameters[name] = parameter

    @property
    def shown(self) -> nn.Parameter:
        """The tensor that the model shows now."""
        parameters, name = self._places[0]
        return cast(nn.Parameter, parameters[name])

    @property
    def padded_shard(self) -> torch.Tensor:
        """This rank's shard with padding, flat, in the memory that FSDP2 gathers from."""
        return self.fsdp_param._sharded_param_data

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard without padding, flat, in the memory that FSDP2 gathers from."""
        start, stop = self.flat_range
        return self.padded_shard[: stop - start]

    def replacement(self) -> Literal["memory", "parameter"] | None:
        """Return what was replaced since boost(): the memory of the shard, or the parameter, as by tying weights."""
        if self.padded_shard.data_ptr() != self._data_ptr:
            return "memory"
        for tensor, storage in self._storages:
            if tensor.untyped_storage() is not storage:
                return "memory"
        return "parameter" if self.is_replaced() else None

    def is_replaced(self) -> bool:
        """Return whether a module has another tensor in place of this parameter."""
        for parameters, name in self._places:
            shown = parameters.get(name)
            if shown is self.parameter:
                continue
            attributes = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
            if shown is None or all(shown is not getattr(self.fsdp_param, one, None) for one in attributes):
                return True
        return False

    def sharded(self, full_tensor: torch.Tensor) -> DTensor:
        """Return a DTensor of this rank's rows of a tensor in the shape of the parameter."""
        start, stop = self.flat_range
        rows = full_tensor.detach().reshape(-1)[start:stop].to(self.shard.device)
        return self.fsdp_param.to_sharded_dtensor(rows.view(self.fsdp_param.sharded_size))

    def sync_requires_grad(self) -> bool:
        """Apply the last change of requires_grad on any of the tensors to all of them, and return it."""
        before, (parameters, name) = self._requires_grad, self._places[0]
        try:
            shown = parameters[name]
        except KeyError:
            shown = None
        if shown is None:
            raise replaced_parameter_error(self.name)
        # Not `self.shown` and a loop, nor `__torch_function__`: this runs several times a step for each parameter.
        # The unsharded one is not shown between forwards, and autograd drops the gradients of one that is frozen.
        leaf = shown if self.unsharded_param is None else self.unsharded_param
        with torch._C.DisableTorchFunctionSubclass():
            if self.original.requires_grad is self.parameter.requires_grad is shown.requires_grad is before:
                if leaf.requires_grad is not before:
                    leaf.requires_grad_(before)
                return before
        self._requires_grad = not before
        self.is_reduced = self.is_reduced or not before
        for one in (self.original, self.parameter, shown, leaf):
            one.requires_grad_(not before)
        return self._requires_grad

    # Gradients. `unsharded_accumulated_grad` is that of earlier backwards in the dtype of the reduction.

    @property
    def has_unreduced_grad(self) -> bool:
        """Whether this rank has an unreduced gradient."""
        if self.fsdp_param.unsharded_accumulated_grad is not None:
            return True
        unsharded_param = self.unsharded_param
        return unsharded_param is not None and unsharded_param.grad is not None

    def unreduced_grad(self) -> torch.Tensor | None:
        """Return this rank's unreduced, unsharded gradient, still scaled."""
        gradient = self.fsdp_param.unsharded_accumulated_grad = self.take_unreduced_grad()
        return gradient

    def take_unreduced_grad(self) -> torch.Tensor | None:
        """Remove and return this rank's unreduced gradient."""
        fsdp_param, unsharded_param, fresh = self.fsdp_param, self.unsharded_param, None
        accumulated, fsdp_param.unsharded_accumulated_grad = fsdp_param.unsharded_accumulated_grad, None
        if unsharded_param is not None:
            fresh, unsharded_param.grad = unsharded_param.grad, None
        if accumulated is None or fresh is None:
            return fresh if accumulated is None else accumulated
        return accumulated.add_(fresh.detach())

    def set_accumulated_grad(self, gradient: torch.Tensor) -> None:
        """Set the unreduced gradient to one of earlier backwards."""
        self.take_unreduced_grad()
        self.fsdp_param.unsharded_accumulated_grad = gradient


class FSDP2ParamGroup:
    """FSDP2's parameter group of a module, with the state of the module.

    Args:
        module: Module that `fully_shard` was applied to.
        group: FSDP2's parameter group.

    Attributes:
        fsdp_params: FSDP2's parameters.
        device: Device that the weights are gathered on.
        process_group: Ranks that the parameters are sharded over.
        mp_policy: Mixed precision.
        is_offloaded: Whether the shards are in host memory while the model runs on an accelerator.
        is_pinned: Whether that memory is pinned.
    """

    def __init__(self, module: FSDPModule, group: FSDPParamGroup) -> None:
        assert isinstance(group.mesh_info, FSDPMeshInfo)
        self._module = cast(nn.Module, module)
        self._state = module._get_fsdp_state()
        self._group = group
        self.fsdp_params = tuple(group.fsdp_params)
        self.device = group.device
        self.process_group = group.mesh_info.shard_process_group
        self.mp_policy = group.mp_policy
        group.unshard_async_op = self.device.type == "cpu"  # gloo has no streams: an immediate wait prevents overlap
        self.is_offloaded = any(fsdp_param.offload_to_cpu for fsdp_param in self.fsdp_params)
        self.is_pinned = any(fsdp_param.pin_memory for fsdp_param in self.fsdp_params)

    @property
    def is_idle(self) -> bool:
        """Whether neither a forward nor a backward of the module runs."""
        states = (self._state._training_state, self._group._training_state)
        return states == (TrainingState.IDLE, TrainingState.IDLE)

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward of the module runs."""
        return self._group._training_state in (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)

    @property
    def reshards_to_fewer_ranks(self) -> bool:
        """Whether `reshard_after_forward` is a number of ranks."""
        return self._group._use_post_forward_mesh

    def replace_backward(
        self,
        post_backward: Callable[..., None],
        register: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]],
        observer: Callable[[], None],
    ) -> None:
        """Replace the group's post-backward, and how it is registered on a forward's inputs; observe its pre-backward.

        FSDP2 has no hook around its post-backward, where a group's gradients are taken, so that it reduces none. And it
        registers it by an autograd function whose outputs can't be modified in place (see `InputGradHook`).
        """
        group = self._group
        pre_backward, finalize_backward = group.pre_backward, group.finalize_backward

        def observed(*args: Any) -> None:
            observer()
            pre_backward(*args)

        def finalize() -> None:
            # FSDP2 gathers ahead, and drops what this rank's backward has not needed. It waits for the gather on the
            # current stream only, so that a later gather could reuse the buffer while this one still writes.
            result = self._group._all_gather_result
            if result is not None and result.all_gather_event is not None and self.device.type != "cpu":
                self._group.comm_ctx.all_gather_copy_in_stream.wait_event(result.all_gather_event)
            finalize_backward()

        group.post_backward = post_backward  # type: ignore[method-assign]
        group._register_post_backward_hook = register  # type: ignore[assignment, method-assign]
        group.pre_backward = observed  # type: ignore[assignment, method-assign]
        group.finalize_backward = finalize  # type: ignore[method-assign]

    def post_backward(self) -> None:
        """Run FSDP2's own post-backward."""
        FSDPParamGroup.post_backward(self._group)

    # `register_fsdp_forward_method` needs the names of the methods that call submodules, which only the user has.

    def pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Run FSDP2's hook before the module's forward."""
        hooked: tuple[Any, Any] = self._state._pre_forward(self._module, args, kwargs)
        return hooked

    def post_forward(self, args: Any, output: Any) -> Any:
        """Run FSDP2's hook after the module's forward."""
        return self._state._post_forward(self._module, args, output)

    def reshard(self) -> None:
        """Free unsharded weights; `FSDPModule.reshard` keeps those of the root where its forward has raised."""
        self._group._to_sharded()

    def order_streams(self) -> None:
        """Let FSDP2's streams wait for the current one, which may read their memory that is about to be freed."""
        context = self._group.comm_ctx
        for name in ("all_gather_copy_in_stream", "all_gather_stream"):
            if self.device.type != "cpu" and hasattr(context, name):  # set by the first forward
                getattr(context, name).wait_stream(torch.accelerator.current_stream())


def initialize_root(module: FSDPModule) -> None:
    """Make a module FSDP2's root; otherwise the first module that runs would become it."""
    module._get_fsdp_state()._lazy_init()


def fsdp2_param_groups(module: FSDPModule) -> list[FSDP2ParamGroup]:
    """Return FSDP2's parameter groups of a module; empty if the module has no parameters of its own."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 there was one at most
        group = state._fsdp_param_group
        groups = [] if group is None else [group]
    return [FSDP2ParamGroup(module, group) for group in groups]


DEEPCOPY = "__deepcopy__"  # in the instance's attributes, which `copy` looks up before FSDP2's, which always raises
# By the last one transformers synchronizes the length of `generate` over ranks.
_ATTRIBUTES = (STATE_KEY, REGISTRY_KEY, DEEPCOPY, "_is_fsdp_managed_module")
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the user's class of a module that `fully_shard` was applied to."""
    return type(module).__mro__[2]


def keep_class_name(module: nn.Module) -> None:
    """Give the class that `fully_shard` has made of a module's class that one's name, which transformers looks up."""
    made, original = type(module), original_class(module)
    made.__name__, made.__qualname__, made.__module__ = original.__name__, original.__qualname__, original.__module__


@contextmanager
def detached_from_fsdp(model: nn.Module) -> Iterator[None]:
    """Remove temporarily what `fully_shard` and this package have added to the modules of a model.

    Args:
        model: Model whose weights are not gathered.
    """
    undo: list[Callable[[], None]] = []
    try:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                undo.append(partial(setattr, module, "__class__", type(module)))
                module.__class__ = cast(Any, original_class(module))
            attributes = vars(module)
            removed = {key: attributes.pop(key) for key in _ATTRIBUTES if key in attributes}
            undo.append(partial(attributes.update, removed))
            for name in _HOOKS:
                hooks: dict[int, Any] = getattr(module, name)
                own = {key for key, hook in hooks.items() if _is_own_hook(hook)}
                if own:
                    undo.append(partial(_restore_hooks, hooks, dict(hooks), own))
                for key in own:
                    del hooks[key]
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _restore_hooks(hooks: dict[int, Any], before: Mapping[int, Any], own: Collection[int]) -> None:
    """Put the `own` hooks back in their places; the user may have added and removed others."""
    restored = {key: hook for key, hook in before.items() if key in own or key in hooks} | hooks
    hooks.clear()
    hooks.update(restored)


def _is_own_hook(hook: Any) -> bool:
    """Whether a module's hook is FSDP2's or of this package, and not the user's."""
    function = getattr(hook, "hook", hook)  # torch wraps some hooks
    defined_in = getattr(function, "__module__", None) or ""
    return defined_in.startswith(("torch.distributed.fsdp", __package__))
