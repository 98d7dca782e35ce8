"""Context of the running layer of a stack, for its attention."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster.errors import ConfigError
from booster.plugins.sharding.compiling import not_compiled

if TYPE_CHECKING:
    from booster.plugins.hybrid_parallel.sequence_parallel.ranks import SequenceParallelRanks
    from booster.plugins.hybrid_parallel.sequence_parallel.stacks import Stack

__all__ = [
    "SPAN",
    "RunningLayer",
    "Span",
    "is_in_backward",
    "join_running_layers",
    "made_current",
    "no_attention",
    "running_layer",
    "subclass_of",
]

SPAN = "sequence_span"
"""Name of the argument with which a stack's hooks pass a `Span` to a layer's forward."""
_STACK, _INTERCEPTION = "_sequence_stack", "_sequence_interception"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Information about the sequence that a layer of a stack gets in addition to its arguments.

    Attributes:
        length: Tokens of the full sequence.
        hidden: Position or name of the hidden states' argument.
        wholes: Positions or names of arguments that are other, unsharded sequences, such as encoder states.
    """

    length: int
    hidden: int | str
    wholes: tuple[int | str, ...]


class RunningLayer:
    """Context of a running layer whose attention sees this rank's tokens only.

    Attributes:
        stack: The layer's stack.
        num_attentions: Number of attention calls so far.
        is_attending: Whether attention is running, whose inner calls are not dispatched again.
        local_sizes: Number of sequences and of this rank's tokens, or None if unknown.
    """

    def __init__(
        self,
        stack: Stack,
        length: int | None,
        wholes: tuple[torch.Tensor, ...],
        local_sizes: tuple[int, ...] | None = None,
    ) -> None:
        self.stack = stack
        self.num_attentions = 0
        self.is_attending = False
        self.local_sizes = local_sizes
        self._length = length
        self._wholes = wholes
        self._at_hand = wholes
        self._is_in_part = False

    @property
    def ranks(self) -> SequenceParallelRanks:
        """The group of sequence-parallel attention."""
        ranks = self.stack.splitter.attention_ranks
        if ranks is None:
            raise AssertionError("attention that sees all tokens was intercepted")
        return ranks

    def length_of(self, local_length: int) -> int:
        """Return the full length of a sequence from this rank's number of tokens; see `Stack.length_of`."""
        if self._length is None:
            self._length = self.stack.length_of(local_length)
        return self._length

    @contextmanager
    def part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Context of a submodule's forward with these arguments."""
        before = self._at_hand, self._is_in_part
        given = [*args, *kwargs.values()]
        self._at_hand = tuple(whole for whole in self._wholes if any(whole is one for one in given))
        self._is_in_part = True
        try:
            yield
        finally:
            self._at_hand, self._is_in_part = before

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Context of an attention call; see `is_attending`."""
        before, self.is_attending = self.is_attending, True
        self.num_attentions += 1
        try:
            yield
        finally:
            self.is_attending = before

    def is_whole(self, key_length: int, local_length: int) -> bool:
        """Whether keys of this length belong to another, unsharded sequence.

        Raises:
            ConfigError: The keys are neither that nor this rank's tokens, or both are possible.
        """
        fits_whole = any(whole.shape[1] == key_length for whole in self._at_hand)
        if fits_whole and key_length == local_length and not self._is_in_part:
            raise ConfigError(
                f"attention to {key_length} keys may be to this rank's tokens or to another sequence of the same"
                " length, which is ambiguous in a layer that calls both itself: move one of them into a separate"
                " module, or pad the other sequence by a token"
            )
        if not fits_whole and key_length != local_length:
            raise ConfigError(
                f"attention of {local_length} queries, this rank's tokens, to {key_length} keys: sequence parallelism"
                " has no key-value cache (set use_cache=False, and generate without sequence parallelism), and another"
                " sequence must be an argument of the layer"
            )
        return fits_whole


class _Current(threading.local):
    layer: RunningLayer | None = None


_current = _Current()
_subclasses: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}


def running_layer() -> RunningLayer | None:
    """Return the context of this thread's running layer, or None."""
    return _current.layer


def is_in_backward() -> bool:
    """Whether this is a recomputation of activation checkpointing, which runs inside of backward."""
    return bool(torch._C._current_graph_task_id() >= 0)


@contextmanager
def made_current(layer: RunningLayer) -> Iterator[None]:
    """Set the running layer of this thread."""
    before, _current.layer = _current.layer, layer
    try:
        yield
    finally:
        _current.layer = before


def join_running_layers(
    layer: nn.Module, stack: Stack, interception: Callable[[], AbstractContextManager[Any]] | None = None
) -> None:
    """Replace a layer's class by a subclass of the same name whose forward takes a `Span` and sets the context.

    This is not a hook, because activation checkpointing recomputes a forward without its hooks.

    Args:
        layer: Layer of a stack.
        stack: The stack.
        interception: Factory of the context manager that dispatches attention; optional, defaults to none because
            tensor-parallel regions gather the sequence.
    """
    layer.__dict__[_STACK] = stack
    layer.__dict__[_INTERCEPTION] = interception
    if interception is None:
        layer.__class__ = subclass_of(type(layer), "running", _running_members)
    else:
        layer.__class__ = subclass_of(type(layer), "attending", _attending_members)


def subclass_of(base: type[nn.Module], purpose: str, make: Callable[[Any], dict[str, Any]]) -> type[nn.Module]:
    """Return a subclass of the same name with the members of `make(base)`, cached by purpose."""
    if (base, purpose) not in _subclasses:
        members = {**make(base), "__module__": base.__module__, "__doc__": base.__doc__}
        _subclasses[base, purpose] = type(base.__name__, (base,), members)
    return _subclasses[base, purpose]


def _running_members(base: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        span: Span | None = kwargs.pop(SPAN, None)
        stack, interception = self.__dict__[_STACK], self.__dict__[_INTERCEPTION]
        if span is not None:
            stack.splitter.begin_layer(span.length)
        if interception is None or (span is None and not is_in_backward()):
            return base.forward(self, *args, **kwargs)
        running = _running(stack, span, args, kwargs)
        with made_current(running), interception():
            try:
                output = base.forward(self, *args, **kwargs)
            except (RuntimeError, ValueError) as error:  # shape errors of attention implemented by plain matmuls
                if running.num_attentions == 0 and not isinstance(error, ConfigError):
                    raise no_attention(base.__name__) from error
                raise
        if running.num_attentions == 0:
            raise no_attention(base.__name__)
        return output

    return {"forward": forward}


def _attending_members(base: type[nn.Module]) -> dict[str, Any]:
    """Not compiled: a compiled graph would bypass the function mode and the thread's context."""
    return {"forward": not_compiled(_running_members(base)["forward"])}


def no_attention(layer: str) -> ConfigError:
    """Return the error for a layer without a dispatched attention call, which would see this rank's tokens only."""
    return ConfigError(
        f"{layer} uses neither F.scaled_dot_product_attention nor transformers' attention interface, which sequence"
        " parallelism replaces: use one of them (nn.MultiheadAttention does with need_weights=False), or shard the"
        ' sequence over the tensor-parallel ranks (sequence_parallelism_mode="split_gather")'
    )


def _running(stack: Stack, span: Span | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunningLayer:
    if span is None:
        return RunningLayer(stack, None, ())
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    wholes = tuple(given[key] for key in span.wholes)
    return RunningLayer(stack, span.length, wholes, tuple(given[span.hidden].shape[:2]))
