"""Runs the dispatcher's calls of a model's constructor: large results become lazy, writes to lazy ones are recorded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from booster.errors import ConfigError

from .op_log import (
    Call,
    GeneratorState,
    Geometry,
    Prefix,
    Record,
    Reference,
    make_lazy,
    map_arguments,
    record_of,
    replay,
    reserve,
    settle,
    storage_of,
    view_of,
)

_aten = torch.ops.aten

# Results whose sizes and strides the meta kernels tell without running the operator.
_PREDICTABLE = frozenset(
    {
        *(_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided),
        *(_aten.zeros, _aten.zeros_like, _aten.new_zeros, _aten.ones, _aten.ones_like, _aten.new_ones),
        *(_aten.full, _aten.full_like, _aten.new_full, _aten.clone, _aten._to_copy),
        *(_aten.tril, _aten.triu, _aten.cat, _aten.stack),
    }
)
# Random factories, and the writer that draws the same numbers. (Results of those themselves would come from malloc, and
# what is freed there is lost between the small tensors of the model that lie around it.)
_DRAW_LIKE = {
    _aten.randn: _aten.normal_.default,
    _aten.randn_like: _aten.normal_.default,
    _aten.rand: _aten.uniform_.default,
    _aten.rand_like: _aten.uniform_.default,
}
# Writers whose draws depend on the shape alone: what the tensor held before is not needed to advance the generator.
_DRAWS_ALIKE = frozenset(
    {
        *(_aten.normal_, _aten.uniform_, _aten.exponential_, _aten.geometric_, _aten.cauchy_, _aten.log_normal_),
        *(_aten.random_, _aten.bernoulli_),
    }
)
# They change which storage a tensor has, not what is in one.
_REWIRE = frozenset(
    {
        *(_aten.set_, _aten.detach_, _aten.squeeze_, _aten.unsqueeze_, _aten.transpose_, _aten.t_),
        *(_aten.as_strided_, _aten.swapaxes_, _aten.swapdims_),
    }
)
# Views with a bit that says how to read the values, which sizes and strides do not tell.
_MARKS = frozenset({_aten._conj, _aten._neg_view})


def is_random(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


def draws_alike(operator: Any) -> bool:
    """Returns whether a random writer draws the same numbers whatever its tensors hold."""
    return operator.overloadpacket in _DRAWS_ALIKE


def is_predictable(operator: Any) -> bool:
    """Returns whether meta tensors tell the geometry of the result."""
    if is_random(operator):
        return operator.overloadpacket in _DRAW_LIKE
    return operator.overloadpacket in _PREDICTABLE or torch.Tag.pointwise in operator.tags


def draw_like(operator: Any) -> Any:
    """Returns the operator that, on a tensor of its result's shape, draws what a predictable random factory draws."""
    return _DRAW_LIKE[operator.overloadpacket]


def is_view(operator: Any) -> bool:
    """Returns whether all that an operator does is to return other views of its argument's storage."""
    results = operator._schema.returns
    return not written_arguments(operator) and any(result.alias_info is not None for result in results)


def keeps_values_unread(operator: Any) -> bool:
    """Returns whether an operator neither reads nor writes what is in a storage."""
    return is_view(operator) or operator.overloadpacket in _REWIRE


def leaves_a_mark(operator: Any) -> bool:
    """Returns whether the result is a view whose values are read in another way."""
    return operator.overloadpacket in _MARKS


def written_arguments(operator: Any) -> list[str]:
    """Returns the names of the arguments that an operator writes to."""
    arguments = operator._schema.arguments
    return [argument.name for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write]


Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_MOST_READS = 16  # of one lazy value while the model is built: after that it is kept, as every read is a replay


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors of nested tuples, lists and dicts."""
    found: list[torch.Tensor] = []
    map_arguments(lambda value: found.append(value) if isinstance(value, torch.Tensor) else None, tree)
    return found


def written_tensors(operator: Any, arguments: Arguments) -> Iterator[torch.Tensor]:
    """Yields the tensors that a call writes to."""
    names = set(written_arguments(operator))
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name in names:
            given = arguments[0][position] if position < len(arguments[0]) else arguments[1].get(argument.name)
            yield from tensors_in([given])


def num_real_bytes(arguments: Arguments) -> int:
    """Returns the bytes of the tensors that are not lazy: a record keeps copies of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(arguments) if record_of(tensor) is None)


def are_ordinary(arguments: Arguments) -> bool:
    """Returns whether a call is about dense unpinned CPU tensors alone."""
    kwargs = arguments[1]
    device, layout = kwargs.get("device"), kwargs.get("layout")
    if (device is not None and torch.device(device).type != "cpu") or kwargs.get("pin_memory"):
        return False
    if layout is not None and layout is not torch.strided:
        return False
    generators: list[torch.Generator] = []
    map_arguments(lambda leaf: generators.append(leaf) if isinstance(leaf, torch.Generator) else None, arguments)
    if any(generator.device.type != "cpu" for generator in generators):
        return False
    return all(storage_of(tensor) is not None for tensor in tensors_in(arguments))


def freeze_generators(arguments: Arguments) -> Arguments:
    """Returns the arguments with the states of generators, as they are now, in their place."""

    def freeze(leaf: Any) -> Any:
        return GeneratorState(leaf.get_state()) if isinstance(leaf, torch.Generator) else leaf

    frozen: Arguments = map_arguments(freeze, arguments)
    return frozen


def make_call(operator: Any, arguments: Arguments, random_state: torch.Tensor | None) -> Call:
    """Returns a call as it can be run again, whatever is done to its arguments afterwards."""

    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        record = record_of(leaf)
        if record is None:
            return _copy(leaf)
        return Reference(record=record, num_writes=len(record.writes), geometry=Geometry.of(leaf))

    return Call(
        function=operator,
        arguments=map_arguments(keep, freeze_generators(arguments)),
        random_state=random_state,
        default_dtype=torch.get_default_dtype(),
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same strides where its storage is not much larger: kernels are chosen by those."""
    storage = tensor.untyped_storage()
    if tensor.is_conj() or tensor.is_neg() or storage.nbytes() > 4096 + 2 * tensor.numel() * tensor.element_size():
        return tensor.detach().clone()
    return view_of(storage.clone(), Geometry.of(tensor))


def meta_twins(arguments: Arguments) -> Arguments:
    """Returns the arguments with tensors that have the same geometry and no values."""

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")

    twins: Arguments = map_arguments(twin, arguments)
    return twins


def with_values(arguments: Arguments) -> Arguments:
    """Returns the arguments with the values of lazy tensors, for a call that runs now."""
    storages: dict[int, torch.UntypedStorage] = {}

    def value_of(leaf: Any) -> Any:
        record = record_of(leaf) if isinstance(leaf, torch.Tensor) else None
        if record is None:
            return leaf
        if id(record) not in storages:
            if not _count_read(leaf, record):
                return leaf
            storages[id(record)] = replay(record)
        return view_of(storages[id(record)], Geometry.of(leaf))

    real: Arguments = map_arguments(value_of, arguments)
    return real


def _count_read(tensor: torch.Tensor, record: Record) -> bool:
    """Returns whether the tensor is still lazy: after many reads it is not."""
    record.num_reads += 1
    if record.num_reads > _MOST_READS:
        settle(tensor)
    return record_of(tensor) is not None


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


# Note [Rejection loops]: trunc_normal_ draws until no value is out of bounds (torch 2.13; older ones drew once). Call
# by call, every look at the values would be a replay of all rounds before. What it leaves depends on its arguments,
# the generator and the tensor's geometry alone, so the whole function is one call of the record.
_NAME = "_no_grad_trunc_normal_"  # what every way to nn.init.trunc_normal_ ends in, also names imported before


@contextmanager
def whole_initialisers(recorder: Recorder) -> Iterator[None]:
    """Makes torch's initialisers that look at values tell the recorder about lazy tensors, and run on others."""
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
            warnings.simplefilter("ignore")  # the build has shown them
            original(*args, **kwargs)

    def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        arguments = ((tensor, *args), kwargs)
        if type(tensor) not in (torch.Tensor, nn.Parameter) or record_of(tensor) is None or not are_ordinary(arguments):
            return original(tensor, *args, **kwargs)
        recorder.record_fill(original, arguments, quiet)
        return tensor

    return fill
