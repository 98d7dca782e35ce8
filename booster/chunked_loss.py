"""Cross-entropy of a language model in chunks of tokens, so that the logits of a whole sequence are never in memory."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster.core.compiling import not_compiled
from booster.core.layer_stacks import subclass_of
from booster.core.partial_logits import PartialLogits
from booster.errors import ConfigError
from booster.validation import is_count

# Note [Chunked cross-entropy]
# The head, the last layer of a language model, returns its input in the guise of logits. What models and losses do with
# logits before the cross-entropy (casts, scaling, soft caps, shifts of the tokens) is recorded. The cross-entropy then
# computes one chunk after another: the head, the recorded operations, the losses of its tokens. Only the losses are
# kept; backward computes each chunk again, by activation checkpointing. So the logits of one chunk are in memory at a
# time, whatever the plugin: the head is called as a module, with all hooks.

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
    module.__dict__["_chunked_head"] = _HeadConfig(num_classes, size)
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


@dataclass(frozen=True, slots=True)
class _HeadConfig:
    """Number of classes, and tokens of a chunk."""

    num_classes: int
    chunk_size: int


class _ChunkedHead(nn.Module):
    """Mixin of heads. Overrides `__call__` and not `forward`, so that hooks run around each chunk."""

    @not_compiled
    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        config: _HeadConfig = self.__dict__["_chunked_head"]
        compute = super().__call__
        if args or kwargs or hidden.dim() < 2:
            return compute(hidden, *args, **kwargs)
        return ChunkedLogits.of(hidden, _Head(compute, tuple(self.parameters()), config))


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """The head as a function of hidden states, and the functions that follow it.

    Attributes:
        compute: Call of the module.
        parameters: Its parameters.
        config: Sizes.
        steps: Elementwise functions of the logits, in order.
    """

    compute: Callable[[torch.Tensor], torch.Tensor]
    parameters: tuple[nn.Parameter, ...]
    config: _HeadConfig
    steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.compute(hidden)
        for step in self.steps:
            logits = step(logits)
        return logits


class ChunkedLogits(PartialLogits):
    """Logits that are computed from their hidden states by chunks. Created by `ChunkedLogits.of`.

    Attributes:
        hidden: Hidden states.
        head: The head, and what follows it.
    """

    _unsupported = (
        "on logits that chunked_cross_entropy() computes in chunks would change none of them: call it on"
        " `logits.full_tensor()`, or leave chunked_cross_entropy() out"
    )
    hidden: torch.Tensor
    head: _Head
    _full: torch.Tensor | None
    _node: object

    @staticmethod
    def of(hidden: torch.Tensor, head: _Head, like: torch.Tensor | None = None) -> ChunkedLogits:
        """Return the logits of hidden states.

        Args:
            hidden: Hidden states of shape (..., features).
            head: The head.
            like: Tensor of the logits' dtype and device, optional; by default those of a linear layer's output.
        """
        if like is None:
            kind = hidden.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
            like = hidden.new_empty(0, dtype=dtype)
        # The parameters are inputs so that what walks over the graph, such as DDP, finds them.
        logits: ChunkedLogits = _Wrap.apply(  # type: ignore[no-untyped-call]
            hidden, head.config.num_classes, like, *head.parameters
        )
        logits.hidden, logits.head, logits._full, logits._node = hidden, head, None, logits.grad_fn
        return logits

    @property
    def is_connected(self) -> bool:
        return self.grad_fn is self._node

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> ChunkedLogits:
        return ChunkedLogits.of(function(self.hidden), self.head, self._like())

    def map_elements(self, function: Callable[[torch.Tensor], torch.Tensor]) -> ChunkedLogits:
        head = _Head(self.head.compute, self.head.parameters, self.head.config, (*self.head.steps, function))
        return ChunkedLogits.of(self.hidden, head, function(self._like()))

    def _like(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def full_tensor(self) -> torch.Tensor:
        if not self.is_connected:
            raise ConfigError(_CUSTOM_FUNCTION)
        if self._full is None or (torch.is_grad_enabled() and not self._full.requires_grad):
            self._full = self.head(self.hidden)
        return self._full

    def full_tensor_for(self, function: Callable[..., Any]) -> torch.Tensor:
        config = self.head.config
        is_large = self.numel() > config.chunk_size * config.num_classes
        if is_large and self.is_connected and self._full is None:
            warnings.warn(
                f"{getattr(function, '__name__', function)} reads the logits that chunked_cross_entropy() computes in"
                f" chunks: all {tuple(self.shape)} of them are computed at once",
                stacklevel=4,
            )
        return self.full_tensor()

    def cross_entropy(
        self,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | None,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
    ) -> Any:
        hidden, size = self.hidden.reshape(-1, self.hidden.shape[-1]), self.head.config.chunk_size
        flat = target.reshape(-1)
        losses_of = functools.partial(
            _losses, self.head, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing
        )
        chunks = zip(hidden.split(size), flat.split(size), strict=True)
        losses = torch.cat([_checkpointed(losses_of, *chunk) for chunk in chunks])
        if reduction == "none":
            return losses.view(target.shape)
        total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
        if reduction == "mean":
            is_counted = flat != ignore_index
            total = total / (is_counted.sum() if weight is None else weight[flat[is_counted]].sum())
        return total.to(losses.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a description without values."""
        return f"ChunkedLogits(shape={tuple(self.shape)}, dtype={self.dtype}, chunk_size={self.head.config.chunk_size})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Register FSDP2's hook, with which it prepares for backward, on the hidden states: it reads no gradient."""
        if func is torch.Tensor.register_hook and _is_of_fsdp2(args[1]):
            return args[0].hidden.register_hook(args[1])
        return super().__torch_function__(func, types, args, kwargs)


def _is_of_fsdp2(hook: Callable[..., Any]) -> bool:
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")


def _losses(head: _Head, hidden: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the loss of each token of a chunk."""
    logits = head(hidden)
    return nn.functional.cross_entropy(logits, target.to(logits.device), reduction="none", **options)


def _checkpointed(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False)  # type: ignore[no-any-return]


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, num_classes: int, like: torch.Tensor, *parameters: nn.Parameter
    ) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            ChunkedLogits, (*hidden.shape[:-1], num_classes), dtype=like.dtype, device=like.device
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise ConfigError(_CUSTOM_FUNCTION)
