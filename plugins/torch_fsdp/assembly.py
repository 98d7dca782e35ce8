"""Applies `fully_shard` to a model, unit by unit, so that no rank holds more than one unit whole."""

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
    """Makes boosted models.

    Attributes:
        mesh: The ranks, with the axes "replica" and "shard".
        strategy: How weights are divided.
        formats: FSDP's own mixed precision; None: none.
        offload_policy: Where shards lie.
        auto_wrap_policy: Which modules become units; None: found.
        ignored_modules: Modules whose parameters stay whole.
        coordination_group: The ranks that share shards, on the CPU.
        is_primary: True on the rank that writes what all ranks hold alike.
        broadcasts_buffers: Give all ranks the first rank's buffers before each forward in training.
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
        """Raises if the model can't be made into units. No communication, and nothing is changed.

        Raises:
            ConfigError: It can't.
        """
        _check_model(model, self.ignored_modules)
        self._plans(model, self._whole_names(model))

    def assemble(self, model: nn.Module, materializer: Materializer, device: torch.device) -> FSDPModel:
        """Returns the boosted model. Collective.

        Args:
            model: The user's model.
            materializer: Gives modules without values theirs.
            device: What this rank computes on.
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
        """Returns the units with the modules whose parameters they hold, the root last; adds to what stays whole."""
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
        """Returns the first names of parameters that FSDP2 can't hold, or is told to leave alone."""
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
        for parameter in own:  # the optimizer still has them
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
            model._get_fsdp_state()._lazy_init()  # else the first unit that runs would take itself for the root
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
    """Returns if the model can be sharded.

    Raises:
        ConfigError: It can't.
    """
    if isinstance(model, (nn.ModuleDict, nn.ModuleList)) and type(model).forward is nn.Module.forward:
        raise ConfigError(
            f"the model is a {type(model).__name__}, which has no forward, and FSDP gathers weights when forward is"
            " called: make one module of its parts whose forward calls them, as forward(self, part, *args) with"
            " return self.parts[part](*args), or boost each part with an optimizer of its own"
        )
    own = set(model.modules())
    foreign = [module for module in ignored_modules if module not in own]
    if foreign:
        raise ConfigError(
            f"ignored_modules has a {type(foreign[0]).__name__} that is no part of the model: give modules of the model"
            " that goes into boost()"
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"{name!r} is a DTensor, so the model was divided among ranks before boost(): give boost() the model as"
                " it is built"
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ConfigError(
                f"{name!r} makes sparse gradients (sparse=True), which are not summed over ranks here: build it without"
                " sparse=True, or use TorchDDPPlugin"
            )


def _names_by_parameter(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Returns all names of every parameter by the parameter's `id`, in the order of the model."""
    found: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[id(parameter)] = (*found.get(id(parameter), ()), name)
    return found


def _named(model: nn.Module, names: Collection[str]) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name in names] if names else []


def _minority(model: nn.Module, modules: Sequence[nn.Module], whole: Collection[nn.Parameter]) -> set[str]:
    """Returns the first names of a unit's parameters that are not in the format of most of its elements."""
    kept = set(whole)
    own = {one for module in modules for one in module.parameters(recurse=False)} - kept
    numels: Counter[torch.dtype] = Counter()
    for one in own:
        numels[one.dtype] += one.numel()
    most = max(numels, key=lambda dtype: (numels[dtype], str(dtype)), default=None)
    others = {one for one in own if one.dtype != most}
    return {name for name, one in model.named_parameters() if one in others} if others else set()
