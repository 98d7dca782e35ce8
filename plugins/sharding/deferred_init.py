"""Gives modules without values their values, one unit at a time, and makes all ranks start from the same."""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from booster.comm import all_gather_equal, broadcast, check_same_across_ranks, group_size, raise_on_all_ranks
from booster.errors import ConfigError, DesyncError
from booster.kernels.checksum import crc32
from booster.lazy_init import is_lazy, materialize_own
from booster.rng_state import get_rng_state, set_rng_state, set_seed

# What the parameters and buffers that a module holds itself start with is a function of the seed and of the module's
# name. All of them are made at full size, with the generators seeded by the two, while every other tensor of the model
# shows a placeholder on the meta device. Then what the module's ancestors do to their descendants (GPT2Attention scales
# its child's weight, nn.MultiheadAttention clears its child's bias) reaches this module's tensors and no others: on the
# meta device a write does nothing and draws nothing. So the number of ranks, the units, their order, and what has
# values already have no influence; and there is never memory for more than the given modules.

_WITHOUT, _LAZY, _REAL = range(3)  # what a rank has of a tensor
_UNWRITTEN = 0xA5  # the byte that fresh memory is filled with
_MOST_NAMED = 3  # tensors in a message


class _Place(NamedTuple):
    """Where a tensor stands."""

    module_name: str
    module: nn.Module
    own_name: str

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.own_name}" if self.module_name else self.own_name


def has_no_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the meta device, or was made in a `LazyInitContext` and not filled since."""
    return tensor.is_meta or is_lazy(tensor)


class Materializer:
    """Gives modules without values their values, one unit at a time, and makes all ranks start from the same.

    First `check()`, then `place_real()`, then `fill()` for one unit after the other, right before it is sharded.

    A parameter of a lazy model stays the same object. One on the meta device can't: `replaced` tells by the old one's
    `id` the new one, which stands under all names of the old one. It doesn't keep the new ones alive, which are whole:
    look a unit's parameters up before it is sharded.

    Args:
        model: The user's model.
        device: Device of the values.
        param_init_fn: Called with each module that holds tensors on the meta device itself; gives values to these, on
            any real device. None: the module's `reset_parameters`, and `_init_weights` of a transformers model.
        sync: Rank 0's values go to all ranks. False: the ranks have the same, which is verified.
        seed: Of random values; None: rank 0's `torch.initial_seed()`.
        group: The ranks that start from the same; rank 0 is its first. None: the world.
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
        self._seed: int | None = None
        self._group = group

    def check(self) -> None:
        """Raise if this rank alone can tell that the model can't be filled. No communication.

        Raises:
            ConfigError: Parameters are sharded already, have no shape yet, or nothing can give them values.
        """
        named = self._named()
        for name, tensor in named:
            _require_plain(name, tensor)
        if not self._sync or group_size(self._group) == 1:  # else rank 0 may have the values
            self._require_initialisation([tensor for _, tensor in named if tensor.is_meta])

    @property
    def facts(self) -> list[str]:
        """What must be the same of all ranks' models."""
        named = self._named()
        return [f"{name}: {tuple(t.shape)} {t.dtype} requires_grad={t.requires_grad}" for name, t in named]

    @torch.no_grad()
    def place_real(self) -> None:
        """Move parameters and buffers to the device that have values on all ranks, and broadcasts or compares them.

        Collective.

        Raises:
            ConfigError: Other ranks than rank 0 alone have values, or nothing can give values to a tensor.
            DesyncError: The ranks' models differ; without `sync` also in what has values, or in the values.
        """
        named = self._named()
        check_same_across_ranks("the model's parameters and buffers", self.facts, self._group)
        self._agree_on_seed()
        stages = self._stages(named)
        missing = [tensor for (_, tensor), ranks in zip(named, stages, strict=True) if ranks[0] == _WITHOUT]
        self._on_all_ranks(lambda: self._require_initialisation(missing))
        real = [one for one, ranks in zip(named, stages, strict=True) if set(ranks) == {_REAL}]
        for _, tensor in real:
            self._move(tensor)
        self._make_equal(real)

    @torch.no_grad()
    def fill(self, modules: Sequence[nn.Module]) -> None:
        """Give the parameters and buffers that modules hold themselves, not their children, values on the device.

        Tensors that have values on all ranks, and those that are sharded, are left alone. Collective.

        Args:
            modules: Of one unit.

        Raises:
            ConfigError: The initialisation of a module leaves a tensor without values, or `param_init_fn` changes
                other modules than the one that it is called with.
            DesyncError: The ranks have different values, and `sync` is off.
        """
        self._agree_on_seed()
        places = self._places()
        tensors = {id(tensor): tensor for module in modules for tensor in _own(module).values()}
        named = [(places[key][0].name, one) for key, one in tensors.items() if not isinstance(one, DTensor)]
        stages = self._stages(named)
        waiting = [tensor for (_, tensor), ranks in zip(named, stages, strict=True) if set(ranks) != {_REAL}]
        received = {id(tensor) for (_, tensor), ranks in zip(named, stages, strict=True) if ranks[0] != _WITHOUT}
        homes = [places[id(tensor)][0] for tensor in waiting]
        self._on_all_ranks(lambda: self._fill_here(modules, waiting, received, places))
        self._make_equal([(home.name, _own(home.module)[home.own_name]) for home in homes])

    def _fill_here(
        self,
        modules: Sequence[nn.Module],
        tensors: Sequence[torch.Tensor],
        received: set[int],
        places: dict[int, list[_Place]],
    ) -> None:
        materialize_own(modules, self._device)
        made: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            if not tensor.is_meta:
                self._move(tensor)
            elif id(tensor) in received:
                made[id(tensor)] = torch.empty_like(tensor, device=self._device)
        missing = [tensor for tensor in tensors if tensor.is_meta and id(tensor) not in received]
        made |= self._initial_values(missing, places)
        for tensor in tensors:
            if id(tensor) in made:
                self._replace(tensor, made[id(tensor)], places[id(tensor)])

    def _replace(self, old: torch.Tensor, values: torch.Tensor, places: Sequence[_Place]) -> None:
        new = values.detach()
        if isinstance(old, nn.Parameter):
            new = torch.Tensor._make_subclass(type(old), new, old.requires_grad)  # type: ignore[arg-type]
        new.__dict__.update(old.__dict__)  # what the user has marked it with
        for place in places:
            setattr(place.module, place.own_name, new)  # some classes watch what is set
        self._old.append(old)
        if isinstance(new, nn.Parameter):
            self.replaced[id(old)] = new

    def _move(self, tensor: torch.Tensor) -> None:
        for one in (tensor, tensor.grad):
            if one is not None and one.device != self._device:
                one.data = one.data.to(self._device)

    # What the ranks agree on.

    def _agree_on_seed(self) -> None:
        if self._seed is None:
            mine = torch.initial_seed() if self._given_seed is None else self._given_seed
            self._seed = int(all_gather_equal(torch.tensor([mine % 2**63]), self._group)[0])

    def _on_all_ranks(self, action: Callable[[], None]) -> None:
        """Run what may fail on one rank alone, which fails all of them then."""
        error: Exception | None = None
        try:
            action()
        except Exception as raised:  # it is raised again, here and on all other ranks
            error = raised
        raise_on_all_ranks(error, self._group)

    def _stages(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[list[int]]:
        """Return by tensor and rank what there is of it; raises on all ranks if that doesn't go together."""
        if not named:
            return []
        mine = [_WITHOUT if t.is_meta else _LAZY if is_lazy(t) else _REAL for _, t in named]
        stages = all_gather_equal(torch.tensor([mine], dtype=torch.uint8), self._group).T.tolist()
        for (name, _), ranks in zip(named, stages, strict=True):
            self._require_together(name, ranks)
        return list(stages)

    def _require_together(self, name: str, ranks: Sequence[int]) -> None:
        without = [rank for rank, stage in enumerate(ranks) if stage == _WITHOUT]
        having = [rank for rank, stage in enumerate(ranks) if stage != _WITHOUT]
        if not without or not having:
            return
        facts = f"{name!r} has values on the ranks {having} and is on the meta device on the ranks {without}"
        if not self._sync:
            raise DesyncError(
                f"{facts}: pass sync_module_states=True, which gives all ranks the values of rank 0, or build the model"
                " on the same device everywhere"
            )
        if 0 in without:
            raise ConfigError(
                f"{facts}, and sync_module_states=True would throw them away, because rank 0's go to all: give rank 0"
                " the values, or build the model on the meta device everywhere"
            )

    def _make_equal(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        if self._sync:
            broadcast([tensor for _, tensor in named], self._group)
            return
        if not named or group_size(self._group) == 1:
            return
        mine = torch.tensor([[_checksum(tensor) for _, tensor in named]])
        checksums = all_gather_equal(mine, self._group)
        differs = (checksums != checksums[0]).any(dim=0).tolist()
        names = [name for (name, _), is_other in zip(named, differs, strict=True) if is_other]
        if names:
            raise DesyncError(
                f"the ranks have different values of {_listed(names)}: pass sync_module_states=True, which gives all"
                " ranks those of rank 0, or seed every rank alike before the model is built"
            )

    # How a tensor comes by its first values.

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [*self._model.named_parameters(), *self._model.named_buffers()]

    def _places(self) -> dict[int, list[_Place]]:
        """Return by a tensor's id where it stands, in the model's order."""
        places: dict[int, list[_Place]] = {}
        for name, module in self._model.named_modules():
            for own_name, tensor in _own(module).items():
                places.setdefault(id(tensor), []).append(_Place(name, module, own_name))
        return places

    def _require_initialisation(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise if nothing is known that gives the tensors values, each by the module where it stands first."""
        if self._param_init_fn is not None:
            return
        modules = dict(self._model.named_modules())
        for name, own_names in self._by_home(tensors, self._places()).items():
            kind = type(modules[name]).__name__
            if not _initialisers(_lineage(name, modules)):
                raise ConfigError(
                    f"{_listed(list(own_names))} of module {name!r} ({kind}) on the meta device can't be given values:"
                    f" {kind} has no reset_parameters() and is not part of a transformers model. Give param_init_fn,"
                    " write a reset_parameters(), or build the model in a LazyInitContext"
                )

    def _by_home(
        self, tensors: Sequence[torch.Tensor], places: dict[int, list[_Place]]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return tensors by the module where each stands first and by its name there."""
        homes: dict[str, dict[str, torch.Tensor]] = {}
        for tensor in tensors:
            home = places[id(tensor)][0]
            homes.setdefault(home.module_name, {})[home.own_name] = tensor
        return homes

    def _initial_values(
        self, tensors: Sequence[torch.Tensor], places: dict[int, list[_Place]]
    ) -> dict[int, torch.Tensor]:
        """Return the initial values by tensor `id`."""
        made: dict[int, torch.Tensor] = {}
        if not tensors:
            return made
        modules = dict(self._model.named_modules())
        with _generators_kept(self._device), _placeholders(self._model):
            for name, wanted in self._by_home(tensors, places).items():
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
                f"{_listed(unwritten)} of module {name!r} ({type(module).__name__}), on the meta device, got no"
                " values of its initialisation: give param_init_fn, let reset_parameters() write it, or build the model"
                " in a LazyInitContext"
            )
        return after


def _require_plain(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        raise ConfigError(
            f"{name!r} is a DTensor, so the model is parallelised already: give boost() the model as it was before"
        )
    if nn.parameter.is_lazy(tensor):
        raise ConfigError(f"{name!r} of a torch lazy module has no shape yet: run a forward before boost()")


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that a module holds itself, by its names for them."""
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    return {name: tensor for table in tables for name, tensor in table.items() if tensor is not None}


def _set_table(table: dict[str, Any], content: dict[str, Any]) -> None:
    table.clear()
    table.update(content)


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(repr(name) for name in names[:_MOST_NAMED])
    return listed if len(names) <= _MOST_NAMED else f"{listed} and {len(names) - _MOST_NAMED} more"


def _checksum(tensor: torch.Tensor) -> int:
    """Return a number of a tensor's bytes, so that a nan is equal to itself."""
    return crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _lineage(name: str, modules: dict[str, nn.Module]) -> list[nn.Module]:
    """Return the module of a name, its parent, and so on up to the model."""
    parts = name.split(".") if name else []
    return [modules[".".join(parts[:length])] for length in range(len(parts), -1, -1)]


def _initialisers(lineage: Sequence[nn.Module]) -> list[Callable[[], Any]]:
    """Return what a build of a model calls, in its order, that may write to the tensors of a module.

    Constructors reset what they have made, from the inside out; then transformers goes over the whole model once more.
    """
    resets = [getattr(one, "reset_parameters", None) or getattr(one, "_reset_parameters", None) for one in lineage]
    found: list[Callable[[], Any]] = [reset for reset in resets if callable(reset)]
    for position, module in enumerate(lineage):
        owner: Any = next((one for one in lineage[position:] if _is_pretrained_model(one)), None)
        if owner is not None:
            found.append(partial(owner._init_weights, module))
    return found


def _is_pretrained_model(module: nn.Module) -> bool:
    """Return whether a module is a transformers model, without an import of transformers."""
    bases = type(module).__mro__
    return any(base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.") for base in bases)


def _unwritten_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    fresh = torch.empty_like(tensor, device=device)
    if tensor.dtype is torch.bool:
        fresh.zero_()  # it has no other bytes to be told by
    else:
        torch.empty(0, dtype=torch.uint8, device=device).set_(fresh.untyped_storage()).fill_(_UNWRITTEN)
    if isinstance(tensor, nn.Parameter):
        fresh = nn.Parameter(fresh, tensor.requires_grad)
    fresh.__dict__.update(tensor.__dict__)
    return fresh


def _is_unwritten(found: torch.Tensor, fresh: torch.Tensor, version: int) -> bool:
    """Return whether fresh memory was not written; a write by way of `.data` leaves no other trace than the bytes."""
    if found is not fresh or fresh._version != version or fresh.numel() == 0:
        return False
    if fresh.dtype is torch.bool:
        return not bool(fresh.any())
    return bool((fresh.detach().reshape(-1).view(torch.uint8) == _UNWRITTEN).all())


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    state = get_rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)


@contextmanager
def _placeholders(model: nn.Module) -> Iterator[None]:
    """Show tensors on the meta device in the place of all parameters and buffers; tied ones stay tied."""
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


def copy_with_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], value: Any, memo: dict[int, Any] | None = None
) -> Any:
    """Return a deep copy of a value with `function(tensor)` in the place of every tensor.

    Args:
        function: Called once for every tensor, and with the data of every parameter. Its answer shares no memory with
            the tensor.
        value: Anything that `copy.deepcopy` takes.
        memo: As of `copy.deepcopy`: what takes the place of objects, by their id.
    """
    with _TensorCopies(function):
        return copy.deepcopy(value, memo)


class _TensorCopies(TorchFunctionMode):
    """`copy.deepcopy` asks a tensor for `__deepcopy__`, and that of a parameter clones the parameter's data."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return self._function(args[0])  # the mode is off in here
        return func(*args, **(kwargs or {}))


def error_of_divided_copy(module_class: type[nn.Module]) -> ConfigError:
    """Return what to tell who copies a module while its weights are divided among the ranks."""
    return ConfigError(
        f"the weights of the {module_class.__name__} that was to be copied are divided among the ranks: copy the model"
        " that boost() returned, or copy inside of `with model.gathered():`. An average of weights, as AveragedModel"
        " keeps, is also updated inside of that, where all ranks must be"
    )
