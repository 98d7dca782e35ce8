"""Cross-entropy of a language model in chunks of tokens, so that the logits of a whole sequence are never in memory."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster.core.compiling import not_compiled
from booster.core.deferred_logits import DeferredHead, DeferredLogits, cross_entropy_of_rows
from booster.core.layer_stacks import subclass_of
from booster.errors import ConfigError
from booster.validation import is_count

# Note [Chunked cross-entropy]
# The head, the last layer of a language model, returns its input in the guise of logits (`DeferredLogits`). The
# cross-entropy computes one chunk after another: the head, what followed it, the losses of the tokens. Only the losses
# are kept; backward computes each chunk again, by activation checkpointing. So the logits of one chunk are in memory at
# a time, whatever the plugin: the head is called as a module, with all hooks.

_CUSTOM_FUNCTION = (
    "a custom autograd function got the logits that chunked_cross_entropy() computes in chunks, whose gradient it can't"
    " give back: use torch.nn.functional.cross_entropy, or leave chunked_cross_entropy() out"
)
_CHUNK_BYTES = 2**29  # of the default chunk's logits in fp32


def chunked_cross_entropy(
    model: nn.Module, chunk_size: int | None = None, *, head: str | nn.Module | None = None
) -> nn.Module:
    """Compute a language model's logits and cross-entropy in chunks of tokens, in place; call it before `boost`.

    The loss and the gradients are those of the plain model up to the order of sums. The head runs twice for each chunk,
    once in backward. Outputs that contain logits have them as a tensor that is computed in full if anything else than
    the cross-entropy reads its values, which a warning reports once.

    Args:
        model: The user's model, with a head whose output goes to `torch.nn.functional.cross_entropy`, in the model as
            with `labels`, or in the user's criterion.
        chunk_size: Number of tokens of a chunk; optional, by default as many as have 512 MiB of logits in fp32.
        head: The last layer or its name; optional, defaults to `model.get_output_embeddings()`.

    Returns:
        The model.

    Raises:
        ConfigError: The model is boosted, has no head, or an argument is invalid.

    Collective: no.

    Examples:
        >>> import torch
        >>> from booster import chunked_cross_entropy
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 100))
        >>> model = chunked_cross_entropy(model, chunk_size=4, head="1")
        >>> tokens = torch.arange(12).view(2, 6)
        >>> torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).ndim
        0
    """
    if chunk_size is not None and not is_count(chunk_size):
        raise ConfigError(f"chunk_size={chunk_size!r} is not a number of tokens: give 1 or more, such as 1024")
    module = _find_head(model, head)
    if isinstance(module, _ChunkedHead):
        raise ConfigError("chunked_cross_entropy() was called for this model before: call it once")
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        raise ConfigError(
            f"the head is a {type(module).__name__} without a weight of shape (classes, features): give the last layer,"
            " such as head='lm_head'"
        )
    num_classes = weight.shape[0]
    size = chunk_size or max(_CHUNK_BYTES // (4 * num_classes), 1)
    module.__class__ = subclass_of(type(module), "chunked", mixin=_ChunkedHead)
    module.__dict__["_chunked_head"] = num_classes, size
    return model


def _find_head(model: nn.Module, head: str | nn.Module | None) -> nn.Module:
    if hasattr(model, "unwrap"):
        raise ConfigError("chunked_cross_entropy() got a boosted model: call it before boost()")
    if head is None:
        getter = getattr(model, "get_output_embeddings", None)
        head = getter() if getter is not None else None
        if head is None:
            raise ConfigError(
                f"{type(model).__name__} has no output embeddings, so its head is unknown: name it, as in"
                " head='lm_head'"
            )
    modules = dict(model.named_modules())
    found = modules.get(head) if isinstance(head, str) else head
    if not isinstance(found, nn.Module) or found not in modules.values():
        raise ConfigError(
            f"head={head if isinstance(head, str) else type(head).__name__!r} is not a module of the model: give a name"
            " of model.named_modules(), such as 'lm_head'"
        )
    return found


class _ChunkedHead(nn.Module):
    """Mixin of heads. Overrides `__call__` and not `forward`, so that hooks run around each chunk."""

    @not_compiled
    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        num_classes, chunk_size = self.__dict__["_chunked_head"]
        compute = super().__call__
        if args or kwargs or hidden.dim() < 2:
            return compute(hidden, *args, **kwargs)
        head = _Head.of(self, compute, num_classes, chunk_size=chunk_size)
        return ChunkedLogits.of(hidden, head)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Head(DeferredHead):
    """The head, and the tokens of a chunk."""

    chunk_size: int


class ChunkedLogits(DeferredLogits):
    """Logits that are computed from their hidden states by chunks. Created by `ChunkedLogits.of`."""

    _unsupported = (
        "on logits that chunked_cross_entropy() computes in chunks would change none of them: call it on"
        " `logits.full_tensor()`, or leave chunked_cross_entropy() out"
    )
    _instead = "leave chunked_cross_entropy() out"
    head: _Head

    def full_tensor(self) -> torch.Tensor:
        if not self.is_connected:
            raise ConfigError(_CUSTOM_FUNCTION)
        return super().full_tensor()

    @staticmethod
    def backward_of_all(hidden: torch.Tensor, head: DeferredHead, grad: torch.Tensor) -> torch.Tensor | None:
        raise ConfigError(_CUSTOM_FUNCTION)

    def full_tensor_for(self, function: Callable[..., Any]) -> torch.Tensor:
        is_large = self.numel() > self.head.chunk_size * self.head.num_classes
        if is_large and self.is_connected and self._full is None:
            warnings.warn(
                f"{getattr(function, '__name__', function)} reads the logits that chunked_cross_entropy() computes in"
                f" chunks: all {tuple(self.shape)} of them are computed at once",
                stacklevel=4,
            )
        return self.full_tensor()

    def losses_of(self, hidden: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
        size = self.head.chunk_size
        losses_of = functools.partial(cross_entropy_of_rows, self.head, **options)
        chunks = zip(hidden.split(size), target.split(size), strict=True)
        return torch.cat([_checkpointed(losses_of, *chunk) for chunk in chunks])


def _checkpointed(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False)  # type: ignore[no-any-return]
