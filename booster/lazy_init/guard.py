"""Lazy tensors after their context: every use of values they do not have yet is an error that says what to do."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigError
from booster.lazy_init.storage import record_of, settle

__all__ = ["LazyParameter", "LazyTensor", "guard_all", "is_lazy", "refresh_class"]


def is_lazy(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor was made in a `LazyInitContext` and has no values yet.

    Example:
        >>> import torch
        >>> is_lazy(torch.ones(2))
        False
    """
    return record_of(tensor) is not None


def _functions(*names: str) -> frozenset[Callable[..., Any]]:
    """Returns methods of tensors and getters of their properties, of those that this torch has."""
    found = [getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)]
    return frozenset(item if callable(item) else item.__get__ for item in found)


_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ALIASES = frozenset({_GET_DATA, torch.Tensor.detach})
_WITHOUT_VALUES = _functions(
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "stride", "storage_offset", "__len__"),
    *("dtype", "device", "layout", "itemsize", "nbytes", "element_size", "type", "names", "has_names", "get_device"),
    *(
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_contiguous",
        "is_conj",
        "is_neg",
        "is_pinned",
        "is_inference",
    ),
    *("is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_mkldnn", "is_quantized", "is_sparse", "is_sparse_csr"),
    *("is_nested", "is_vulkan", "is_mtia", "is_ipu", "is_maia", "is_hpu", "is_xla", "is_shared"),
    *(
        "requires_grad",
        "requires_grad_",
        "is_leaf",
        "grad",
        "grad_fn",
        "output_nr",
        "retains_grad",
        "_version",
        "_base",
    ),
    *("_is_view", "_backward_hooks", "_post_accumulate_grad_hooks", "register_hook", "__hash__", "grad_dtype"),
    *("register_post_accumulate_grad_hook", "_is_zerotensor", "__dir__", "_base", "is_inference"),
) | {
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    torch.Tensor.grad.__set__,  # type: ignore[union-attr]
}


class LazyTensor(torch.Tensor):
    """A tensor without values. Assigning to `.data` gives it some and makes it an ordinary tensor again."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _use(func, args, kwargs or {})


class LazyParameter(nn.Parameter):
    """A parameter without values. Assigning to `.data` gives it some and makes it an ordinary parameter again."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _use(func, args, kwargs or {})


_GUARDS: dict[type, type] = {torch.Tensor: LazyTensor, nn.Parameter: LazyParameter}
_PLAIN = {guard: plain for plain, guard in _GUARDS.items()}


def refresh_class(tensor: torch.Tensor) -> None:
    """Guards a tensor that is lazy, and takes the guard from one that is not."""
    wanted = (_GUARDS if is_lazy(tensor) else _PLAIN).get(type(tensor))
    if wanted is not None:
        tensor.__class__ = wanted  # type: ignore[assignment]


def guard_all() -> None:
    """Guards every lazy tensor of the process; those of classes that can't be guarded get their values."""
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor) or not is_lazy(thing):
            continue
        if type(thing) in _GUARDS:
            refresh_class(thing)
        elif type(thing) not in _PLAIN:
            settle(thing)


def _use(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if function is torch.Tensor.__repr__:
        return _description(args[0])
    if function not in _WITHOUT_VALUES and function not in _ALIASES and function != _SET_DATA:
        name = getattr(function, "__name__", str(function))
        if name in ("__get__", "__set__"):
            name = str(getattr(function, "__self__", name))
        raise ConfigError(
            f"{name} on a tensor that was made in a LazyInitContext and has no values yet: boost the model with a "
            f"plugin that fills it, or call booster.lazy_init.materialize(model) first"
        )
    with torch._C.DisableTorchFunction():
        result = function(*args, **kwargs)
    if function in _ALIASES:
        refresh_class(result)
    elif function == _SET_DATA:
        refresh_class(args[0])
    return result


def _description(tensor: torch.Tensor) -> str:
    with torch._C.DisableTorchFunction():
        return f"{type(tensor).__name__}(size={tuple(tensor.shape)}, dtype={tensor.dtype})"
