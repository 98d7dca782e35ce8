"""Logits that the head does not compute, but a cross-entropy or another use of them, from their hidden states.

What models and losses do with logits before the cross-entropy (casts, scaling, soft caps, shifts of the tokens) is
recorded. So the cross-entropy may compute the head for some rows at a time, or for a rank's own ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from booster.errors import ConfigError

from .compiling import not_compiled
from .partial_logits import PartialLogits


@dataclass(frozen=True, slots=True, eq=False)
class DeferredHead:
    """The head as a function of hidden states, and the functions that follow it.

    Attributes:
        module: The module.
        compute: Call of the module.
        parameters: Its parameters.
        num_classes: Number of classes.
        state: State of the module at the forward that the logits are of, see `_state_of`.
        steps: Elementwise functions of the logits, in order.
    """

    module: nn.Module
    compute: Callable[[torch.Tensor], torch.Tensor]
    parameters: tuple[nn.Parameter, ...]
    num_classes: int
    state: object
    steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()

    @classmethod
    def of(
        cls, module: nn.Module, compute: Callable[[torch.Tensor], torch.Tensor], num_classes: int, **more: Any
    ) -> Self:
        """Return the head of a forward that runs now; `more` are attributes of a subclass."""
        parameters = tuple(module.parameters())
        return cls(module, compute, parameters, num_classes, _state_of(module, parameters), **more)

    @property
    def is_changed(self) -> bool:
        """Whether the module computes something else now than in the forward that the logits are of."""
        return _state_of(self.module, self.parameters) != self.state

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, which may be partial themselves."""
        logits = self.compute(hidden)
        for step in self.steps:
            logits = step(logits)
        return logits

    def full_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits as a plain tensor."""
        logits = self(hidden)
        return logits.full_tensor() if isinstance(logits, PartialLogits) else logits


class DeferredLogits(PartialLogits):
    """Logits of hidden states. Created by `of`.

    Attributes:
        hidden: Hidden states.
        head: The head, and what follows it.
    """

    _instead: str  # what to write for logits that are plain tensors
    hidden: torch.Tensor
    head: DeferredHead
    _full: torch.Tensor | None
    _node: object

    @classmethod
    def of(cls, hidden: torch.Tensor, head: DeferredHead, like: torch.Tensor | None = None) -> Self:
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
        logits: Self = _Wrap.apply(hidden, cls, head, like, *head.parameters)  # type: ignore[no-untyped-call]
        logits.hidden, logits.head, logits._full, logits._node = hidden, head, None, logits.grad_fn
        return logits

    @property
    def is_connected(self) -> bool:
        return self.grad_fn is self._node

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> DeferredLogits:
        return self._with(function(self.hidden), self.head, self._like())

    def map_elements(self, function: Callable[[torch.Tensor], torch.Tensor]) -> DeferredLogits:
        head = replace(self.head, steps=(*self.head.steps, function))
        return self._with(self.hidden, head, function(self._like()))

    def _with(self, hidden: torch.Tensor, head: DeferredHead, like: torch.Tensor) -> DeferredLogits:
        with self._grad_mode():
            return self.of(hidden, head, like)

    def _grad_mode(self) -> torch.set_grad_enabled:
        """Logits without a gradient, as of a forward under `no_grad`, have none wherever they are computed."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.requires_grad)

    def _check_unchanged(self) -> None:
        if self.head.is_changed:
            raise ConfigError(
                "these logits are computed where they are read first, and the weights of the output head, its adapters"
                " or its mode have changed since the forward, as by optimizer.step() or disable_adapter(): read them"
                f" before, as in logits = outputs.logits.full_tensor(), or {self._instead}"
            )

    def _like(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def full_tensor(self) -> torch.Tensor:
        with self._grad_mode():
            if self._full is None or (torch.is_grad_enabled() and not self._full.requires_grad):
                self._check_unchanged()
                self._full = self.head.full_logits(self.hidden) if self.is_connected else _FullLogits.apply(self)  # type: ignore[no-untyped-call]
            return self._full

    def losses_of(self, hidden: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the loss of each row.

        Args:
            hidden: Hidden states (rows, features).
            target: Class of each row.
            **options: Arguments of `torch.nn.functional.cross_entropy`.
        """
        raise NotImplementedError

    @staticmethod
    def backward_of_all(hidden: torch.Tensor, head: DeferredHead, grad: torch.Tensor) -> torch.Tensor | None:
        """Compute all logits and run backward; return the gradient of the hidden states.

        The gradient of the logits arrives where a user's autograd function got them, which bypasses overrides.
        """
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_(hidden.requires_grad)
            head.full_logits(leaf).backward(grad)
        return leaf.grad

    def cross_entropy(
        self,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | None,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
    ) -> Any:
        self._check_unchanged()
        flat = target.reshape(-1)
        with self._grad_mode():
            losses = self.losses_of(
                self.hidden.reshape(-1, self.hidden.shape[-1]),
                flat,
                weight=weight,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
            )
        if reduction == "none":
            return losses.view(target.shape)
        total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
        if reduction == "mean":
            is_counted = flat != ignore_index
            total = total / (is_counted.sum() if weight is None else weight[flat[is_counted]].sum())
        return total.to(losses.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    @not_compiled
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Register FSDP2's hook, with which it prepares for backward, on the hidden states: it reads no gradient."""
        if func is torch.Tensor.register_hook and _is_of_fsdp2(args[1]):
            return args[0].hidden.register_hook(args[1])
        return super().__torch_function__(func, types, args, kwargs)


def cross_entropy_of_rows(
    head: DeferredHead, hidden: torch.Tensor, target: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Compute the logits of some rows, and return the loss of each."""
    logits = head(hidden)
    return nn.functional.cross_entropy(logits, target.to(logits.device), reduction="none", **options)


def _state_of(module: nn.Module, parameters: Sequence[nn.Parameter]) -> object:
    """Return what tells that a module computes something else later: versions of its weights, flags of adapters."""
    inner = list(module.modules())
    ignored = {"training"} if len(inner) == 1 else set()  # a linear layer by itself has no dropout
    flags = [
        (name, str(value))
        for one in inner
        for name, value in vars(one).items()
        if isinstance(value, (bool, int, str, list)) and name not in ignored
    ]
    return flags, [parameter._version for parameter in parameters]


def _is_of_fsdp2(hook: Callable[..., Any]) -> bool:
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        kind: type[DeferredLogits],
        head: DeferredHead,
        like: torch.Tensor,
        *parameters: nn.Parameter,
    ) -> torch.Tensor:
        ctx.kind, ctx.head = kind, head
        ctx.save_for_backward(hidden)
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            kind, (*hidden.shape[:-1], head.num_classes), dtype=like.dtype, device=like.device
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        return ctx.kind.backward_of_all(hidden, ctx.head, grad), *[None] * (3 + len(ctx.head.parameters))


class _FullLogits(torch.autograd.Function):
    """Compute logits that a user's autograd function has returned."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits) -> torch.Tensor:
        return logits.head.full_logits(logits.hidden).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
