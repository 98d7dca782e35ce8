"""Shared experts, which all tokens pass: they compute while tokens travel to the routed experts or back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils._pytree import tree_leaves, tree_map_only

from booster.core.compiling import not_compiled
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.dynamic_class import mixin_forward

_NAMES = ("shared_expert", "shared_experts", "shared_mlp")  # in models of transformers and in Megatron's
_OPTION = "HybridParallelPlugin(overlap_shared_experts=False)"

# Note [Shared experts]
# A model calls its shared expert before the routed ones (Qwen2-MoE), or after them (DeepSeek-V3), and adds the outputs.
# Called before, the shared expert returns a tensor that is not computed yet: the routed experts compute it after their
# tokens have left. Called after, it finds the outputs of the routed experts on their way back: those are a tensor that
# waits for them at its first use, which is the addition. So neither the model's code nor the result changes, and the
# backward overlaps as well, see Note [Two nodes].
# A module with forward hooks returns computed tensors, because hooks read them.


class DeferredTensor(torch.Tensor):
    """Tensor that is computed at its first use, with the grad mode and autocast of the place that created it.

    Views of it are deferred as well. Any other function of torch gets the computed tensor, which has the autograd graph
    of the computation.

    Args:
        compute: Function that returns the tensor, called once.
        like: Tensor of the same shape and device, as far as they are known.
    """

    _compute: Callable[[], torch.Tensor] | None
    _result: torch.Tensor
    _grad_enabled: bool
    _autocast: tuple[str, torch.dtype, bool]

    @staticmethod
    def __new__(cls: type[DeferredTensor], compute: Callable[[], torch.Tensor], like: torch.Tensor) -> DeferredTensor:
        """Create the tensor."""
        grad_enabled = torch.is_grad_enabled()
        with torch._C.DisableTorchFunctionSubclass():  # neither reads values
            made: DeferredTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, like.shape, device=like.device, requires_grad=grad_enabled
            )
            kind = like.device.type
            if grad_enabled:
                made.register_hook(_refuse_gradient)
        made._compute = compute
        made._grad_enabled = grad_enabled
        made._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return made

    @property
    def is_deferred(self) -> bool:
        """Whether it is not computed yet."""
        return self._compute is not None

    def value(self) -> torch.Tensor:
        """Return the computed tensor."""
        if self._compute is not None:
            kind, dtype, enabled = self._autocast
            with torch.set_grad_enabled(self._grad_enabled), torch.autocast(kind, dtype=dtype, enabled=enabled):
                self._result = self._compute()
            self._compute = None
        return self._result

    @classmethod
    @not_compiled
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with computed tensors; defer a view."""
        if func in (torch.Tensor.view, torch.Tensor.reshape):
            source, *shape = args
            if isinstance(source, DeferredTensor) and source.is_deferred:
                return DeferredTensor(lambda: func(source.value(), *shape, **(kwargs or {})), source)
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.value, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse a use below `__torch_function__`, by C++ code: the graph of the computation would be lost."""
        raise ConfigError(_below_autograd(str(func)))


def _refuse_gradient(gradient: torch.Tensor) -> None:
    """Hook of a deferred tensor: only a custom autograd function sees the tensor itself."""
    raise ConfigError(_below_autograd("a custom autograd function"))


def _below_autograd(function: str) -> str:
    return (
        f"{function} got the output of a shared or routed expert while it was not computed yet, which would lose its"
        f" gradient. Use {_OPTION}, which computes it at once"
    )


class SharedExperts:
    """Shared experts of one module of routed experts; see Note [Shared experts].

    Args:
        routed: Modules of the routed experts and those that contain it, up to the block that calls the shared ones.
    """

    def __init__(self, routed: Sequence[nn.Module]) -> None:
        self._routed = routed
        self._deferred: list[weakref.ref[DeferredTensor]] = []
        self._outputs: weakref.ref[DeferredTensor] | None = None

    def call(self, compute: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return the output of a shared expert: computed if the routed experts' outputs are in flight, else deferred.

        Args:
            compute: The shared expert's forward.
            like: Tensor of the output's shape and device, as far as they are known.
        """
        outputs = None if self._outputs is None else self._outputs()
        if outputs is not None and outputs.is_deferred:
            return compute()
        deferred = DeferredTensor(compute, like)
        self._deferred = [one for one in self._deferred if one() is not None]
        self._deferred.append(weakref.ref(deferred))
        return deferred

    def compute_deferred(self) -> None:
        """Compute the shared experts that were called before the routed ones."""
        found, self._deferred = self._deferred, []
        for one in found:
            deferred = one()
            if deferred is not None:
                deferred.value()

    def defer_outputs(self, wait: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the routed experts: deferred until they are used, or now if hooks read them.

        Args:
            wait: Function that waits for the outputs.
            like: Tensor of the outputs' shape and device.
        """
        if any(map(_has_forward_hooks, self._routed)):
            return wait()
        outputs = DeferredTensor(wait, like)
        self._outputs = weakref.ref(outputs)
        return outputs


def overlap_shared_experts(model: nn.Module, name: str) -> SharedExperts | None:
    """Make the shared experts beside a module of routed experts overlap with its messages, in place.

    Args:
        model: Model that contains them.
        name: Name of the module of routed experts.

    Returns:
        The shared experts, or None if there are none.

    Collective: no.
    """
    routed = [model.get_submodule(name)]
    for _ in range(2):  # beside the experts, or beside the block that contains router and experts
        if not name:
            return None
        name = name.rpartition(".")[0]
        block = model.get_submodule(name)
        found = [one for key, one in block.named_children() if key in _NAMES]
        if found:
            shared = SharedExperts(routed)
            for one in found:
                mixin_forward(one, _SharedExpert, shared)
            return shared
        routed.append(block)
    return None


class _SharedExpert(nn.Module):
    _split: SharedExperts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if _has_forward_hooks(self) or not tensors:
            return forward(*args, **kwargs)
        versions = [_version(one) for one in tensors]

        def compute() -> torch.Tensor:
            if versions != [_version(one) for one in tensors]:
                raise ConfigError(
                    f"the input of a shared expert, a {type(self).__name__}, was changed in place before its output"
                    f" was used. Use {_OPTION}, which computes it at once"
                )
            return forward(*args, **kwargs)  # type: ignore[no-any-return]

        return self._split.call(compute, tensors[0])

    def traced_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output at once, in a graph of torch.compile."""
        return super().forward(*args, **kwargs)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or nn_module._global_forward_hooks)
