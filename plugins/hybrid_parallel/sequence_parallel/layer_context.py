"""Context of the running layer of a stack, for its attention."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from booster.errors import ConfigError

from .group import SequenceParallelGroup
from .splitters import SequenceSplitter

SEQUENCE_INFO = "sequence_info"
"""Name of the argument with which a stack's hooks pass a `SequenceInfo` to a layer's forward."""


class ShardedStack(Protocol):
    """Layers that run on a shard of a sequence; implemented by `LayerStack`."""

    splitter: SequenceSplitter
    shards_attention: bool

    def full_length(self, local_length: int) -> int:
        """Return the full length of a sequence from this rank's number of tokens."""
        ...

    def is_of_examples(self, shape: torch.Size) -> bool:
        """Whether random numbers of this shape hold for all tokens of an example."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInfo:
    """Information about the sequence that a layer of a stack gets in addition to its arguments.

    Attributes:
        length: Tokens of the full sequence.
        hidden: Position or name of the hidden states' argument.
        unsharded: Positions or names of arguments that are other, unsharded sequences, such as encoder states.
    """

    length: int
    hidden: int | str
    unsharded: tuple[int | str, ...]


class LayerContext:
    """Context of a running layer whose attention sees this rank's tokens only.

    Attributes:
        stack: The layer's stack.
        num_attentions: Number of attention calls so far.
        is_in_attention: Whether attention is running, whose inner calls are not dispatched again.
        local_sizes: Number of sequences and of this rank's tokens, or None if unknown.
        visible: Whether the running submodule got each of the layer's unsharded arguments, or None between submodules.
    """

    visible: tuple[bool, ...] | None

    def __init__(
        self,
        stack: ShardedStack,
        length: int | None,
        unsharded: tuple[torch.Tensor, ...],
        local_sizes: tuple[int, ...] | None = None,
    ) -> None:
        self.stack = stack
        self.num_attentions = 0
        self.is_in_attention = False
        self.local_sizes = local_sizes
        self._length = length
        self._unsharded = unsharded
        self.visible = None

    @property
    def sp_group(self) -> SequenceParallelGroup:
        """The group of sequence-parallel attention."""
        sp_group = self.stack.splitter.attention_group
        if sp_group is None:
            raise AssertionError("attention that sees all tokens was intercepted")
        return sp_group

    def full_length(self, local_length: int) -> int:
        """Return the full length of a sequence from this rank's number of tokens; see `LayerStack.full_length`."""
        if self._length is None:
            self._length = self.stack.full_length(local_length)
        return self._length

    @contextmanager
    def submodule(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Context of a submodule's forward with these arguments."""
        previous = self.visible
        given = [*args, *kwargs.values()]
        self.visible = tuple(any(tensor is one for one in given) for tensor in self._unsharded)
        try:
            yield
        finally:
            self.visible = previous

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Context of an attention call; see `is_in_attention`."""
        previous, self.is_in_attention = self.is_in_attention, True
        self.num_attentions += 1
        try:
            yield
        finally:
            self.is_in_attention = previous

    def is_unsharded(self, key_length: int, local_length: int) -> bool:
        """Whether keys of this length belong to another, unsharded sequence.

        Raises:
            ConfigError: The keys are neither that nor this rank's tokens, or both are possible.
        """
        fits = [tensor.shape[1] == key_length for tensor in self._unsharded]
        fits_unsharded = any(fits if self.visible is None else map(all, zip(fits, self.visible, strict=True)))
        if fits_unsharded and key_length == local_length and self.visible is None:
            raise ConfigError(
                f"attention to {key_length} keys may be to this rank's tokens or to another sequence of the same"
                " length, which is ambiguous in a layer that calls both itself: move one of them into a separate"
                " module, or pad the other sequence by a token"
            )
        if not fits_unsharded and key_length != local_length:
            raise ConfigError(
                f"attention of {local_length} queries, this rank's tokens, to {key_length} keys: {_NO_CACHE}, and"
                " another sequence must be an argument of the layer"
            )
        return fits_unsharded


_NO_CACHE = (
    "sequence parallelism has no key-value cache (set use_cache=False, and generate without sequence parallelism)"
)


class _Current(threading.local):
    def __init__(self) -> None:
        self.layer: LayerContext | None = None  # torch.compile of torch 2.10 would take a default of the class for it


_current = _Current()


def current_layer() -> LayerContext | None:
    """Return the context of this thread's running layer, or None."""
    return _current.layer


def is_in_backward() -> bool:
    """Whether this is a recomputation of activation checkpointing, which runs inside of backward."""
    return bool(torch._C._current_graph_task_id() >= 0)


@contextmanager
def enter_layer(layer: LayerContext) -> Iterator[None]:
    """Set the running layer of this thread."""
    previous, _current.layer = _current.layer, layer
    try:
        yield
    finally:
        _current.layer = previous


def no_attention_error(layer: str, given: Iterable[Any] = ()) -> ConfigError:
    """Return the error for a layer without a dispatched attention call, which would see this rank's tokens only.

    Args:
        layer: Class name of the layer.
        given: Its arguments; optional.
    """
    # A rank whose few tokens do not fit to the cached ones fails before its attention.
    if any(hasattr(one, "get_seq_length") and one.get_seq_length() for one in given):
        return ConfigError(f"{layer} got keys and values of earlier tokens, but {_NO_CACHE}")
    return ConfigError(
        f"{layer} uses neither F.scaled_dot_product_attention nor transformers' attention interface, which sequence"
        " parallelism replaces: use one of them (nn.MultiheadAttention does with need_weights=False), or shard the"
        ' sequence over the tensor-parallel ranks (sequence_parallelism_mode="split_gather")'
    )
