"""Deferred initialization: materialization of meta and lazy modules, one unit at a time, with equal values on ranks."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from booster.comm import (
    all_gather_equal,
    all_gather_numbers,
    broadcast,
    check_same_across_ranks,
    group_size,
    is_fake_world,
    raise_on_all_ranks,
)
from booster.errors import ConfigError, DesyncError, format_list
from booster.kernels.checksum import crc32
from booster.lazy_init import is_lazy, materialize_own
from booster.rng_state import get_rng_state, set_rng_state, set_seed

# The initial values of the tensors that a module holds directly depend on the seed and the module's name only. They are
# allocated at full size, with generators seeded by both, while all other tensors of the model are replaced by
# placeholders on the meta device. Ancestors that initialize their descendants (GPT2Attention scales its child's weight,
# nn.MultiheadAttention clears its child's bias) therefore only affect this module's tensors: on the meta device, a
# write has no effect and draws no random numbers. The values do not depend on the number of ranks, on the units and
# their order, or on already initialized tensors, and memory is only needed for the given modules.

_META, _LAZY, _REAL = range(3)  # state of a tensor on a rank
_UNWRITTEN = 0xA5  # fill byte of new memory
_MOST_NAMED = 3  # maximum number of tensor names in a message


class _TensorLocation(NamedTuple):
    """Module and attribute of a tensor."""

    module_name: str
    module: nn.Module
    own_name: str

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.own_name}" if self.module_name else self.own_name

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is there, still."""
        return _own(self.module).get(self.own_name) is tensor


class Materializer:
    """Materializes meta and lazy modules, one unit at a time, with equal values on all ranks.

    Call `check()`, then `sync_initialized()`, then `fill()` for each unit right before it is sharded.

    A parameter of a lazy model stays the same object. A parameter on the meta device is replaced by a new one under all
    its names; `replaced` maps the old one's `id` to it. The mapping holds weak references to the unsharded parameters:
    look up a unit's parameters before it is sharded.

    Args:
        model: The user's model.
        device: Device of the values.
        param_init_fn: Initializer of a module that directly holds meta tensors; materializes these on any real device.
            Optional, defaults to the module's `reset_parameters` and `_init_weights` of a transformers model.
        sync: If True, rank 0's values are broadcast; if False, equality of the ranks' values is verified.
        seed: Seed of random values; optional, defaults to rank 0's `torch.initial_seed()`.
        group: Ranks with equal values; its first rank counts as rank 0. Optional, defaults to the world group.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        param_init_fn: Callable[[nn.Module], None] | None,
        sync: bool,
        seed: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.replaced: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
        self._old: list[torch.Tensor] = []  # an id is unique as long as its object lives
        self._model = model
        self._device = device
        self._param_init_fn = param_init_fn
        self._sync = sync
        self._given_seed = seed
        self._known_locations: dict[int, list[_TensorLocation]] | None = None
        self._seed: int | None = None
        self._group = group

    def check(self) -> None:
        """Check everything that needs no communication.

        Raises:
            ConfigError: Parameters are already sharded, have no shape, or have no initializer.
        """
        named = self._named()
        for name, tensor in named:
            if isinstance(tensor, DTensor):
                raise ConfigError(
                    f"{name!r} is a DTensor, so the model is parallelised already: give boost() the model as it was"
                    " before"
                )
            if nn.parameter.is_lazy(tensor):
                raise ConfigError(f"{name!r} of a torch lazy module has no shape yet: run a forward before boost()")
        if not self._sync or group_size(self._group) == 1:  # else rank 0 may have the values
            self._require_initialisation([tensor for _, tensor in named if tensor.is_meta])

    @property
    def fingerprint(self) -> list[str]:
        """Description of the model that must be equal on all ranks."""
        named = self._named()
        return [f"{name}: {tuple(t.shape)} {t.dtype} requires_grad={t.requires_grad}" for name, t in named]

    @torch.no_grad()
    def sync_initialized(self) -> None:
        """Move tensors that have values on all ranks to the device, and broadcast or compare them.

        Collective over the group.

        Raises:
            ConfigError: A tensor has values on other ranks but not on rank 0, or has no initializer.
            DesyncError: The ranks' models differ; without `sync`, also if their values differ.
        """
        named = self._named()
        check_same_across_ranks("the model's parameters and buffers", self.fingerprint, self._group)
        self._agree_on_seed()
        stages = self._stages(named)
        missing = [tensor for (_, tensor), ranks in zip(named, stages, strict=True) if ranks[0] == _META]
        self._on_all_ranks(lambda: self._require_initialisation(missing))
        real = [one for one, ranks in zip(named, stages, strict=True) if set(ranks) == {_REAL}]
        for _, tensor in real:
            self._move(tensor)
        self._make_equal(real)

    @torch.no_grad()
    def fill(self, modules: Sequence[nn.Module]) -> None:
        """Materialize the parameters and buffers that the given modules hold directly, on the device.

        Sharded tensors, and tensors with values on all ranks, stay unchanged. Collective over the group.

        Args:
            modules: Modules of one unit.

        Raises:
            ConfigError: The initialization of a module leaves a tensor without values, or `param_init_fn` changes other
                modules than its argument.
            DesyncError: The ranks have different values, and `sync` is False.
        """
        self._agree_on_seed()
        tensors = {id(tensor): tensor for module in modules for tensor in _own(module).values()}
        if not tensors:
            return
        locations = self._locations_of(tensors.values())
        named = [(locations[key][0].name, one) for key, one in tensors.items() if not isinstance(one, DTensor)]
        stages = self._stages(named)
        waiting = [tensor for (_, tensor), ranks in zip(named, stages, strict=True) if set(ranks) != {_REAL}]
        received = {id(tensor) for (_, tensor), ranks in zip(named, stages, strict=True) if ranks[0] != _META}
        owners = [locations[id(tensor)][0] for tensor in waiting]
        self._on_all_ranks(lambda: self._fill_here(modules, waiting, received, locations))
        self._make_equal([(owner.name, _own(owner.module)[owner.own_name]) for owner in owners])

    def _fill_here(
        self,
        modules: Sequence[nn.Module],
        tensors: Sequence[torch.Tensor],
        received: set[int],
        locations: dict[int, list[_TensorLocation]],
    ) -> None:
        materialize_own(modules, self._device)
        made: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            if not tensor.is_meta:
                self._move(tensor)
            elif id(tensor) in received:
                made[id(tensor)] = torch.empty_like(tensor, device=self._device)
        missing = [tensor for tensor in tensors if tensor.is_meta and id(tensor) not in received]
        made |= self._initial_values(missing, locations)
        for tensor in tensors:
            if id(tensor) in made:
                self._replace(tensor, made[id(tensor)], locations[id(tensor)])

    def _replace(self, old: torch.Tensor, values: torch.Tensor, locations: Sequence[_TensorLocation]) -> None:
        new = values.detach()
        if isinstance(old, nn.Parameter):
            new = torch.Tensor._make_subclass(type(old), new, old.requires_grad)  # type: ignore[arg-type]
        new.__dict__.update(old.__dict__)  # attributes set by the user
        for location in locations:
            setattr(location.module, location.own_name, new)  # some classes override __setattr__
        self._old.append(old)
        if isinstance(new, nn.Parameter):
            self.replaced[id(old)] = new

    def _move(self, tensor: torch.Tensor) -> None:
        for one in (tensor, tensor.grad):
            if one is not None and one.device != self._device:
                one.data = one.data.to(self._device)

    # Agreement of the ranks.

    def _agree_on_seed(self) -> None:
        if self._seed is None:
            mine = torch.initial_seed() if self._given_seed is None else self._given_seed
            self._seed = all_gather_numbers([mine % 2**63], self._group)[0][0]

    def _on_all_ranks(self, action: Callable[[], None]) -> None:
        """Run an action; an error on any rank is raised on all."""
        error: Exception | None = None
        try:
            action()
        except Exception as raised:  # raised again below, on all ranks
            error = raised
        raise_on_all_ranks(error, self._group)

    def _stages(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[list[int]]:
        """Return the state of each tensor on each rank; raise on all ranks if the states are incompatible."""
        if not named:
            return []
        mine = [_META if t.is_meta else _LAZY if is_lazy(t) else _REAL for _, t in named]
        stages = [list(ranks) for ranks in zip(*all_gather_numbers(mine, self._group), strict=True)]
        for (name, _), ranks in zip(named, stages, strict=True):
            self._require_together(name, ranks)
        return stages

    def _require_together(self, name: str, ranks: Sequence[int]) -> None:
        without = [rank for rank, stage in enumerate(ranks) if stage == _META]
        having = [rank for rank, stage in enumerate(ranks) if stage != _META]
        if not without or not having:
            return
        given = f"{name!r} has values on the ranks {having} and is on the meta device on the ranks {without}"
        if not self._sync:
            raise DesyncError(
                f"{given}: pass sync_module_states=True, which gives all ranks the values of rank 0, or build the model"
                " on the same device everywhere"
            )
        if 0 in without:
            raise ConfigError(
                f"{given}, and sync_module_states=True would throw them away, because rank 0's go to all: give rank 0"
                " the values, or build the model on the meta device everywhere"
            )

    def _make_equal(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        if self._sync:
            broadcast([tensor for _, tensor in named], self._group)
            return
        if not named or group_size(self._group) == 1 or is_fake_world():
            return
        # Checksums of the bytes, which also compare nans.
        flat = (tensor.detach().cpu().contiguous().reshape(-1) for _, tensor in named)
        mine = torch.tensor([[crc32(one.view(torch.uint8).numpy().data) for one in flat]])
        checksums = all_gather_equal(mine, self._group)
        differs = (checksums != checksums[0]).any(dim=0).tolist()
        names = [name for (name, _), is_other in zip(named, differs, strict=True) if is_other]
        if names:
            raise DesyncError(
                f"the ranks have different values of {_named(names)}: pass sync_module_states=True, which gives all"
                " ranks those of rank 0, or seed every rank alike before the model is built"
            )

    # Initial values.

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [*self._model.named_parameters(), *self._model.named_buffers()]

    def _locations(self) -> dict[int, list[_TensorLocation]]:
        """Return the locations of each tensor by `id`, in the model's order."""
        locations: dict[int, list[_TensorLocation]] = {}
        for name, module in self._model.named_modules():
            for own_name, tensor in _own(module).items():
                locations.setdefault(id(tensor), []).append(_TensorLocation(name, module, own_name))
        return locations

    def _locations_of(self, tensors: Collection[torch.Tensor]) -> dict[int, list[_TensorLocation]]:
        """Return the locations of some tensors by `id`; the model is searched again only if it has changed there."""
        for known in (self._known_locations, None):
            if known is None:
                self._known_locations = known = self._locations()
            found = {id(one): [place for place in known.get(id(one), ()) if place.has(one)] for one in tensors}
            if all(found.values()):
                break
        return found

    def _require_initialisation(self, tensors: Sequence[torch.Tensor]) -> None:
        """Check that the first module of each tensor has an initializer."""
        if self._param_init_fn is not None:
            return
        modules = dict(self._model.named_modules())
        for name, own_names in self._by_owner(tensors, self._locations()).items():
            kind = type(modules[name]).__name__
            if not _initialisers(_lineage(name, modules)):
                raise ConfigError(
                    f"{_named(list(own_names))} of module {name!r} ({kind}) on the meta device can't be given values:"
                    f" {kind} has no reset_parameters() and is not part of a transformers model. Give param_init_fn,"
                    " write a reset_parameters(), or build the model in a LazyInitContext"
                )

    def _by_owner(
        self, tensors: Sequence[torch.Tensor], locations: dict[int, list[_TensorLocation]]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return tensors by the name of their first module and their attribute in it."""
        owners: dict[str, dict[str, torch.Tensor]] = {}
        for tensor in tensors:
            owner = locations[id(tensor)][0]
            owners.setdefault(owner.module_name, {})[owner.own_name] = tensor
        return owners

    def _initial_values(
        self, tensors: Sequence[torch.Tensor], locations: dict[int, list[_TensorLocation]]
    ) -> dict[int, torch.Tensor]:
        """Return the initial values by tensor `id`."""
        made: dict[int, torch.Tensor] = {}
        if not tensors:
            return made
        modules = dict(self._model.named_modules())
        with ExitStack() as stack:
            stack.callback(set_rng_state, get_rng_state(self._device), self._device)
            stack.enter_context(_placeholders(self._model))
            for name, wanted in self._by_owner(tensors, locations).items():
                values = self._values_of_module(name, modules)
                made |= {id(tensor): values[own_name] for own_name, tensor in wanted.items()}
        return made

    def _values_of_module(self, name: str, modules: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
        module = modules[name]
        tables = [(table, dict(table)) for table in (module._parameters, module._buffers)]
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        set_seed(int.from_bytes(digest[:4], "little"))
        try:
            if self._param_init_fn is not None:
                values = self._by_user(name, module, self._param_init_fn)
            else:
                values = self._by_class(name, _lineage(name, modules))
            return {own_name: value.detach().to(self._device) for own_name, value in values.items()}
        finally:
            for table, before in tables:
                _set_table(table, before)

    def _by_user(
        self, name: str, module: nn.Module, param_init_fn: Callable[[nn.Module], None]
    ) -> dict[str, torch.Tensor]:
        before = _own(module)
        param_init_fn(module)
        after = _own(module)
        others = [part for part in module.modules() if part is not module]
        if any(not tensor.is_meta for part in others for tensor in _own(part).values()):
            raise ConfigError(
                f"param_init_fn was called with module {name!r} ({type(module).__name__}) and gave values to modules"
                " inside of it too, for which it is called by themselves: write to_empty(device=..., recurse=False) and"
                " parameters(recurse=False)"
            )
        for own_name, tensor in before.items():
            found = after.get(own_name)
            if found is None or found.is_meta or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
                what = "missing" if found is None else f"{found.dtype} {tuple(found.shape)} on {found.device}"
                raise ConfigError(
                    f"after param_init_fn {own_name!r} of module {name!r} is {what}, and it should be {tensor.dtype}"
                    f" {tuple(tensor.shape)} on {self._device}: let param_init_fn call"
                    f" module.to_empty(device=..., recurse=False) and then initialise"
                )
        return after

    def _by_class(self, name: str, lineage: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
        module = lineage[0]
        fresh = {id(tensor): _unwritten_like(tensor, self._device) for tensor in _own(module).values()}
        for table in (module._parameters, module._buffers):
            _set_table(table, {own: None if t is None else fresh[id(t)] for own, t in table.items()})
        before = {own: (tensor, tensor._version) for own, tensor in _own(module).items()}
        try:
            with torch.device(self._device):
                for initialise in _initialisers(lineage):
                    initialise()
        except Exception as error:
            raise ConfigError(
                f"the initialisation of module {name!r} ({type(module).__name__}), which is on the meta device, failed"
                f" ({type(error).__name__}: {error}): give param_init_fn, or build the model in a LazyInitContext"
            ) from error
        after = _own(module)
        unwritten = [own for own, (tensor, version) in before.items() if _is_unwritten(after[own], tensor, version)]
        if unwritten:
            raise ConfigError(
                f"{_named(unwritten)} of module {name!r} ({type(module).__name__}), on the meta device, got no"
                " values of its initialisation: give param_init_fn, let reset_parameters() write it, or build the model"
                " in a LazyInitContext"
            )
        return after


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that a module holds directly, by attribute."""
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    return {name: tensor for table in tables for name, tensor in table.items() if tensor is not None}


def _set_table(table: dict[str, Any], content: dict[str, Any]) -> None:
    table.clear()
    table.update(content)


def _named(names: Sequence[str]) -> str:
    return format_list(map(repr, names), _MOST_NAMED)


def _lineage(name: str, modules: dict[str, nn.Module]) -> list[nn.Module]:
    """Return the module of a name, its parent, and so on up to the model."""
    parts = name.split(".") if name else []
    return [modules[".".join(parts[:length])] for length in range(len(parts), -1, -1)]


def _initialisers(lineage: Sequence[nn.Module]) -> list[Callable[[], Any]]:
    """Return the calls that may initialize the tensors of a module, in the order of the model's construction.

    Constructors reset their tensors from the innermost module outwards; transformers then initializes the full model.
    """
    resets = [getattr(one, "reset_parameters", None) or getattr(one, "_reset_parameters", None) for one in lineage]
    found: list[Callable[[], Any]] = [reset for reset in resets if callable(reset)]
    for position, module in enumerate(lineage):
        owner: Any = next((one for one in lineage[position:] if _is_pretrained_model(one)), None)
        if owner is not None:
            found.append(partial(owner._init_weights, module))
    return found


def _is_pretrained_model(module: nn.Module) -> bool:
    """Return whether a module is a transformers model, without importing transformers."""
    bases = type(module).__mro__
    return any(base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.") for base in bases)


def _unwritten_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    fresh = torch.empty_like(tensor, device=device)
    if tensor.dtype is torch.bool:
        fresh.zero_()  # a bool has no invalid byte to detect
    else:
        torch.empty(0, dtype=torch.uint8, device=device).set_(fresh.untyped_storage()).fill_(_UNWRITTEN)
    if isinstance(tensor, nn.Parameter):
        fresh = nn.Parameter(fresh, tensor.requires_grad)
    fresh.__dict__.update(tensor.__dict__)
    return fresh


def _is_unwritten(found: torch.Tensor, fresh: torch.Tensor, version: int) -> bool:
    """Return whether new memory is unwritten; a write through `.data` is only visible in the bytes."""
    if found is not fresh or fresh._version != version or fresh.numel() == 0:
        return False
    if fresh.dtype is torch.bool:
        return not bool(fresh.any())
    return bool((fresh.detach().reshape(-1).view(torch.uint8) == _UNWRITTEN).all())


@contextmanager
def _placeholders(model: nn.Module) -> Iterator[None]:
    """Replace all parameters and buffers by meta tensors in the block; tied ones stay tied."""
    tables: list[dict[str, Any]] = [t for module in model.modules() for t in (module._parameters, module._buffers)]
    saved = [dict(table) for table in tables]
    shown: dict[int, torch.Tensor] = {}
    try:
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    if id(tensor) not in shown:
                        shown[id(tensor)] = _placeholder(tensor)
                    table[name] = shown[id(tensor)]
        yield
    finally:
        for table, before in zip(tables, saved, strict=True):
            _set_table(table, before)


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    shown = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        shown = nn.Parameter(shown, tensor.requires_grad)
    if not isinstance(tensor, DTensor):
        shown.__dict__.update(tensor.__dict__)
    return shown


def sharded_copy_error(module_class: type[nn.Module]) -> ConfigError:
    """Return the error of copying a module with sharded weights."""
    return ConfigError(
        f"the {module_class.__name__} to be copied has weights that are sharded over the ranks: copy the model that"
        " boost() returned, or copy inside of `with model.gathered():` on all ranks. Weight averages, as of"
        " AveragedModel, must also be updated inside of that block"
    )
