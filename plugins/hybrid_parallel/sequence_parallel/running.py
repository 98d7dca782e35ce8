"""The layer of a stack that runs now, and what attention within it has to know."""

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
"""The name of the argument with which a stack's hooks tell a layer's forward about the sequence."""
_STACK, _INTERCEPTION = "_sequence_stack", "_sequence_interception"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a layer of a stack gets beside its own arguments.

    Attributes:
        length: Tokens of the whole sequence.
        hidden: Position or name of the argument that is the hidden states.
        wholes: The same of arguments that are other sequences, as an encoder's states, of which no part is missing.
    """

    length: int
    hidden: int | str
    wholes: tuple[int | str, ...]


class RunningLayer:
    """A layer whose attention sees this rank's tokens only.

    Attributes:
        stack: The stack it is of.
        num_attentions: How often attention has run in it.
        is_attending: Whether attention runs now, so that what it calls is not intercepted again.
        local_sizes: Sequences, and how many tokens of each this rank has; None: not known.
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
        """Those that attention communicates with."""
        ranks = self.stack.splitter.attention_ranks
        if ranks is None:
            raise AssertionError("attention was intercepted that sees all tokens")
        return ranks

    def length_of(self, local_length: int) -> int:
        """Returns how long the whole sequence is of which this rank has so many tokens; see `Stack.length_of`."""
        if self._length is None:
            self._length = self.stack.length_of(local_length)
        return self._length

    @contextmanager
    def part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Surrounds the forward of a part of the layer, which has been given these arguments."""
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
        """Surrounds attention; see `is_attending`."""
        before, self.is_attending = self.is_attending, True
        self.num_attentions += 1
        try:
            yield
        finally:
            self.is_attending = before

    def is_whole(self, key_length: int, local_length: int) -> bool:
        """Returns whether keys of this length are those of another sequence, of which no part is missing.

        Raises:
            ConfigError: They are neither that nor this rank's tokens, or it can't be told.
        """
        fits_whole = any(whole.shape[1] == key_length for whole in self._at_hand)
        if fits_whole and key_length == local_length and not self._is_in_part:
            raise ConfigError(
                f"attention to {key_length} keys may be to this rank's tokens or to another sequence that is as long,"
                " and a layer that does both itself does not tell which: move one of them into a module of its own, or"
                " pad the other sequence by a token"
            )
        if not fits_whole and key_length != local_length:
            raise ConfigError(
                f"attention of {local_length} queries, this rank's tokens, to {key_length} keys: sequence parallelism"
                " has no cache of earlier keys (use_cache=False; generate without it), and another sequence must be an"
                " argument of the layer"
            )
        return fits_whole


class _Current(threading.local):
    layer: RunningLayer | None = None


_current = _Current()
_subclasses: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}


def running_layer() -> RunningLayer | None:
    """Returns the layer that runs in this thread with split attention, if one does."""
    return _current.layer


def is_in_backward() -> bool:
    """Returns whether this runs for activation checkpointing, which computes layers again within backward."""
    return bool(torch._C._current_graph_task_id() >= 0)


@contextmanager
def made_current(layer: RunningLayer) -> Iterator[None]:
    """Makes a layer the running one of this thread."""
    before, _current.layer = _current.layer, layer
    try:
        yield
    finally:
        _current.layer = before


def join_running_layers(
    layer: nn.Module, stack: Stack, interception: Callable[[], AbstractContextManager[Any]] | None = None
) -> None:
    """Exchanges a layer's class for a subclass of the same name, whose forward takes a `Span` and runs within it.

    Activation checkpointing computes a forward again, without hooks around it, so this can't be one.

    Args:
        layer: Of a stack.
        stack: That stack.
        interception: Makes the context of each forward; None: the regions within gather the sequence themselves.
    """
    layer.__dict__[_STACK] = stack
    layer.__dict__[_INTERCEPTION] = interception
    if interception is None:
        layer.__class__ = subclass_of(type(layer), "running", _running_members)
    else:
        layer.__class__ = subclass_of(type(layer), "attending", _attending_members)


def subclass_of(base: type[nn.Module], purpose: str, make: Callable[[Any], dict[str, Any]]) -> type[nn.Module]:
    """Returns a subclass of the same name, with the members that `make(base)` returns; one for each purpose."""
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
            except (RuntimeError, ValueError) as error:  # of shapes that don't fit, of products in attention's place
                if running.num_attentions == 0 and not isinstance(error, ConfigError):
                    raise no_attention(base.__name__) from error
                raise
        if running.num_attentions == 0:
            raise no_attention(base.__name__)
        return output

    return {"forward": forward}


def _attending_members(base: type[nn.Module]) -> dict[str, Any]:
    """Attention is found by a mode and by what runs in this thread, of which a graph would know nothing."""
    return {"forward": not_compiled(_running_members(base)["forward"])}


def no_attention(layer: str) -> ConfigError:
    """Returns what to say of a layer none of whose attention was intercepted, so that tokens saw this rank's only."""
    return ConfigError(
        f"{layer} computes without F.scaled_dot_product_attention or transformers' attention interface, so that"
        " sequence parallelism can't know how it mixes tokens: use one of them"
        " (nn.MultiheadAttention does with need_weights=False), or split the sequence over the tensor-parallel"
        ' ranks (sequence_parallelism_mode="split_gather")'
    )


def _running(stack: Stack, span: Span | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunningLayer:
    if span is None:
        return RunningLayer(stack, None, ())
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    wholes = tuple(given[key] for key in span.wholes)
    return RunningLayer(stack, span.length, wholes, tuple(given[span.hidden].shape[:2]))
