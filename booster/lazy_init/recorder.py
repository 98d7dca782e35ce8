"""Dispatch mode that makes large results of a model's constructor lazy and records writes to them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from booster.errors import ConfigError

from .materialize import make_lazy, materialize_in_place, op_log_of, reserve, storage_of
from .op_log import GeneratorState, Geometry, LazyReference, LogPrefix, OpLog, RecordedCall, replay, view_of

_aten = torch.ops.aten

# Operators whose meta kernels return the sizes and strides of the result without running the operator.
_PREDICTABLE = frozenset(
    {
        *(_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided),
        *(_aten.zeros, _aten.zeros_like, _aten.new_zeros, _aten.ones, _aten.ones_like, _aten.new_ones),
        *(_aten.full, _aten.full_like, _aten.new_full, _aten.clone, _aten._to_copy),
        *(_aten.tril, _aten.triu, _aten.cat, _aten.stack),
    }
)
# Random factories, and the in-place operator that draws the same numbers. (Results of the factories would come from
# malloc, and freeing them would fragment the heap between the small tensors of the model.)
_IN_PLACE_RANDOM_OPS = {
    _aten.randn: _aten.normal_.default,
    _aten.randn_like: _aten.normal_.default,
    _aten.rand: _aten.uniform_.default,
    _aten.rand_like: _aten.uniform_.default,
}
# In-place operators that advance the generator by the shape alone: the previous values of the tensor are not needed.
_RNG_DETERMINISTIC = frozenset(
    {
        *(_aten.normal_, _aten.uniform_, _aten.exponential_, _aten.geometric_, _aten.cauchy_, _aten.log_normal_),
        *(_aten.random_, _aten.bernoulli_),
    }
)
# Operators that change a tensor's storage or geometry, but no values.
_METADATA_MUTATIONS = frozenset(
    {
        *(_aten.set_, _aten.detach_, _aten.squeeze_, _aten.unsqueeze_, _aten.transpose_, _aten.t_),
        *(_aten.as_strided_, _aten.swapaxes_, _aten.swapdims_),
    }
)
# Views with a conjugate or negative bit, which sizes and strides do not represent.
_METADATA_VIEWS = frozenset({_aten._conj, _aten._neg_view})


def is_random(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_MAX_READS = 16  # reads of a lazy value (each one a replay) after which it is materialized


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def num_real_bytes(arguments: Arguments) -> int:
    """Return the bytes of the tensors that are not lazy, of which an op log keeps copies."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(arguments) if op_log_of(tensor) is None)


def are_dense_cpu(arguments: Arguments) -> bool:
    """Return whether a call involves only dense unpinned CPU tensors."""
    kwargs = arguments[1]
    device, layout = kwargs.get("device"), kwargs.get("layout")
    if (device is not None and torch.device(device).type != "cpu") or kwargs.get("pin_memory"):
        return False
    if layout is not None and layout is not torch.strided:
        return False
    generators = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Generator)]
    if any(generator.device.type != "cpu" for generator in generators):
        return False
    return all(storage_of(tensor) is not None for tensor in tensors_in(arguments))


def freeze_generators(arguments: Arguments) -> Arguments:
    """Replace generators in the arguments by their current states."""

    def freeze(leaf: Any) -> Any:
        return GeneratorState(leaf.get_state()) if isinstance(leaf, torch.Generator) else leaf

    frozen: Arguments = tree_map(freeze, arguments)
    return frozen


def record_call(operator: Any, arguments: Arguments, random_state: torch.Tensor | None) -> RecordedCall:
    """Return a replayable call that is independent of later changes to its arguments."""

    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        record = op_log_of(leaf)
        if record is None:
            return _copy(leaf)
        return LazyReference(op_log=record, num_writes=len(record.writes), geometry=Geometry.of(leaf))

    return RecordedCall(
        function=operator,
        arguments=tree_map(keep, freeze_generators(arguments)),
        rng_state=random_state,
        default_dtype=torch.get_default_dtype(),
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, with the same strides if the storage is not much larger, as strides select the kernel."""
    storage = tensor.untyped_storage()
    if tensor.is_conj() or tensor.is_neg() or storage.nbytes() > 4096 + 2 * tensor.numel() * tensor.element_size():
        return tensor.detach().clone()
    return view_of(storage.clone(), Geometry.of(tensor))


def to_meta(arguments: Arguments) -> Arguments:
    """Replace tensors in the arguments by meta tensors of the same geometry."""

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")

    twins: Arguments = tree_map(twin, arguments)
    return twins


def materialize_arguments(arguments: Arguments) -> Arguments:
    """Replace lazy tensors in the arguments by their values, for a call that runs now."""
    storages: dict[int, torch.UntypedStorage] = {}

    def value_of(leaf: Any) -> Any:
        record = op_log_of(leaf) if isinstance(leaf, torch.Tensor) else None
        if record is None:
            return leaf
        if id(record) not in storages:
            record.num_reads += 1
            if record.num_reads > _MAX_READS:
                materialize_in_place(leaf)
                return leaf
            storages[id(record)] = replay(record)
        return view_of(storages[id(record)], Geometry.of(leaf))

    real: Arguments = tree_map(value_of, arguments)
    return real


_MAX_REPLAY = 64  # dependencies of an op log; above, the value is materialized

# Recording only saves memory. A call that is not known to be recordable (several written tensors, a large real
# argument, an operator without a meta kernel) runs with real arguments after the tensors that it writes to are
# materialized. So unforeseen code uses more memory, but its values are correct.


class Recorder(TorchDispatchMode):
    """Dispatch mode of this thread.

    Args:
        eager_below_bytes: Results below this size are created eagerly.
        device: Default device of materialized tensors.
    """

    def __init__(self, *, eager_below_bytes: int, device: torch.device) -> None:
        super().__init__()
        self._min_lazy_bytes = max(eager_below_bytes, 1)
        self._device = device
        self._scratch: torch.UntypedStorage | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Keeps torch from importing its compiler at the first call, which takes longer than most builds.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not all(kind in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # the subclass decomposes the call into others, which are dispatched here
        arguments: Arguments = (args, kwargs or {})
        with torch._C.DisableTorchFunction():
            if func.overloadpacket in _METADATA_VIEWS:
                for tensor in tensors_in(arguments):
                    materialize_in_place(tensor)
            schema = func._schema
            written = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
            is_view = not written and any(result.alias_info is not None for result in schema.returns)
            if is_view or func.overloadpacket in _METADATA_MUTATIONS:
                return func(*arguments[0], **arguments[1])
            return self._write(func, arguments, written) if written else self._make(func, arguments)

    def record_fill(self, function: Callable[..., Any], arguments: Arguments, again: Callable[..., Any]) -> None:
        """Record a random initializer of a lazy tensor as one call, regardless of its reads in between.

        Args:
            function: Initializer whose draws depend only on its arguments and the geometry of the first one.
            arguments: Arguments of the call; the first one is the lazy tensor.
            again: Function that replaces the initializer in a replay.
        """
        (target, *rest), kwargs = arguments
        record = op_log_of(target)
        assert record is not None
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            call = record_call(again, arguments, torch.get_rng_state())
            function(self._scratch_like(target), *rest, **kwargs)
        record.writes.append(call)

    def _write(self, operator: Any, arguments: Arguments, written: list[str]) -> Any:
        if self._is_recordable_write(operator, arguments, written) and self._record_write(operator, arguments):
            return arguments[0][0]
        names = [argument.name for argument in operator._schema.arguments]
        values = dict(zip(names, arguments[0], strict=False)) | arguments[1]
        for tensor in tensors_in([values[name] for name in written if name in values]):
            if operator.overloadpacket is torch.ops.aten.resize_ and op_log_of(tensor) is not None:
                raise ConfigError(
                    f"{operator} of a tensor of this LazyInitContext is not supported: build the module that calls it"
                    f" outside of the context"
                )
            materialize_in_place(tensor)
        args, kwargs = materialize_arguments(arguments)
        return operator(*args, **kwargs)

    def _is_recordable_write(self, operator: Any, arguments: Arguments, written: list[str]) -> bool:
        """Return whether a call writes only to its first argument, reproducibly."""
        target = arguments[0][0] if arguments[0] else None
        if not isinstance(target, torch.Tensor) or op_log_of(target) is None:
            return False
        if written != [operator._schema.arguments[0].name] or len(operator._schema.returns) != 1:
            return False
        if not are_dense_cpu(arguments) or num_real_bytes(arguments) > self._min_lazy_bytes:
            return False
        if is_random(operator):
            return operator.overloadpacket in _RNG_DETERMINISTIC
        try:
            args, kwargs = to_meta(arguments)
            operator(*args, **kwargs)
        except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
            return False  # no meta kernel, or invalid arguments, for which the real call raises
        return bool(args[0].shape == target.shape and args[0].stride() == target.stride())

    def _record_write(self, operator: Any, arguments: Arguments) -> bool:
        """Record a call that writes to its first argument; return False if replays would be too expensive."""
        args, kwargs = arguments
        target = args[0]
        record = op_log_of(target)
        assert record is not None
        call = record_call(operator, arguments, torch.get_rng_state() if is_random(operator) else None)
        needs = record.dependencies | _dependencies(call, own=record)
        if len(needs) > _MAX_REPLAY:
            return False
        if is_random(operator):  # advances the generator for later draws
            rest, kwargs = materialize_arguments((args[1:], kwargs))
            operator(self._scratch_like(target), *rest, **kwargs)
        record.writes.append(call)
        record.dependencies = needs
        return True

    def _make(self, operator: Any, arguments: Arguments) -> Any:
        if not are_dense_cpu(arguments):
            args, kwargs = materialize_arguments(arguments)
            return operator(*args, **kwargs)
        if is_random(operator):
            is_predictable = operator.overloadpacket in _IN_PLACE_RANDOM_OPS
        else:
            is_predictable = operator.overloadpacket in _PREDICTABLE or torch.Tag.pointwise in operator.tags
        if is_predictable:
            lazy = self._lazy_from_meta(operator, arguments)
            if lazy is not None:
                return lazy
        state, frozen = torch.get_rng_state(), freeze_generators(arguments)
        args, kwargs = materialize_arguments(arguments)
        results = operator(*args, **kwargs)
        if not self._should_replay(results, (args, kwargs), num_real_bytes(arguments)):
            return results
        draws = is_random(operator) or not torch.equal(state, torch.get_rng_state())  # custom operators lack tags
        call = record_call(operator, frozen, state if draws else None)
        return results if len(_dependencies(call)) > _MAX_REPLAY else self._lazy_results(call, results)

    def _lazy_from_meta(self, operator: Any, arguments: Arguments) -> torch.Tensor | None:
        """Return the lazy result of a call without running it, or None if it must run."""
        twin = _meta_result(operator, arguments)
        if twin is None:
            return None
        num_bytes = twin.untyped_storage().nbytes()
        if num_bytes < self._min_lazy_bytes or num_real_bytes(arguments) * 2 > num_bytes:
            return None
        call = record_call(operator, arguments, torch.get_rng_state() if is_random(operator) else None)
        if len(_dependencies(call)) > _MAX_REPLAY:
            return None
        if is_random(operator):
            fill = _IN_PLACE_RANDOM_OPS[operator.overloadpacket]
            fill(self._scratch_like(twin), generator=arguments[1].get("generator"))
        return self._lazy(call, 0, twin)

    def _scratch_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a scratch tensor of the same geometry for discarded draws. Calls share one buffer."""
        twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        num_bytes = twin.untyped_storage().nbytes()
        if self._scratch is None or self._scratch.nbytes() < num_bytes:
            self._scratch = None
            self._scratch = reserve(num_bytes)
        return view_of(self._scratch, Geometry.of(twin))

    def _should_replay(self, results: Any, arguments: Arguments, kept_bytes: int) -> bool:
        """Return whether results are large and new, and an op log would keep few bytes of arguments."""
        storages = [storage_of(tensor) for tensor in tensors_in(results)]
        addresses = [storage.data_ptr() for storage in storages if storage is not None]
        known = {storage_of(tensor).data_ptr() for tensor in tensors_in(arguments)}  # type: ignore[union-attr]
        if len(addresses) < len(storages) or len(set(addresses)) < len(addresses) or known & set(addresses):
            return False
        sizes = [storage.nbytes() for storage in storages if storage is not None]
        return any(size >= self._min_lazy_bytes for size in sizes) and kept_bytes * 2 <= sum(sizes)

    def _lazy_results(self, call: RecordedCall, results: Any) -> Any:
        if isinstance(results, torch.Tensor):
            return self._lazy(call, 0, results)
        kept = [
            self._lazy(call, index, result)
            if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes() >= self._min_lazy_bytes
            else result
            for index, result in enumerate(results)
        ]
        return type(results)(kept)

    def _lazy(self, call: RecordedCall, output: int, made: torch.Tensor) -> torch.Tensor:
        record = OpLog(
            origin=call,
            output=output,
            geometry=Geometry.of(made),
            device=self._device,
            dependencies=_dependencies(call),
        )
        return make_lazy(record, made.untyped_storage().nbytes())


def _dependencies(call: RecordedCall, own: OpLog | None = None) -> set[LogPrefix]:
    needs: set[LogPrefix] = set()
    for reference in call.references():
        if reference.op_log is not own:
            needs |= {reference.prefix, *reference.op_log.dependencies}
    return needs


def _meta_result(operator: Any, arguments: Arguments) -> torch.Tensor | None:
    """Return the result on meta, or None if there is no meta kernel."""
    args, kwargs = to_meta(freeze_generators(arguments))
    kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    if any(argument.name == "device" for argument in operator._schema.arguments):
        kwargs["device"] = torch.device("meta")
    try:
        result = operator(*args, **kwargs)
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
        return None
    return result if isinstance(result, torch.Tensor) and result.device.type == "meta" else None


# trunc_normal_ redraws until no value is out of bounds (torch 2.13; older versions draw once). Recorded call by call,
# every read of the values would replay all previous rounds. The result depends only on the arguments, the generator and
# the tensor's geometry, so the initializer is recorded as one call.
_NAME = "_no_grad_trunc_normal_"  # called by nn.init.trunc_normal_, also if that name was imported before


@contextmanager
def record_initializers(recorder: Recorder) -> Iterator[None]:
    """Record torch's initializers that read values as one call for lazy tensors; others run unchanged."""
    original = getattr(nn.init, _NAME, None)
    if original is None:
        yield
        return
    setattr(nn.init, _NAME, _recorded(original, recorder))
    try:
        yield
    finally:
        setattr(nn.init, _NAME, original)


def _recorded(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def quiet(*args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # already shown during the build
            original(*args, **kwargs)

    def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        arguments = ((tensor, *args), kwargs)
        if (
            type(tensor) not in (torch.Tensor, nn.Parameter)
            or op_log_of(tensor) is None
            or not are_dense_cpu(arguments)
        ):
            return original(tensor, *args, **kwargs)
        recorder.record_fill(original, arguments, quiet)
        return tensor

    return fill
