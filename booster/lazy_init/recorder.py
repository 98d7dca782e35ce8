"""Runs the dispatcher's calls of a model's constructor: large results become lazy, writes to lazy ones are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from booster.errors import ConfigError
from booster.lazy_init.arguments import (
    Arguments,
    are_ordinary,
    freeze_generators,
    make_call,
    meta_twins,
    num_real_bytes,
    tensors_in,
    with_values,
    written_tensors,
)
from booster.lazy_init.operators import (
    draw_like,
    draws_alike,
    is_predictable,
    is_random,
    keeps_values_unread,
    leaves_a_mark,
    written_arguments,
)
from booster.lazy_init.record import Call, Geometry, Prefix, Record, view_of
from booster.lazy_init.storage import make_lazy, record_of, reserve, settle, storage_of

__all__ = ["Recorder"]

_DEAREST = 64  # prefixes of records that one record may need to be replayed; past that its value is kept

# Note [Never other values]: what is recorded is an economy alone. Whatever call is not known to be recordable (several
# tensors written, a large real argument, an operator without a meta kernel) gets real arguments and runs; what it
# writes to is settled first. So code that this file does not foresee costs memory, and is right.


class Recorder(TorchDispatchMode):
    """Sees every call of the dispatcher on this thread.

    Args:
        eager_below_bytes: results of fewer bytes are made at once.
        device: where lazy tensors go when they are filled.
    """

    def __init__(self, *, eager_below_bytes: int, device: torch.device) -> None:
        super().__init__()
        self._smallest_bytes = max(eager_below_bytes, 1)
        self._device = device
        self._scratch: torch.UntypedStorage | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler at the first call, which takes longer than most builds."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not all(kind in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a class that runs its operators by others: those come here
        arguments: Arguments = (args, kwargs or {})
        with torch._C.DisableTorchFunction():
            if leaves_a_mark(func):
                for tensor in tensors_in(arguments):
                    settle(tensor)
            if keeps_values_unread(func):
                return func(*arguments[0], **arguments[1])
            if written_arguments(func):
                return self._write(func, arguments)
            return self._make(func, arguments)

    def record_fill(self, function: Callable[..., Any], arguments: Arguments, again: Callable[..., Any]) -> None:
        """Records a function that draws its first argument, a lazy tensor, as one call, whatever it reads meanwhile.

        Args:
            function: draws from one generator, by its arguments and the first one's geometry alone.
            arguments: of the call.
            again: what to run instead of the function when the tensor is filled.
        """
        (target, *rest), kwargs = arguments
        record = record_of(target)
        assert record is not None
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            call = make_call(again, arguments, torch.get_rng_state())
            function(self._scratch_like(target), *rest, **kwargs)
        record.writes.append(call)

    def _write(self, operator: Any, arguments: Arguments) -> Any:
        if self._is_recordable_write(operator, arguments) and self._record_write(operator, arguments):
            return arguments[0][0]
        for tensor in written_tensors(operator, arguments):
            if operator.overloadpacket is torch.ops.aten.resize_ and record_of(tensor) is not None:
                raise ConfigError(
                    f"{operator} of a tensor that was made in this LazyInitContext: build the part of the model that "
                    f"calls it outside of the context"
                )
            settle(tensor)
        args, kwargs = with_values(arguments)
        return operator(*args, **kwargs)

    def _is_recordable_write(self, operator: Any, arguments: Arguments) -> bool:
        """Returns whether a call writes to its first argument alone, in a way that a replay repeats."""
        target = arguments[0][0] if arguments[0] else None
        if not isinstance(target, torch.Tensor) or record_of(target) is None:
            return False
        if written_arguments(operator) != [operator._schema.arguments[0].name] or len(operator._schema.returns) != 1:
            return False
        if not are_ordinary(arguments) or num_real_bytes(arguments) > self._smallest_bytes:
            return False
        if is_random(operator):
            return draws_alike(operator)
        try:
            args, kwargs = meta_twins(arguments)
            operator(*args, **kwargs)
        except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
            return False  # a mistake of the caller, or no meta kernel: the real call shows which
        return bool(args[0].shape == target.shape and args[0].stride() == target.stride())

    def _record_write(self, operator: Any, arguments: Arguments) -> bool:
        """Records a call that writes to its first argument; returns False where replays would get too dear."""
        args, kwargs = arguments
        target = args[0]
        record = record_of(target)
        assert record is not None
        call = make_call(operator, arguments, torch.get_rng_state() if is_random(operator) else None)
        needs = record.needs | _needs(call, own=record)
        if len(needs) > _DEAREST:
            return False
        if is_random(operator):  # the draws that come after need the generator as it is after this one
            rest, kwargs = with_values((args[1:], kwargs))
            operator(self._scratch_like(target), *rest, **kwargs)
        record.writes.append(call)
        record.needs = needs
        return True

    def _make(self, operator: Any, arguments: Arguments) -> Any:
        if not are_ordinary(arguments):
            args, kwargs = with_values(arguments)
            return operator(*args, **kwargs)
        if is_predictable(operator):
            lazy = self._predicted(operator, arguments)
            if lazy is not None:
                return lazy
        state, frozen = torch.get_rng_state(), freeze_generators(arguments)
        args, kwargs = with_values(arguments)
        results = operator(*args, **kwargs)
        if not self._are_worth_replaying(results, (args, kwargs), num_real_bytes(arguments)):
            return results
        draws = is_random(operator) or not torch.equal(state, torch.get_rng_state())  # users' operators have no tags
        call = make_call(operator, frozen, state if draws else None)
        return results if len(_needs(call)) > _DEAREST else self._lazy_results(call, results)

    def _predicted(self, operator: Any, arguments: Arguments) -> torch.Tensor | None:
        """Returns the lazy result of a call whose geometry is known without running it; None where it is to be run."""
        twin = _meta_result(operator, arguments)
        if twin is None:
            return None
        num_bytes = twin.untyped_storage().nbytes()
        if num_bytes < self._smallest_bytes or num_real_bytes(arguments) * 2 > num_bytes:
            return None
        call = make_call(operator, arguments, torch.get_rng_state() if is_random(operator) else None)
        if len(_needs(call)) > _DEAREST:
            return None
        if is_random(operator):
            draw_like(operator)(self._scratch_like(twin), generator=arguments[1].get("generator"))
        return self._lazy(call, 0, twin)

    def _scratch_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns memory of a tensor's geometry for draws that nobody reads; the next call returns the same memory."""
        twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        num_bytes = twin.untyped_storage().nbytes()
        if self._scratch is None or self._scratch.nbytes() < num_bytes:
            self._scratch = None
            self._scratch = reserve(num_bytes)
        return view_of(self._scratch, Geometry.of(twin))

    def _are_worth_replaying(self, results: Any, arguments: Arguments, kept_bytes: int) -> bool:
        """Returns whether results are large, new, and made from little that a record would have to keep."""
        storages = [storage_of(tensor) for tensor in tensors_in(results)]
        addresses = [storage.data_ptr() for storage in storages if storage is not None]
        known = {storage_of(tensor).data_ptr() for tensor in tensors_in(arguments)}  # type: ignore[union-attr]
        if len(addresses) < len(storages) or len(set(addresses)) < len(addresses) or known & set(addresses):
            return False
        num_bytes = sum(storage.nbytes() for storage in storages if storage is not None)
        return self._is_large(results) and kept_bytes * 2 <= num_bytes

    def _is_large(self, results: Any) -> bool:
        return any(tensor.untyped_storage().nbytes() >= self._smallest_bytes for tensor in tensors_in(results))

    def _lazy_results(self, call: Call, results: Any) -> Any:
        if isinstance(results, torch.Tensor):
            return self._lazy(call, 0, results)
        kept = [
            self._lazy(call, index, result) if self._is_large([result]) else result
            for index, result in enumerate(results)
        ]
        return type(results)(kept)

    def _lazy(self, call: Call, output: int, made: torch.Tensor) -> torch.Tensor:
        record = Record(origin=call, output=output, made=Geometry.of(made), device=self._device, needs=_needs(call))
        return make_lazy(record, made.untyped_storage().nbytes())


def _needs(call: Call, own: Record | None = None) -> set[Prefix]:
    """Returns what a replay of a call runs besides it."""
    needs: set[Prefix] = set()
    for reference in call.references():
        if reference.record is not own:
            needs |= {reference.prefix, *reference.record.needs}
    return needs


def _meta_result(operator: Any, arguments: Arguments) -> torch.Tensor | None:
    """Returns the result without values; None where meta kernels can't tell, as the real call then must."""
    args, kwargs = meta_twins(freeze_generators(arguments))
    kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    if any(argument.name == "device" for argument in operator._schema.arguments):
        kwargs["device"] = torch.device("meta")
    try:
        result = operator(*args, **kwargs)
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
        return None
    return result if isinstance(result, torch.Tensor) and result.device.type == "meta" else None
