"""Auto-wrapping: selection of the modules that become FSDP2 parameter groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import _Policy
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import ParametrizationList

from booster.comm import check_same_across_ranks, group_rank, group_size, is_fake_world
from booster.core.compiling import LAYER_OF_COMPILED
from booster.core.param_redistribution import assign_owners
from booster.errors import ConfigError
from booster.lazy_init.materialize import METADATA_FUNCTIONS
from booster.mixed_precision.fp16 import cast_floats
from booster.plugins.sharding.buffer_pool import BufferPool
from booster.plugins.sharding.collective_order import CollectiveOrder
from booster.plugins.sharding.deferred_init import Materializer

from .config import FSDPConfig, check_reshard_after_forward
from .fsdp2_internals import ShardedParam, fsdp2_param_groups, initialize_root, keep_class_name
from .model import FSDPModel
from .param_group import ParamGroup, ViewSafeOutputs
from .shard_update import ReplicatedParam, ReplicatedParams

# A model of fewer bytes is a single parameter group where no policy is given: the calls of each group cost a step 2 ms
# on the CPU, in which a host moves more than this.
SINGLE_GROUP_BYTES = 8 * 2**20

# Modules that a policy selects, with reshard_after_forward of each.
_Selection: TypeAlias = dict[nn.Module, bool | int | None]


@dataclass(frozen=True, slots=True, eq=False)
class WrapPlan:
    """One module that becomes a parameter group.

    Attributes:
        name: First name of the module in the model.
        module: Module whose parameters form the group, except those of wrapped submodules.
        reshard_after_forward: Value of a `CustomPolicy`; optional, defaults to that of the strategy.
    """

    name: str
    module: nn.Module
    reshard_after_forward: bool | int | None = None


def plan_wrapping(
    model: nn.Module,
    policy: Callable[..., bool] | _Policy | None,
    *,
    replicated: Collection[nn.Parameter],
    own_dtype_classes: tuple[type[nn.Module], ...] = (),
) -> list[WrapPlan]:
    """Return the modules below the root that become parameter groups, inner ones first.

    Modules that a policy selects and FSDP2 can't wrap join the enclosing group: those without a forward, and those
    whose parameters are reached without calling them, such as tied ones.

    Args:
        model: Root module.
        policy: Policy of `torch.distributed.fsdp.wrap`, or a function with its signature; optional, defaults to the
            blocks that transformers names, else the repeated ones, and to embeddings that do not train; to none in a
            model of fewer than `SINGLE_GROUP_BYTES`.
        replicated: Replicated parameters, which belong to no group.
        own_dtype_classes: Classes of modules that are always wrapped, as they compute in the dtype of their weights.

    Raises:
        ConfigError: The policy selects a module that is never called, or gives one an option that FSDP2 does not have
            per group; or a module of `own_dtype_classes` can't be wrapped.
    """
    tree = _ModuleGraph(model, replicated)
    if policy is None:
        if sum(one.nbytes for one in tree.parameters(model).values()) < SINGLE_GROUP_BYTES:
            return _wrap_plans(tree, {}, own_dtype_classes, is_automatic=True)
        blocks = _transformers_blocks(model)
        named = _wrap_plans(tree, blocks, own_dtype_classes, is_automatic=True)
        if all(isinstance(plan.module, own_dtype_classes) for plan in named):
            blocks = _repeated_blocks(tree)
        return _wrap_plans(tree, _frozen_embeddings(tree, blocks) | blocks, own_dtype_classes, is_automatic=True)
    if isinstance(policy, _Policy):
        chosen = _select_by_policy(tree, policy)
    else:
        chosen = _select_by_function(tree, policy, own_dtype_classes)
    return _wrap_plans(tree, chosen, own_dtype_classes, is_automatic=False)


class _ModuleGraph:
    """The modules below a root, and their parameters by all of their names.

    Args:
        root: Root module. Other modules may have several parents.
        replicated: Parameters to leave out.
    """

    def __init__(self, root: nn.Module, replicated: Collection[nn.Parameter]) -> None:
        self.root = root
        self.names = {module: name for name, module in root.named_modules()}
        self.post_order = list(_post_order(root, set()))
        self._left_out = {id(parameter) for parameter in replicated}
        self._paths: dict[int, list[str]] = {}
        for path, one in (*root.named_modules(remove_duplicate=False), *root.named_parameters(remove_duplicate=False)):
            self._paths.setdefault(id(one), []).append(path)
        self.ignored = {
            module for module in self.names if any(True for _ in module.parameters()) and not self.parameters(module)
        }

    def parameters(self, module: nn.Module) -> dict[int, nn.Parameter]:
        """Return the parameters of a module and its submodules, by id."""
        return {id(one): one for one in module.parameters() if id(one) not in self._left_out}

    def is_sole_access_to(self, parameters: Collection[int], module: nn.Module) -> bool:
        """Return whether all names of the parameters are below those of `module`."""
        prefixes = tuple(f"{path}." for path in self._paths[id(module)])
        return all(path.startswith(prefixes) for key in parameters for path in self._paths[key])


def _post_order(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _post_order(child, seen)
    yield module


def _wrap_plans(
    tree: _ModuleGraph,
    chosen: Mapping[nn.Module, bool | int | None],
    own_dtype_classes: tuple[type[nn.Module], ...],
    *,
    is_automatic: bool,
) -> list[WrapPlan]:
    plans: list[WrapPlan] = []
    taken: set[int] = set()
    for module in tree.post_order[:-1]:
        keeps_dtype = isinstance(module, own_dtype_classes)
        if module not in chosen and not keeps_dtype:
            continue
        own = tree.parameters(module).keys() - taken
        if not own:
            continue
        name = tree.names[module]
        computes_weight = isinstance(module, ParametrizationList) or ".parametrizations." in f".{name}."
        what_it_computes = "it computes another module's weight, which may be read outside of forward"
        obstacle = what_it_computes if computes_weight else _why_not_wrappable(tree, module, own)
        if obstacle is None:
            taken |= own
            plans.append(WrapPlan(name, module, chosen.get(module)))
        elif keeps_dtype:
            raise ConfigError(
                f"mixed_precision leaves {type(module).__name__}s in their own dtype, which takes a separate parameter"
                f" group, and {name!r} can't be one: {obstacle}. Leave its class out of _module_classes_to_ignore"
            )
        elif not is_automatic and computes_weight:
            raise ConfigError(
                f"auto_wrap_policy chooses {name!r}, a {type(module).__name__}: {obstacle}. Have the policy leave it"
                " out, as CustomPolicy(lambda module: ...) can: its weights then belong to the enclosing group"
            )
    return plans


def _why_not_wrappable(tree: _ModuleGraph, module: nn.Module, own: Collection[int]) -> str | None:
    """Return why these parameters must belong to the enclosing group, or None."""
    if not _has_forward(module):
        return "it has no forward, before which weights would be gathered"
    if not tree.is_sole_access_to(own, module):
        return "its weights are used from outside as well, by a module that is tied to it or shares a submodule with it"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weights without calling it"
    return None


def _has_forward(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):  # its class has none
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _transformers_blocks(model: nn.Module) -> _Selection:
    """Return the modules of transformers' `_no_split_modules` classes, which are the blocks of its models."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return {one: None for one in model.modules() if any(cls.__name__ in names for cls in type(one).__mro__)}


def _frozen_embeddings(tree: _ModuleGraph, blocks: _Selection) -> _Selection:
    """Return the embeddings outside of blocks that do not train, as under LoRA: backward needs no weights of theirs."""
    inside = {one for block in blocks for one in block.modules()}
    found = (one for one in tree.post_order if isinstance(one, nn.Embedding) and one not in inside)
    return {one: None for one in found if not any(weight.requires_grad for weight in one.parameters())}


def _repeated_blocks(tree: _ModuleGraph) -> _Selection:
    """Return the elements of the outermost lists of modules of one class; nested lists belong to their element."""
    blocks: _Selection = {}
    seen: set[nn.Module] = set()

    def descend(module: nn.Module) -> None:
        seen.add(module)
        blocks.update(dict.fromkeys(_repeated_elements(tree, module)))
        for child in module.children():
            if child not in blocks and child not in seen:
                descend(child)

    descend(tree.root)
    return blocks


def _repeated_elements(tree: _ModuleGraph, module: nn.Module) -> list[nn.Module]:
    """Return the elements of a container that are repeated blocks. A Sequential of single layers has none."""
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if not is_list and not isinstance(module, nn.Sequential):
        return []
    elements = [one for one in module.children() if _has_forward(one) and tree.parameters(one)]
    counts = Counter(type(one) for one in elements)
    if len(counts) > 1 and not is_list:
        return []
    # Single layers are blocks only in a list of nothing else, such as one of embedding tables.
    takes_layers = is_list and len(counts) == 1
    return [one for one in elements if counts[type(one)] > 1 and (takes_layers or any(True for _ in one.children()))]


def _select_by_policy(tree: _ModuleGraph, policy: _Policy) -> _Selection:
    try:
        kwargs_of = policy._run_policy(tree.root, tree.ignored, {})
    except ValueError as error:
        raise ConfigError(
            f"auto_wrap_policy={type(policy).__name__} returned an invalid value for a module: {error}"
        ) from error
    return {module: _reshard_of(kwargs, tree.names[module]) for module, kwargs in kwargs_of.items()}


def _reshard_of(kwargs: dict[str, Any], name: str) -> bool | int | None:
    unknown = sorted(map(str, kwargs.keys() - {"reshard_after_forward"}))
    if unknown:
        raise ConfigError(
            f"auto_wrap_policy gives {name!r} {', '.join(unknown)}=: all parameter groups share that option, which is"
            " an argument of the plugin. Return only reshard_after_forward= for a module, or True"
        )
    value: Any = kwargs.get("reshard_after_forward")
    if value is not None and not isinstance(value, int):
        raise ConfigError(
            f"auto_wrap_policy gives {name!r} reshard_after_forward={value!r}: give True, False, a number of ranks, or"
            " None"
        )
    return value


def _select_by_function(
    tree: _ModuleGraph, policy: Callable[..., bool], own_dtype_classes: tuple[type[nn.Module], ...]
) -> _Selection:
    """Return the modules that torch's `_recursive_wrap` would wrap, by the same calls of the policy in the same order.

    Modules of `own_dtype_classes` are always wrapped, and count as wrapped for enclosing modules. As in torch, the
    policy is also called for modules that it does not recurse into, but unlike there not for their children.
    """
    chosen: _Selection = {}

    def numel_wrapped(module: nn.Module, *, asks: bool) -> int:
        numel = sum(parameter.numel() for parameter in tree.parameters(module).values())
        goes_in = asks and bool(policy(module=module, recurse=True, nonwrapped_numel=numel))
        if not goes_in and not own_dtype_classes:
            return 0
        children = [child for child in module.children() if child not in tree.ignored]
        wrapped = sum(numel_wrapped(child, asks=goes_in) for child in children)
        if module is tree.root:
            return wrapped
        is_wrapped = asks and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped)
        if not is_wrapped and not isinstance(module, own_dtype_classes):
            return wrapped
        chosen[module] = None
        return numel

    numel_wrapped(tree.root, asks=True)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPModelBuilder:
    """Builds boosted models.

    Attributes:
        config: Options of the plugin.
        mesh: Device mesh with the axes "replica" and "shard".
        device: Compute device of this rank.
        order_group: CPU group of the shard axis.
    """

    config: FSDPConfig
    mesh: DeviceMesh
    device: torch.device
    order_group: dist.ProcessGroup | None

    def check(self, model: nn.Module) -> None:
        """Check that the model can be sharded, without communication or changes.

        Raises:
            ConfigError: The model can't be sharded.
        """
        _check_model(model, self.config.ignored_modules)
        self._plans(model)

    def build(self, model: nn.Module, materializer: Materializer) -> FSDPModel:
        """Return the boosted model. Collective.

        Args:
            model: The user's model.
            materializer: Initializes modules that are on the meta device.
        """
        originals = dict(model.named_parameters(remove_duplicate=False))
        self._add_dtype_boundaries(model)
        plans, replicated = self._plans(model)
        fingerprint = [f"{plan.name!r}, reshard_after_forward={plan.reshard_after_forward!r}" for plan, _ in plans]
        check_same_across_ranks("what auto_wrap_policy makes units of", fingerprint)
        for plan, modules in plans:
            materializer.fill(modules)
            self._shard(model, plan, _named(model, replicated))
        self._cast_buffers(model)
        return self._wrap_model(model, _named(model, replicated), originals)

    def _add_dtype_boundaries(self, model: nn.Module) -> None:
        dtypes = self.config.precision_dtypes
        if dtypes.param_dtype is None:
            return
        ignored = [one for module in self.config.ignored_modules for one in _modules_with_forward(module)]
        inside = {part for module in ignored for part in module.modules()}
        kept = [one for one in model.modules() if isinstance(one, dtypes.own_dtype_classes) and one not in inside]
        modules = dict.fromkeys([*ignored, *kept])
        own = {parameter for module in modules for parameter in module.parameters()}
        others = {one.dtype for one in model.parameters() if one.is_floating_point() and one not in own}
        for module in modules:
            _add_dtype_boundary(module, dtypes.param_dtype, is_permanent=others <= {dtypes.param_dtype})

    def _plans(self, model: nn.Module) -> tuple[list[tuple[WrapPlan, list[nn.Module]]], set[str]]:
        """Return the wrapped modules, root last, with the submodules that they own, and names of what is replicated.

        These are first names, which stay: `Materializer.fill` replaces parameters.
        """
        replicated = self._unshardable(model)
        plans = plan_wrapping(
            model,
            self.config.auto_wrap_policy,
            replicated=replicated,
            own_dtype_classes=self.config.precision_dtypes.own_dtype_classes,
        )
        taken: set[nn.Module] = set()
        found: list[tuple[WrapPlan, list[nn.Module]]] = []
        for plan in [*plans, WrapPlan(name="", module=model)]:
            check_reshard_after_forward(plan.reshard_after_forward, self.mesh.size(1))
            modules = [one for one in plan.module.modules() if one not in taken]
            taken.update(modules)
            replicated |= _of_minority_dtypes(modules, replicated)
            found.append((plan, modules))
        return found, {name for name, one in model.named_parameters() if one in replicated}

    def _unshardable(self, model: nn.Module) -> set[nn.Parameter]:
        """Return the parameters that FSDP2 can't shard, or that are ignored."""
        scripted = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
        ignored = {one for module in [*self.config.ignored_modules, *scripted] for one in module.parameters()}
        return {one for one in model.parameters() if one in ignored or one.dim() == 0 or one.numel() == 0}

    def _shard(self, model: nn.Module, plan: WrapPlan, replicated: Collection[nn.Parameter]) -> None:
        unsharded = [parameter for parameter in plan.module.parameters() if not isinstance(parameter, DTensor)]
        for parameter in unsharded:
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        own, is_root = set(unsharded) - set(replicated), plan.module is model
        if not own and not is_root:
            return
        dtypes = self.config.precision_dtypes
        keeps_dtype = isinstance(plan.module, dtypes.own_dtype_classes)
        reshards = plan.reshard_after_forward
        reshards = self.config.default_reshard if reshards is None else reshards
        ViewSafeOutputs(plan.module, clones_views=reshards is not False and (not is_root or bool(reshards)))
        fully_shard(
            plan.module,
            mesh=self.mesh["shard"],
            reshard_after_forward=reshards,
            mp_policy=MixedPrecisionPolicy() if keeps_dtype else dtypes.fsdp2_policy(is_root=is_root),
            offload_policy=self.config.offload_policy(self.device),
            ignored_params=set(replicated),
        )
        keep_class_name(plan.module)
        for parameter in own:  # the optimizer still refers to them
            parameter.data = torch.zeros(1, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)

    @torch.no_grad()
    def _cast_buffers(self, model: nn.Module) -> None:
        dtypes = self.config.precision_dtypes
        for module in model.modules() if dtypes.buffer_dtype is not None else ():
            if not isinstance(module, dtypes.own_dtype_classes):
                for buffer in module.buffers(recurse=False):
                    if buffer.is_floating_point():
                        buffer.data = buffer.data.to(dtypes.buffer_dtype)

    def _wrap_model(
        self, model: nn.Module, replicated: Sequence[nn.Parameter], originals: Mapping[str, nn.Parameter]
    ) -> FSDPModel:
        names: dict[int, tuple[str, ...]] = {}  # all names of each parameter, the first one first
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[id(parameter)] = (*names.get(id(parameter), ()), name)
        shard_group = self.mesh.get_group("shard")
        owners = assign_owners([one.nbytes for one in replicated], group_size(shard_group)) if replicated else []
        pairs = zip(replicated, owners, strict=True)
        replicated_params = [ReplicatedParam(names[id(one)][0], one, owner) for one, owner in pairs]
        if isinstance(model, FSDPModule):
            initialize_root(model)
        pool, compiled = BufferPool(self.device), vars(model).get(LAYER_OF_COMPILED, {})
        collective_order = CollectiveOrder(self.order_group, self.device)
        groups: list[ParamGroup] = []
        for name, module in model.named_modules():
            for fsdp2 in fsdp2_param_groups(module) if isinstance(module, FSDPModule) else ():
                rank = group_rank(fsdp2.process_group)
                members = [(names[id(one.sharded_param)], one) for one in fsdp2.fsdp_params]
                params = [ShardedParam(own, originals[own[0]], one, rank) for own, one in members]
                for one in params:
                    if type(one.original) is nn.Parameter:
                        one.original.__class__ = EmptiedParameter
                groups.append(ParamGroup(len(groups), name, module, fsdp2, params, collective_order, pool, compiled))
        return FSDPModel(
            model,
            groups,
            ReplicatedParams(replicated_params, shard_group),
            collective_order,
            device=self.device,
            is_primary=group_rank() == 0,
            writes_shards=self.mesh.get_local_rank("replica") == 0,
            broadcasts_buffers=self.config.broadcast_buffers and group_size() > 1,
        )


class EmptiedParameter(nn.Parameter):
    """Parameter from before boost(), which has its shape and no values: a penalty of it would be 0 without an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _READS_NO_VALUES:
            name = func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__
            raise ConfigError(
                f"{name!r} of a parameter from before boost(), whose values TorchFSDPPlugin has sharded over the ranks:"
                " take the parameter from model.parameters() after boost()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_READS_NO_VALUES = METADATA_FUNCTIONS | {
    *(torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__repr__, torch.Tensor.__format__)
}


def _add_dtype_boundary(module: nn.Module, model_dtype: torch.dtype, *, is_permanent: bool) -> None:
    """Cast a module's inputs to the dtype of its weights, and its outputs to the dtype of the model, by hooks.

    FSDP1 does so for `_module_classes_to_ignore`; FSDP2 leaves it to the user.

    Args:
        module: Module with weights, not sharded yet.
        model_dtype: Compute dtype of the rest of the model.
        is_permanent: Whether the rest of the model has weights of this dtype, so that forwards on full weights, inside
            of `gathered()` and of copies, need the hooks as well.
    """
    module_dtype = next((one.dtype for one in module.parameters() if one.is_floating_point()), model_dtype)
    if module_dtype == model_dtype:
        return

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_floats(module_dtype, args), cast_floats(module_dtype, kwargs)

    def cast_output(_: nn.Module, args: Any, output: Any) -> Any:
        return cast_floats(model_dtype, output)

    hooks: tuple[Callable[..., Any], Callable[..., Any]] = cast_inputs, cast_output
    if is_permanent:  # `detached_from_fsdp` removes functions of this package alone
        hooks = partial(cast_inputs), partial(cast_output)
    module.register_forward_pre_hook(hooks[0], with_kwargs=True)
    module.register_forward_hook(hooks[1])


def _modules_with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, or its children if it is a container without a forward."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child in module.children():
            yield from _modules_with_forward(child)
    else:
        yield module


def _check_model(model: nn.Module, ignored_modules: Sequence[nn.Module]) -> None:
    if isinstance(model, (nn.ModuleDict, nn.ModuleList)) and type(model).forward is nn.Module.forward:
        raise ConfigError(
            f"the model is a {type(model).__name__}, which has no forward, but FSDP gathers weights in forward: write"
            " a module around it with forward(self, part, *args) that returns self.parts[part](*args), or boost each"
            " child with a separate optimizer"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(
            f"the model is a {type(model).__name__}, and torch.jit does not take the hooks that gather weights: boost"
            " the model that was given to torch.jit, a module around it, in which its weights are replicated, or use"
            " LowLevelZeroPlugin"
        )
    if ignored_modules and is_fake_world():
        raise ConfigError(
            "ignored_modules are modules of the model that is passed to boost(), but an estimate uses a copy of it:"
            " leave ignored_modules out of this plugin; their parameters are then sharded like the rest"
        )
    own = set(model.modules())
    foreign = [module for module in ignored_modules if module not in own]
    if foreign:
        raise ConfigError(
            f"ignored_modules has a {type(foreign[0]).__name__} that is not a module of the model: give modules of the"
            " model that is passed to boost()"
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"{name!r} is a DTensor, so the model was sharded before boost(): pass boost() the unsharded model"
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ConfigError(
                f"{name!r} makes sparse gradients (sparse=True), which FSDP does not reduce: build it without"
                " sparse=True, or use TorchDDPPlugin"
            )


def _named(model: nn.Module, names: Collection[str]) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name in names] if names else []


def _of_minority_dtypes(modules: Sequence[nn.Module], replicated: set[nn.Parameter]) -> set[nn.Parameter]:
    """Return the parameters of a group whose dtype is not that of most of its elements."""
    own = {one for module in modules for one in module.parameters(recurse=False)} - replicated
    numels: Counter[torch.dtype] = Counter()
    for one in own:
        numels[one.dtype] += one.numel()
    most = max(numels, key=lambda dtype: (numels[dtype], str(dtype)), default=None)
    return {one for one in own if one.dtype != most}
