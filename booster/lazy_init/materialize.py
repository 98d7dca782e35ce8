"""Lazy tensors, their materialization, one storage at a time, and placement of models on a device."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from booster.comm import raise_on_all_ranks
from booster.errors import ConfigError

from .op_log import Geometry, OpLog, replay, view_of

_ATTRIBUTE = "_booster_lazy_record"  # on the storage object, which torch keeps as long as the storage lives

# A lazy tensor is a plain CPU tensor with its real sizes and strides over untouched shared anonymous pages, which use
# no memory and do not count toward RLIMIT_DATA (private pages do). So views, `.data =`, tied weights and checks of
# device or strides behave as usual in model code. malloc is not suitable, as it may return touched pages.


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a dense CPU tensor, or None."""
    with torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return None
        try:
            return tensor.untyped_storage()
        except NotImplementedError:  # a tensor of torch.func's transforms, or of a class without memory
            return None


def op_log_of(tensor: torch.Tensor) -> OpLog | None:
    """Return the op log of a lazy tensor's storage, or None for an ordinary tensor."""
    storage = storage_of(tensor)
    return None if storage is None else getattr(storage, _ATTRIBUTE, None)


def reserve(num_bytes: int) -> torch.UntypedStorage:
    """Return a storage whose pages are allocated at the first write, and freed with the storage."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8).untyped_storage()


def make_lazy(record: OpLog, num_bytes: int) -> torch.Tensor:
    """Return a lazy tensor for the output of a log's first call."""
    storage = reserve(num_bytes)
    setattr(storage, _ATTRIBUTE, record)
    return view_of(storage, record.geometry)


def materialize_in_place(tensor: torch.Tensor) -> None:
    """Materialize the full storage of a lazy tensor in place, which turns it into an ordinary tensor."""
    storage, record = storage_of(tensor), op_log_of(tensor)
    if storage is None or record is None:
        return
    values = replay(record)
    whole = Geometry(dtype=torch.uint8, size=torch.Size([values.nbytes()]), stride=(1,), offset=0)
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        view_of(storage, whole).copy_(view_of(values, whole))
    delattr(storage, _ATTRIBUTE)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was created in a `LazyInitContext` and is not materialized.

    Examples:
        >>> import torch
        >>> is_lazy(torch.ones(2))
        False
    """
    return op_log_of(tensor) is not None


def _functions(*names: str) -> frozenset[Callable[..., Any]]:
    """Return tensor methods and property getters by name, without names that this torch version lacks."""
    found = [getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)]
    return frozenset(item if callable(item) else item.__get__ for item in found)


_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ALIASES = frozenset({_GET_DATA, torch.Tensor.detach})
METADATA_FUNCTIONS = _functions(
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "stride", "storage_offset", "__len__"),
    *("dtype", "device", "layout", "itemsize", "nbytes", "element_size", "type", "names", "has_names", "get_device"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_conj", "is_neg", "is_pinned"),
    *("is_inference", "requires_grad", "requires_grad_", "is_leaf", "grad", "grad_fn", "output_nr", "retains_grad"),
    *("is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_mkldnn", "is_quantized", "is_sparse", "is_sparse_csr"),
    *("is_nested", "is_vulkan", "is_mtia", "is_ipu", "is_maia", "is_hpu", "is_xla", "is_shared"),
    *("_version", "_base", "_is_view", "_backward_hooks", "_post_accumulate_grad_hooks", "register_hook", "__hash__"),
    *("grad_dtype", "register_post_accumulate_grad_hook", "_is_zerotensor", "__dir__"),
) | {
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    torch.Tensor.grad.__set__,  # type: ignore[union-attr]
}


class LazyTensor(torch.Tensor):
    """Tensor without values. Assigning to `.data` turns it into an ordinary tensor."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call_guarded(func, args, kwargs or {})


class LazyParameter(nn.Parameter):
    """Parameter without values. Assigning to `.data` turns it into an ordinary parameter."""

    __torch_function__ = vars(LazyTensor)["__torch_function__"]


_GUARDS: dict[type, type] = {torch.Tensor: LazyTensor, nn.Parameter: LazyParameter}
_PLAIN = {guard: plain for plain, guard in _GUARDS.items()}


def refresh_class(tensor: torch.Tensor) -> None:
    """Set the guard class on a lazy tensor, and the plain class on any other."""
    wanted = (_GUARDS if is_lazy(tensor) else _PLAIN).get(type(tensor))
    if wanted is not None:
        tensor.__class__ = wanted  # type: ignore[assignment]


def guard_lazy_tensors() -> None:
    """Guard all lazy tensors of the process; subclasses without a guard class are materialized."""
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor) or not is_lazy(thing):
            continue
        if type(thing) in _GUARDS:
            refresh_class(thing)
        elif type(thing) not in _PLAIN:
            materialize_in_place(thing)


def _call_guarded(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if function is torch.Tensor.__repr__:
        with torch._C.DisableTorchFunction():
            return f"{type(args[0]).__name__}(size={tuple(args[0].shape)}, dtype={args[0].dtype})"
    if function not in METADATA_FUNCTIONS and function not in _ALIASES and function != _SET_DATA:
        name = getattr(function, "__name__", str(function))
        if name in ("__get__", "__set__"):
            name = str(getattr(function, "__self__", name))
        raise ConfigError(
            f"{name} on a tensor of a LazyInitContext that is not materialized: boost the model with a plugin, or call"
            f" booster.lazy_init.materialize(model) first"
        )
    with torch._C.DisableTorchFunction():
        result = function(*args, **kwargs)
    if function in _ALIASES:
        refresh_class(result)
    elif function == _SET_DATA:
        refresh_class(args[0])
    return result


def materialize_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor in new CPU memory; a lazy tensor stays lazy.

    May be called in any order and repeatedly: the values are always those of an eager build of the model, and torch's
    generators are not changed. Needs memory for the full storage of the tensor.

    Args:
        tensor: Tensor, lazy or not.

    Raises:
        ConfigError: An operator of the model's code is not replayable.
    """
    record = op_log_of(tensor)
    with torch.no_grad(), torch._C.DisableTorchFunction():
        if record is None:
            return tensor.detach().to("cpu", copy=True)
        storage = replay(record)
        values = view_of(storage, Geometry.of(tensor))
        if values.numel() * values.element_size() < storage.nbytes():
            return values.clone()
        return values


def materialize(module: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Materialize all lazy parameters, buffers and other tensors of a module in place, and return the module.

    Parameter and buffer objects are kept, so optimizers and tied weights stay valid; shared memory stays shared. Peak
    memory is that of the materialized model plus twice its largest tensor.

    Args:
        module: Module with tensors from a `LazyInitContext`; other tensors are not changed.
        device: Device of the values; optional, defaults to the context's `default_device`.

    Raises:
        ConfigError: An operator of the model's code is not replayable.
    """
    materialize_own(module.modules(), device)
    return module


def materialize_own(modules: Iterable[nn.Module], device: torch.device | str | None = None) -> None:
    """Materialize the direct lazy tensors of the given modules; those of their children stay lazy.

    Memory that is shared among the given modules stays shared. A tensor that shares memory with another module gets
    separate memory with the same values.

    Args:
        modules: Modules whose tensors are materialized.
        device: Device of the values; optional, defaults to the context's `default_device`.

    Raises:
        ConfigError: An operator of the model's code is not replayable.
    """
    sharing: dict[int, tuple[OpLog, dict[int, torch.Tensor]]] = {}
    for tensor in _tensors(modules):
        record = op_log_of(tensor)
        if record is not None:
            sharing.setdefault(id(record), (record, {}))[1][id(tensor)] = tensor
    for record, tensors in sharing.values():
        _fill(record, list(tensors.values()), torch.device(device) if device is not None else record.device)


def _fill(record: OpLog, tensors: list[torch.Tensor], device: torch.device) -> None:
    storage = replay(record)
    if device.type != "cpu":
        whole = Geometry(dtype=torch.uint8, size=torch.Size([storage.nbytes()]), stride=(1,), offset=0)
        storage = view_of(storage, whole).to(device).untyped_storage()
    for tensor in tensors:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            tensor.data = view_of(storage, Geometry.of(tensor))
        refresh_class(tensor)


def _tensors(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the direct tensors of modules: registered, as attributes, or in containers among the attributes."""
    seen: set[int] = set()
    for module in modules:
        for value in vars(module).values():
            yield from _nested_tensors(value, seen)


def _nested_tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _nested_tensors(item, seen)


def move_to_device(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> None:
    """Move parameters, buffers and existing optimizer states to a device; lazy parameters are materialized.

    Collective: a rank without memory for it would leave the others waiting for its weights.

    Raises:
        ConfigError: The model has parameters on the meta device, without values; on all ranks if on any.
    """
    error: Exception | None = None
    try:
        check_materialized(model)
        materialize(model, device)
        if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
            _move(model, device)
        if optimizer is not None and optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # moves every state to its parameter's device
    except Exception as raised:  # raised again on all ranks
        error = raised
    raise_on_all_ranks(error)


def _move(model: nn.Module, device: torch.device) -> None:
    """Move a model; what is one buffer of several modules stays one, as torch does it with parameters alone."""
    buffers = [(one._buffers, name, buffer) for one in model.modules() for name, buffer in one._buffers.items()]
    model.to(device)
    moved: dict[int, torch.Tensor | None] = {}
    for owner, name, buffer in buffers:
        owner[name] = moved.setdefault(id(buffer), owner[name])


def check_materialized(model: nn.Module) -> None:
    """Raise `ConfigError` if a parameter is on the meta device and was not made in a `LazyInitContext`."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {name!r} is on the meta device and has no values: build the model on a real device, or call"
                " model.to_empty(device=...) and initialise it before boost()"
            )
