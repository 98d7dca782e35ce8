"""Stacks of layers that run on sharded tokens."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from booster.core.compiling import not_compiled
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.group import TensorParallelGroup
from booster.plugins.hybrid_parallel.tensor_parallel.mappings import (
    copy_to_tp_region,
    gather_from_tp_region,
    scatter_to_tp_region,
)
from booster.pytree import iter_tensors, map_tensors

from .attention_dispatch import install_layer_context
from .layer_context import SEQUENCE_INFO, SequenceInfo, is_in_backward, no_attention_error
from .recorded_outputs import CapturedOutputs, mark_sharded
from .splitters import SequenceSplitter

# Names by which transformers models call replaceable attention; other models implement it with plain matmuls.
_ATTENTION = re.compile(r"ALL_ATTENTION_FUNCTIONS|scaled_dot_product_attention|multi_head_attention_forward")
_MIXES_TOKENS: tuple[type[nn.Module], ...] = (_ConvNd, _BatchNorm, nn.RNNBase, nn.InstanceNorm1d, nn.AvgPool1d)


def check_last_layers(model: nn.Module, stacks: Sequence[Sequence[str]]) -> None:
    """Check that the last layer of each stack, behind which tokens are gathered, is called as the last one only.

    Args:
        model: The user's model.
        stacks: Names of the layers of each stack.

    Raises:
        ConfigError: The last entry of a list of layers is one of the others again.
    """
    for stack in filter(None, stacks):
        owner = stack[-1].rpartition(".")[0]
        entries = list(model.get_submodule(owner)._modules.values())
        is_repeated = len(set(map(id, entries))) < len(entries)
        if is_repeated and entries[-1] is not model.get_submodule(stack[-1]):
            raise ConfigError(
                f"the last layer of {owner!r} is an earlier one again, and with a sharded sequence tokens are gathered"
                f" behind the last one: make it a layer of its own, or let the forward call the layers"
                " several times in a loop"
            )


def check_only_attention_mixes_tokens(model: nn.Module, stacks: Sequence[Sequence[str]]) -> None:
    """Check that no module in a stack's layers mixes tokens, except for replaceable attention.

    Functions that mix tokens are only detected in the first batch. Irreplaceable attention of transformers layers is
    detected here.

    Args:
        model: The user's model.
        stacks: Names of the layers of each stack.

    Raises:
        ConfigError: There is such a module.
    """
    for name in (name for stack in stacks for name in stack):
        if _has_plain_attention(model.get_submodule(name)):
            raise no_attention_error(name)
        for inner, module in model.get_submodule(name).named_modules():
            if isinstance(module, _MIXES_TOKENS):
                raise ConfigError(
                    f"{name}.{inner} is a {type(module).__name__}, which mixes tokens, but sequence parallelism"
                    " communicates in attention only: shard the layers instead (tp_size), or move the module out of"
                    " the stack of layers"
                )


def _has_plain_attention(layer: nn.Module) -> bool:
    """Whether a layer's code is in transformers files only, none of which calls replaceable attention."""
    files = {type(module).__module__ for module in layer.modules()}
    if any(isinstance(module, nn.MultiheadAttention) for module in layer.modules()):
        return False
    own = [name for name in files if not name.startswith("torch.")]
    is_transformers = all(name.startswith("transformers.") for name in own)
    return is_transformers and bool(own) and not any(_calls_attention(name) for name in own)


@functools.cache
def _calls_attention(module_name: str) -> bool:
    try:
        return _ATTENTION.search(inspect.getsource(sys.modules[module_name])) is not None
    except OSError:
        return True  # no source code; the first batch detects it


_HIDDEN = "hidden_states"
_TOKENS = 1  # the dimension of hidden states that is the sequence


@dataclass(slots=True)
class _StackForward:
    length: int
    captured: CapturedOutputs
    # Unsharded arguments and their copies, by the argument's id.
    replicated: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class LayerStack:
    """Consecutive layers of a model that run on sharded hidden states; created by `attach_stack`.

    Hidden states (batch, tokens, features) are sharded before the first layer and gathered after the last, unless these
    are in other chunks of a pipeline, which pass on each rank's tokens. In between,
    the full sequence length, which differs between batches, cannot be inferred from a tensor. So the stack passes it to
    each layer's forward as an additional argument: activation checkpointing stores it with the other arguments, and a
    recomputation gets it even after other batches. If hooks are recomputed as well, in backward, the first layer sees
    the full sequence; another one uses the only length seen so far, or else an all-reduce.

    Attributes:
        splitter: Sharding of the sequence.
        begins_sharded: Whether the first layer gets this rank's tokens, of another chunk's.
        ends_sharded: Whether the last layer passes them on.
        shards_attention: Whether attention sees this rank's tokens only.
        num_sequences: Number of sequences of the last forward.
        last_lengths: Number of this rank's tokens and of all of a sequence in the last forward.
    """

    def __init__(self, splitter: SequenceSplitter, *, begins_sharded: bool, ends_sharded: bool) -> None:
        self.splitter = splitter
        self.begins_sharded = begins_sharded
        self.ends_sharded = ends_sharded
        self.shards_attention = splitter.attention_group is not None
        self.num_sequences = 1
        self.last_lengths = (1, 1)
        self._num_ranks = 0 if splitter.attention_group is None else splitter.attention_group.size
        self._forward: _StackForward | None = None
        self._lengths_seen: set[int] = set()
        self._short_lengths: set[int] = set()  # seen, of those that could be taken for others by a rank's part

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerStack:
        return self

    @property
    def is_open(self) -> bool:
        """Whether the first layer has run in this forward, and the last one has not."""
        return self._forward is not None

    def drop_forward(self) -> None:
        """Drop the state of a forward that did not end."""
        self._forward = None

    def full_length(self, local_length: int) -> int:
        """Return the full length of a sequence from this rank's number of tokens.

        Collective: in backward, after sequences of several lengths.
        """
        if self._forward is not None and not is_in_backward():
            return self._forward.length
        if len(self._lengths_seen) == 1:
            return next(iter(self._lengths_seen))
        total = self.splitter.find_length(local_length)
        if local_length not in self._short_lengths or total != local_length * self._num_ranks:
            return total
        if total in self._short_lengths:
            raise ConfigError(
                f"a layer with {local_length} tokens is computed again without its stack, after sequences of"
                f" {local_length} tokens, which all ranks have, and of {total}: checkpoint by"
                " checkpoint_activations(model), or pad sequences to more tokens than sequence-parallel ranks"
            )
        return local_length

    def begin(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return this rank's tokens of the hidden states, and the full length."""
        if x.dim() != 3:
            raise ConfigError(
                f"the first layer of a stack got hidden states of shape {tuple(x.shape)}, but sequence parallelism"
                " shards the second dimension of (batch, tokens, features): pass this shape, or disable it"
            )
        length = self._received_length(x) if self.begins_sharded else x.shape[_TOKENS]
        if len(self._lengths_seen) < 2:  # `full_length` only distinguishes one length from several
            self._lengths_seen.add(length)
        self._forward = None
        if not is_in_backward():
            mode = "" if self.splitter.attention_group is None else self.splitter.attention_group.mode
            captured = CapturedOutputs(
                sees_all_tokens=not self.shards_attention, divided_by=f"sequence_parallelism_mode={mode!r}"
            )
            self._forward = _StackForward(length, captured)
        if length < self._num_ranks**2:
            self._short_lengths.add(length)
        hidden = x if self.begins_sharded else self.splitter.scatter(x, _TOKENS)
        self.num_sequences, self.last_lengths = x.shape[0], (hidden.shape[_TOKENS], length)
        return hidden, length

    def enter_stream(self, length: int, *, is_first: bool) -> None:
        """Let a layer draw random numbers from this rank's stream."""
        if length >= self._num_ranks:  # not where all ranks compute all, see Note [Short sequences]
            self.splitter.rng.enter(force=is_first)

    def leave_stream(self, *, is_last: bool) -> None:
        """Let the model draw the same random numbers on all ranks after a layer.

        A model that skips layers at random thus skips the same ones on all ranks.
        """
        if is_last:
            self.splitter.rng.leave()
        else:
            self.splitter.rng.share()

    def is_of_examples(self, shape: torch.Size) -> bool:
        """Whether random numbers of this shape hold for all tokens of an example.

        Features are those of all ranks where the sequence has an axis of its own only.
        """
        if all(size == 1 for size in shape[1:]):
            return len(shape) > 2 or shape.numel() in (1, self.num_sequences)
        has_several_tokens = self.last_lengths[1] >= 2 * self._num_ranks  # on each rank
        return self.shards_attention and has_several_tokens and len(shape) > 2 and shape[1] == 1

    def _received_length(self, x: torch.Tensor) -> int:
        if is_in_backward():
            return self.full_length(x.shape[_TOKENS])
        noted = noted_full_length(x)
        return self.splitter.find_length(x.shape[_TOKENS]) if noted is None else noted

    def end(self, output: Any, length: int) -> Any:
        """Return a layer's output with gathered hidden states, or with this rank's for another chunk."""

        def gather(x: torch.Tensor) -> torch.Tensor:
            if self._forward is not None:
                self._forward.captured.gather(x.shape, lambda noted, dim: self.splitter.gather(noted, dim, length))
            return x if self.ends_sharded else self.splitter.gather(x, _TOKENS, length)

        gathered = map_hidden(output, gather)
        if self.ends_sharded:
            note_full_length(gathered, length)
        self.splitter.set_sequences(None)
        self._forward = None
        return gathered

    def continue_length(self, x: torch.Tensor, index: int) -> int:
        """Return the full sequence length for a layer after the first."""
        if self._forward is None and not is_in_backward():
            raise ConfigError(
                f"layer {index} of a stack ran without the layers before it, but sequence parallelism shards hidden"
                " states at the first one: do not drop or call single layers (layerdrop=0), or disable it"
            )
        return self.full_length(x.shape[_TOKENS])

    def replicated(self, x: torch.Tensor, *, is_new: bool) -> torch.Tensor:
        """Return the copy of an unsharded argument for computation on shards, one for all layers that get it.

        Args:
            x: The argument.
            is_new: Whether a tensor without a copy comes from outside of the stack.
        """
        known = self._forward.replicated.get(id(x)) if self._forward is not None else None
        if known is not None:
            return known[1]
        if not is_new:
            return x
        copy = self.splitter.replicate(x)
        if self._forward is not None:
            self._forward.replicated[id(x)] = (x, copy)
        return copy


class _LayerHooks:
    """Hooks of the layer of an index in a stack, which the constructor registers; the layer is not referenced."""

    def __init__(self, layer: nn.Module, stack: LayerStack, index: int, *, is_last: bool) -> None:
        self._stack = stack
        self._index = index
        self._is_last = is_last
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(layer.forward).parameters.values()
        self._names = tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
        layer.register_forward_pre_hook(self.pre_forward, with_kwargs=True)
        self._post_forward_id = layer.register_forward_hook(self.post_forward, with_kwargs=True).id

    @not_compiled
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        key = hidden_key(args, kwargs)
        if self._index == 0:
            hidden, length = self._stack.begin(named[key])
            if self._is_last:  # run after transformers' hooks, which are registered at the first call
                hooks = module._forward_hooks
                hooks[self._post_forward_id] = hooks.pop(self._post_forward_id)
        else:
            hidden, length = named[key], self._stack.continue_length(named[key], self._index)
        unsharded: list[int | str] = []
        for other in named:
            if other != key:
                named[other] = self._argument(other, named[other], length, unsharded)
        named[key] = hidden
        named[SEQUENCE_INFO] = SequenceInfo(length=length, hidden=key, unsharded=tuple(unsharded))
        if module.training:
            self._stack.enter_stream(length, is_first=self._index == 0)
        return tuple(named.pop(position) for position in range(len(args))), named

    @not_compiled
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Gather the hidden states of the last layer, or mark those of another one as sharded."""
        splitter, length = self._stack.splitter, kwargs[SEQUENCE_INFO].length
        if module.training:
            self._stack.leave_stream(is_last=self._is_last)
        if self._is_last:
            return self._stack.end(output, length)
        if not is_in_backward():
            mark_sharded(output, lambda x: splitter.gather(x, _TOKENS, length))
        return None

    def _argument(self, key: int | str, value: Any, length: int, unsharded: list[int | str]) -> Any:
        if isinstance(key, str):
            name = key
        else:
            name = self._names[key] if key < len(self._names) else ""  # one of `*args`
        splitter = self._stack.splitter

        def change(tensor: torch.Tensor) -> torch.Tensor:
            dim = splitter.token_dim(name, tensor, length)
            if dim is not None:
                return splitter.scatter(tensor, dim)
            is_states = tensor.dim() == 3 and tensor.is_floating_point()
            if is_states and tensor is value:
                unsharded.append(key)
            needs_sharing = tensor.requires_grad and torch.is_grad_enabled()
            is_new = self._index == 0 or is_states
            return self._stack.replicated(tensor, is_new=is_new) if needs_sharing else tensor

        return map_tensors(change, value)


def attach_stack(
    layers: Sequence[nn.Module],
    splitter: SequenceSplitter,
    *,
    begins_sharded: bool = False,
    ends_sharded: bool = False,
) -> LayerStack:
    """Make consecutive layers run on sharded hidden states; their parameters are unchanged.

    Hooks shard and gather the hidden states, and the layers' classes are replaced by subclasses of the same name. Call
    this once, before activation checkpointing is applied to the layers.

    Args:
        layers: Layers in execution order. Their hidden states (batch, tokens, features) are the first positional
            argument or `hidden_states`, and the output or the first element of a tuple.
        splitter: Sharding of the sequence.
        begins_sharded: If True, the first layer gets this rank's tokens, from another chunk of a pipeline.
        ends_sharded: If True, the last layer returns this rank's tokens, for another chunk.

    Returns:
        The stack, which the layers reference.

    Collective: no; the layers' calls are.
    """
    stack = LayerStack(splitter, begins_sharded=begins_sharded, ends_sharded=ends_sharded)
    for index, layer in enumerate(layers):
        _LayerHooks(layer, stack, index, is_last=index == len(layers) - 1)
        install_layer_context(layer, stack)
    return stack


def run_on_all_tokens(block: nn.Module, name: str, tp_group: TensorParallelGroup) -> None:
    """Gather the tokens at the input of a module, and return this rank's of its output.

    A sequence is sharded outside of the module. In it all ranks compute all tokens, as without a sharded sequence, so
    that the gradient of its input is complete on each rank: it is scattered, not reduced.

    Args:
        block: Module in a layer of a stack. Its input and output are tokens, as those of a layer.
        name: Its name.
        tp_group: The tensor-parallel group.

    Collective: no; the module's forward and backward are.
    """

    def along_tokens(hidden: torch.Tensor, mapping: Callable[..., torch.Tensor]) -> torch.Tensor:
        sizes = tp_group.token_sizes(is_flat=False)
        if hidden.dim() >= 3:
            return mapping(hidden, tp_group, sizes, 1)
        sequences = hidden.unflatten(0, (tp_group.num_sequences, -1))  # of flattened tokens
        return mapping(sequences, tp_group, sizes, 1).flatten(0, 1)

    def gather(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        key = hidden_key(args, kwargs)
        num_tokens, shape = tp_group.token_sizes(is_flat=False)[tp_group.rank], named[key].shape
        if shape[:2] != (tp_group.num_sequences, num_tokens) and shape[:1] != (tp_group.num_sequences * num_tokens,):
            raise ConfigError(
                f"{name} got a tensor of shape {tuple(shape)}, which is not one of (batch, tokens, features), with this"
                f" rank's {num_tokens} tokens: use sequence_parallelism_mode='all_to_all', which has a separate axis"
            )
        hidden = named[key]
        full = along_tokens(hidden, gather_from_tp_region)
        named = {key: full if one is hidden else one for key, one in named.items()}  # also as keys and values
        return tuple(named.pop(position) for position in range(len(args))), named

    def scatter(_: nn.Module, args: Any, output: Any) -> Any:
        output = map_hidden(output, lambda full: along_tokens(full, scatter_to_tp_region))
        if type(output) in (tuple, list):  # a weight that the layer uses for its tokens gets partial gradients there
            copied = [copy_to_tp_region(one, tp_group) if isinstance(one, nn.Parameter) else one for one in output]
            return type(output)(copied)
        return output

    block.register_forward_pre_hook(gather, with_kwargs=True)
    block.register_forward_hook(scatter)


def hidden_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    """Return the position or name of the hidden states among a layer's arguments."""
    if args and isinstance(args[0], torch.Tensor):
        return 0
    if isinstance(kwargs.get(_HIDDEN), torch.Tensor):
        return _HIDDEN
    tensors = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    if not args and tensors:
        return tensors[0]
    raise ConfigError(
        f"a layer of a stack was called with {[type(value).__name__ for value in args]} and {sorted(kwargs)}, which"
        " contain no hidden states to shard: pass them first, or as hidden_states="
    )


_FULL_LENGTH = "_full_length"


def note_full_length(output: Any, length: int) -> None:
    """Note the number of tokens of the full sequence on hidden states that are this rank's tokens."""
    map_hidden(output, lambda x: setattr(x, _FULL_LENGTH, length) or x)  # type: ignore[func-returns-value]


def noted_full_length(output: Any) -> int | None:
    """Return what `note_full_length` has noted, or None."""
    return next((getattr(one, _FULL_LENGTH) for one in iter_tensors(output) if hasattr(one, _FULL_LENGTH)), None)


def map_hidden(output: Any, function: Any) -> Any:
    """Return a layer's output with a function applied to its hidden states."""
    if isinstance(output, torch.Tensor):
        return function(output)
    if type(output) in (tuple, list) and output and isinstance(output[0], torch.Tensor):
        return type(output)((function(output[0]), *output[1:]))
    if isinstance(output, dict) and isinstance(output.get(_HIDDEN), torch.Tensor):
        output[_HIDDEN] = function(output[_HIDDEN])
        return output
    raise ConfigError(
        f"the last layer of a stack returned {type(output).__name__}, which contains no hidden states to gather: return"
        " a tensor, or a tuple with the tensor as first element"
    )
