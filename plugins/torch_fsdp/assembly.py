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

from booster.comm import agree, group_size
from booster.errors import ConfigError
from booster.plugins.sharding.buffer_pool import BufferPool
from booster.plugins.sharding.materializing import Materializer
from booster.plugins.torch_fsdp.coordination import Coordinator
from booster.plugins.torch_fsdp.formats import UnitFormats
from booster.plugins.torch_fsdp.model import FSDPModel
from booster.plugins.torch_fsdp.outputs import SafeOutputs
from booster.plugins.torch_fsdp.own_format import OwnFormat, modules_with_forward
from booster.plugins.torch_fsdp.piece_exchange import Divided, choose_owners
from booster.plugins.torch_fsdp.settings import Strategy, check_reshard_after_forward
from booster.plugins.torch_fsdp.units import units_of
from booster.plugins.torch_fsdp.whole_parameters import WholeMember, WholeParameters
from booster.plugins.torch_fsdp.wrapping import UnitPlan, plan_units

__all__ = ["Assembly"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
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
    formats: UnitFormats | None
    offload_policy: OffloadPolicy
    auto_wrap_policy: Any
    ignored_modules: Sequence[nn.Module]
    coordination_group: dist.ProcessGroup | None
    is_primary: bool
    broadcasts_buffers: bool

    def check(self, model: nn.Module) -> None:
        """Check that the model can be sharded, without communication or changes.

        Raises:
            ConfigError: The model can't be sharded.
        """
        _check_model(model, self.ignored_modules)
        self._plans(model, self._whole_names(model))

    def assemble(self, model: nn.Module, materializer: Materializer, device: torch.device) -> FSDPModel:
        """Return the boosted model. Collective.

        Args:
            model: The user's model.
            materializer: Initializes modules that are on the meta device.
            device: Compute device of this rank.
        """
        before = dict(model.named_parameters(remove_duplicate=False))
        self._keep_own_formats(model)
        whole = self._whole_names(model)
        plans = self._plans(model, whole)
        facts = [f"{plan.name!r}, reshard_after_forward={plan.reshard_after_forward!r}" for plan, _ in plans]
        agree("what auto_wrap_policy makes units of", facts)
        for plan, modules in plans:
            materializer.fill(modules)
            self._shard(model, plan, _named(model, whole))
        after = dict(model.named_parameters(remove_duplicate=False))
        originals = {id(after[name]): before[name] for name in before}
        self._cast_buffers(model)
        return self._boosted(model, _named(model, whole), originals, device)

    def _keep_own_formats(self, model: nn.Module) -> None:
        outside = None if self.formats is None else self.formats.param_dtype
        if self.formats is None or outside is None:
            return
        ignored = [one for module in self.ignored_modules for one in modules_with_forward(module)]
        inside = {part for module in ignored for part in module.modules()}
        kept = [one for one in model.modules() if isinstance(one, self.formats.keeps_own_format) and one not in inside]
        for module in dict.fromkeys([*ignored, *kept]):
            OwnFormat(module, outside)

    def _plans(self, model: nn.Module, whole: set[str]) -> list[tuple[UnitPlan, list[nn.Module]]]:
        """Return the wrapped modules, root last, with the submodules that they own; extends `whole` in place."""
        keeps = () if self.formats is None else self.formats.keeps_own_format
        plans = plan_units(model, self.auto_wrap_policy, whole=_named(model, whole), keeps_own_format=keeps)
        taken: set[nn.Module] = set()
        found: list[tuple[UnitPlan, list[nn.Module]]] = []
        for plan in [*plans, UnitPlan(name="", module=model)]:
            check_reshard_after_forward(plan.reshard_after_forward, self.strategy.shard_size)
            modules = [one for one in plan.module.modules() if one not in taken]
            taken.update(modules)
            whole |= _minority(model, modules, _named(model, whole))
            found.append((plan, modules))
        return found

    def _whole_names(self, model: nn.Module) -> set[str]:
        """Return the first names of parameters that FSDP2 can't shard, or that are ignored."""
        scripted = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
        ignored = {one for module in [*self.ignored_modules, *scripted] for one in module.parameters()}
        return {
            name
            for name, parameter in model.named_parameters()
            if parameter in ignored or parameter.dim() == 0 or parameter.numel() == 0
        }

    def _shard(self, model: nn.Module, plan: UnitPlan, whole: Collection[nn.Parameter]) -> None:
        own = {parameter for parameter in plan.module.parameters() if not isinstance(parameter, DTensor)} - set(whole)
        for parameter in own:
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        if not own and plan.module is not model:
            return
        reshards = plan.reshard_after_forward
        reshards = self.strategy.reshard_after_forward if reshards is None else reshards
        SafeOutputs(plan.module, copies_views=reshards is not False and (plan.module is not model or bool(reshards)))
        fully_shard(
            plan.module,
            mesh=self.mesh["shard"],
            reshard_after_forward=reshards,
            mp_policy=self._policy(plan, model),
            offload_policy=self.offload_policy,
            ignored_params=set(whole),
        )
        for parameter in own:  # the optimizer still refers to them
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def _policy(self, plan: UnitPlan, model: nn.Module) -> MixedPrecisionPolicy:
        if self.formats is None or isinstance(plan.module, self.formats.keeps_own_format):
            return MixedPrecisionPolicy()
        return self.formats.policy(is_root=plan.module is model)

    @torch.no_grad()
    def _cast_buffers(self, model: nn.Module) -> None:
        dtype = None if self.formats is None else self.formats.buffer_dtype
        for module in model.modules():
            keeps = self.formats is not None and isinstance(module, self.formats.keeps_own_format)
            for buffer in () if dtype is None or keeps else module.buffers(recurse=False):
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(dtype)

    def _boosted(
        self,
        model: nn.Module,
        whole: Collection[nn.Parameter],
        originals: dict[int, nn.Parameter],
        device: torch.device,
    ) -> FSDPModel:
        names = _names_by_parameter(model)
        shard_group = self.mesh.get_group("shard")
        if isinstance(model, FSDPModule):
            model._get_fsdp_state()._lazy_init()  # otherwise the first module that runs would become FSDP2's root
        coordinator = Coordinator(self.coordination_group)
        modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        units = list(units_of(modules, names, originals, coordinator, BufferPool(device)))
        divided = [Divided(name=names[id(one)][0], shape=tuple(one.shape), dtype=one.dtype) for one in whole]
        owners = choose_owners(divided, group_size(shard_group))
        members = [
            WholeMember(name=names[id(one)][0], names=names[id(one)], parameter=one, owner=owner)
            for one, owner in zip(whole, owners, strict=True)
        ]
        return FSDPModel(
            model,
            units,
            WholeParameters(members, None, shard_group),
            coordinator,
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


def _minority(model: nn.Module, modules: Sequence[nn.Module], whole: Collection[nn.Parameter]) -> set[str]:
    """Return the first names of a group's parameters whose dtype is not that of most of its elements."""
    kept = set(whole)
    own = {one for module in modules for one in module.parameters(recurse=False)} - kept
    numels: Counter[torch.dtype] = Counter()
    for one in own:
        numels[one.dtype] += one.numel()
    most = max(numels, key=lambda dtype: (numels[dtype], str(dtype)), default=None)
    others = {one for one in own if one.dtype != most}
    return {name for name, one in model.named_parameters() if one in others} if others else set()
