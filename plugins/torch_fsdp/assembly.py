"""Applies `fully_shard` to one module of a model after the other, so that at most one is unsharded at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from booster.comm import check_same_across_ranks, group_size
from booster.errors import ConfigError
from booster.plugins.sharding.buffer_pool import BufferPool
from booster.plugins.sharding.materializing import Materializer
from booster.plugins.torch_fsdp.coordination import CollectiveOrder
from booster.plugins.torch_fsdp.formats import PrecisionDtypes
from booster.plugins.torch_fsdp.model import FSDPModel
from booster.plugins.torch_fsdp.outputs import ViewSafeOutputs
from booster.plugins.torch_fsdp.own_format import DtypeBoundary, modules_with_forward
from booster.plugins.torch_fsdp.piece_exchange import RowSharded, assign_owners
from booster.plugins.torch_fsdp.settings import Strategy, check_reshard_after_forward
from booster.plugins.torch_fsdp.units import build_param_groups
from booster.plugins.torch_fsdp.whole_parameters import ReplicatedParam, ReplicatedParams
from booster.plugins.torch_fsdp.wrapping import WrapPlan, plan_wrapping

__all__ = ["FSDPModelBuilder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPModelBuilder:
    """Builds boosted models.

    Attributes:
        mesh: Device mesh with the axes "replica" and "shard".
        strategy: Sharding and replication of weights.
        formats: Dtypes of FSDP's mixed precision, or None.
        offload_policy: FSDP2's offload policy.
        auto_wrap_policy: Policy that selects the modules to wrap; optional, defaults to repeated blocks.
        ignored_modules: Modules whose parameters are replicated.
        coordination_group: CPU group of the shard axis.
        is_primary: If True, this rank writes data that all ranks hold.
        broadcasts_buffers: If True, buffers are broadcast from rank 0 before each forward in training.
    """

    mesh: DeviceMesh
    strategy: Strategy
    precision_dtypes: PrecisionDtypes | None
    offload_policy: OffloadPolicy
    auto_wrap_policy: Any
    ignored_modules: Sequence[nn.Module]
    order_group: dist.ProcessGroup | None
    is_primary: bool
    broadcasts_buffers: bool

    def check(self, model: nn.Module) -> None:
        """Check that the model can be sharded, without communication or changes.

        Raises:
            ConfigError: The model can't be sharded.
        """
        _check_model(model, self.ignored_modules)
        self._plans(model, self._replicated_names(model))

    def build(self, model: nn.Module, materializer: Materializer, device: torch.device) -> FSDPModel:
        """Return the boosted model. Collective.

        Args:
            model: The user's model.
            materializer: Initializes modules that are on the meta device.
            device: Compute device of this rank.
        """
        before = dict(model.named_parameters(remove_duplicate=False))
        self._add_dtype_boundaries(model)
        replicated = self._replicated_names(model)
        plans = self._plans(model, replicated)
        fingerprint = [f"{plan.name!r}, reshard_after_forward={plan.reshard_after_forward!r}" for plan, _ in plans]
        check_same_across_ranks("what auto_wrap_policy makes units of", fingerprint)
        for plan, modules in plans:
            materializer.fill(modules)
            self._shard(model, plan, _named(model, replicated))
        after = dict(model.named_parameters(remove_duplicate=False))
        originals = {id(after[name]): before[name] for name in before}
        self._cast_buffers(model)
        return self._wrap_model(model, _named(model, replicated), originals, device)

    def _add_dtype_boundaries(self, model: nn.Module) -> None:
        model_dtype = None if self.precision_dtypes is None else self.precision_dtypes.param_dtype
        if self.precision_dtypes is None or model_dtype is None:
            return
        ignored = [one for module in self.ignored_modules for one in modules_with_forward(module)]
        inside = {part for module in ignored for part in module.modules()}
        kept = [
            one
            for one in model.modules()
            if isinstance(one, self.precision_dtypes.own_dtype_classes) and one not in inside
        ]
        for module in dict.fromkeys([*ignored, *kept]):
            DtypeBoundary(module, model_dtype)

    def _plans(self, model: nn.Module, replicated: set[str]) -> list[tuple[WrapPlan, list[nn.Module]]]:
        """Return the wrapped modules, root last, with the submodules that they own; extends `replicated` in place."""
        keeps = () if self.precision_dtypes is None else self.precision_dtypes.own_dtype_classes
        plans = plan_wrapping(
            model, self.auto_wrap_policy, replicated=_named(model, replicated), own_dtype_classes=keeps
        )
        taken: set[nn.Module] = set()
        found: list[tuple[WrapPlan, list[nn.Module]]] = []
        for plan in [*plans, WrapPlan(name="", module=model)]:
            check_reshard_after_forward(plan.reshard_after_forward, self.strategy.shard_size)
            modules = [one for one in plan.module.modules() if one not in taken]
            taken.update(modules)
            replicated |= _minority_dtype_names(model, modules, _named(model, replicated))
            found.append((plan, modules))
        return found

    def _replicated_names(self, model: nn.Module) -> set[str]:
        """Return the first names of parameters that FSDP2 can't shard, or that are ignored."""
        scripted = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
        ignored = {one for module in [*self.ignored_modules, *scripted] for one in module.parameters()}
        return {
            name
            for name, parameter in model.named_parameters()
            if parameter in ignored or parameter.dim() == 0 or parameter.numel() == 0
        }

    def _shard(self, model: nn.Module, plan: WrapPlan, replicated: Collection[nn.Parameter]) -> None:
        own = {parameter for parameter in plan.module.parameters() if not isinstance(parameter, DTensor)} - set(
            replicated
        )
        for parameter in own:
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        if not own and plan.module is not model:
            return
        reshards = plan.reshard_after_forward
        reshards = self.strategy.reshard_after_forward if reshards is None else reshards
        ViewSafeOutputs(
            plan.module, clones_views=reshards is not False and (plan.module is not model or bool(reshards))
        )
        fully_shard(
            plan.module,
            mesh=self.mesh["shard"],
            reshard_after_forward=reshards,
            mp_policy=self._policy(plan, model),
            offload_policy=self.offload_policy,
            ignored_params=set(replicated),
        )
        for parameter in own:  # the optimizer still refers to them
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def _policy(self, plan: WrapPlan, model: nn.Module) -> MixedPrecisionPolicy:
        if self.precision_dtypes is None or isinstance(plan.module, self.precision_dtypes.own_dtype_classes):
            return MixedPrecisionPolicy()
        return self.precision_dtypes.fsdp2_policy(is_root=plan.module is model)

    @torch.no_grad()
    def _cast_buffers(self, model: nn.Module) -> None:
        dtype = None if self.precision_dtypes is None else self.precision_dtypes.buffer_dtype
        for module in model.modules():
            keeps = self.precision_dtypes is not None and isinstance(module, self.precision_dtypes.own_dtype_classes)
            for buffer in () if dtype is None or keeps else module.buffers(recurse=False):
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(dtype)

    def _wrap_model(
        self,
        model: nn.Module,
        replicated: Collection[nn.Parameter],
        originals: dict[int, nn.Parameter],
        device: torch.device,
    ) -> FSDPModel:
        names = _names_by_parameter(model)
        shard_group = self.mesh.get_group("shard")
        if isinstance(model, FSDPModule):
            model._get_fsdp_state()._lazy_init()  # otherwise the first module that runs would become FSDP2's root
        collective_order = CollectiveOrder(self.order_group)
        modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        param_groups = list(build_param_groups(modules, names, originals, collective_order, BufferPool(device)))
        sharded = [RowSharded(name=names[id(one)][0], shape=tuple(one.shape), dtype=one.dtype) for one in replicated]
        owners = assign_owners(sharded, group_size(shard_group))
        params = [
            ReplicatedParam(name=names[id(one)][0], names=names[id(one)], parameter=one, owner=owner)
            for one, owner in zip(replicated, owners, strict=True)
        ]
        return FSDPModel(
            model,
            param_groups,
            ReplicatedParams(params, None, shard_group),
            collective_order,
            is_primary=self.is_primary,
            writes_shards=self.mesh.get_local_rank("replica") == 0,
            broadcasts_buffers=self.broadcasts_buffers,
        )


def _check_model(model: nn.Module, ignored_modules: Sequence[nn.Module]) -> None:
    if isinstance(model, (nn.ModuleDict, nn.ModuleList)) and type(model).forward is nn.Module.forward:
        raise ConfigError(
            f"the model is a {type(model).__name__}, which has no forward, but FSDP gathers weights in forward: write"
            " a module around it with forward(self, part, *args) that returns self.parts[part](*args), or boost each"
            " child with a separate optimizer"
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


def _names_by_parameter(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return all names of each parameter by its `id`, in model order."""
    found: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[id(parameter)] = (*found.get(id(parameter), ()), name)
    return found


def _named(model: nn.Module, names: Collection[str]) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name in names] if names else []


def _minority_dtype_names(
    model: nn.Module, modules: Sequence[nn.Module], replicated: Collection[nn.Parameter]
) -> set[str]:
    """Return the first names of a group's parameters whose dtype is not that of most of its elements."""
    kept = set(replicated)
    own = {one for module in modules for one in module.parameters(recurse=False)} - kept
    numels: Counter[torch.dtype] = Counter()
    for one in own:
        numels[one.dtype] += one.numel()
    most = max(numels, key=lambda dtype: (numels[dtype], str(dtype)), default=None)
    others = {one for one in own if one.dtype != most}
    return {name for name, one in model.named_parameters() if one in others} if others else set()
