"""Context manager for deferred initialization of models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from booster.errors import ConfigError
from booster.logger import log_rank_zero
from booster.validation import is_int

from .materialize import guard_lazy_tensors, is_lazy, materialize, materialize_in_place, op_log_of, storage_of
from .recorder import Recorder, record_initializers, tensors_in

_EAGER_BELOW_BYTES = 64 * 1024

# Accesses to a tensor's memory that bypass the dispatcher.
_RAW_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_"),
        *("__dlpack__", "__reduce_ex__", "apply_", "map_", "map2_"),
    )
)


class LazyInitContext:
    """Deferred initialization: large tensors get memory only from `booster.lazy_init.materialize` or a plugin.

    Model code and its initialization run unchanged. The operations on each tensor are recorded. Materialized in any
    order, a tensor is bit-equal to that of an eager build from the same seed, and after the context torch's generators
    have the same state as after that build. Every random initialization runs once on a scratch buffer, so peak memory
    of the build is that of the largest tensor. Values that model code reads are computed for it.

    After the context a lazy tensor has a shape, dtype and device and can be passed to an optimizer; any use of its
    values raises `ConfigError`. Tensors on other devices than the CPU and tensors from numpy or lists are created
    eagerly. Contexts do not nest and affect only the thread that enters them.

    Args:
        default_device: Default device of `materialize`; optional, defaults to the CPU.
        eager_below_bytes: Tensors below this size are created eagerly.

    Examples:
        >>> import torch
        >>> from booster.lazy_init import is_lazy, materialize
        >>> with LazyInitContext():
        ...     model = torch.nn.Linear(1000, 1000)
        >>> is_lazy(model.weight), is_lazy(materialize(model).weight)
        (True, False)
    """

    _active: LazyInitContext | None = None

    def __init__(
        self,
        default_device: torch.device | str | None = None,
        *,
        eager_below_bytes: int = _EAGER_BELOW_BYTES,
    ) -> None:
        if not is_int(eager_below_bytes) or eager_below_bytes < 0:
            raise ConfigError(
                f"eager_below_bytes={eager_below_bytes!r} is not a non-negative int: pass a number of bytes such as"
                " 65536, or 0 to make every tensor lazy"
            )
        try:
            device = torch.device("cpu" if default_device is None else default_device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"default_device={default_device!r} is not a torch device: pass 'cpu', the name of an accelerator, or"
                " leave it out"
            ) from error
        if device.type == "meta":
            raise ConfigError("default_device='meta' has no memory to fill: pass the device that the model trains on")
        self._device = device
        self._eager_below_bytes = eager_below_bytes
        self._modes = ExitStack()

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Materialize a module as `booster.lazy_init.materialize` does, on the context's `default_device`.

        Args:
            module: Module with tensors from a `LazyInitContext`.
            verbose: If True, log the number of lazy tensors.
        """
        if verbose:
            number = sum(map(is_lazy, [*module.parameters(), *module.buffers()]))
            log_rank_zero(f"materializing {number} lazy tensors")
        return materialize(module)

    def __enter__(self) -> LazyInitContext:
        """Start recording.

        Raises:
            ConfigError: A LazyInitContext is active.
        """
        if LazyInitContext._active is not None:
            raise ConfigError("LazyInitContext inside of another one: build the whole model in the outer one")
        LazyInitContext._active = self
        recorder = Recorder(eager_below_bytes=self._eager_below_bytes, device=self._device)
        self._modes.enter_context(record_initializers(recorder))
        self._modes.enter_context(recorder)
        self._modes.enter_context(_RawReads())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        LazyInitContext._active = None
        self._modes.close()
        guard_lazy_tensors()


class _RawReads(TorchFunctionMode):
    """Function mode that materializes lazy tensors before their memory is accessed directly."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            source = args[0]
            is_plain = type(source) is torch.Tensor and source.is_leaf and source.grad is None
            if is_plain and op_log_of(source) is not None:
                return _deep_copy(source, args[1])
        if func in _RAW_READS:
            for tensor in tensors_in((args, kwargs or {})):
                materialize_in_place(tensor)
        return func(*args, **(kwargs or {}))


def _deep_copy(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """Return a lazy copy. As in torch, tensors that share a storage share the copied one."""
    found: torch.Tensor | None = memo.get(id(tensor))
    if found is not None:
        return found
    with torch.no_grad():
        storage = storage_of(tensor)
        assert storage is not None
        copies = memo.setdefault("booster.lazy_init", {})
        key = (storage._cdata, tensor.dtype)
        if key not in copies:
            copies[key] = torch.empty(0, dtype=tensor.dtype).set_(storage).clone()
        result: torch.Tensor = copies[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).detach()
    memo[id(tensor)] = result.requires_grad_(tensor.requires_grad)
    result.__dict__ = copy.deepcopy(tensor.__dict__, memo)
    return result
