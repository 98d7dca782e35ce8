"""Activation checkpointing of layers: which of their activations are recomputed in backward, kept, or offloaded.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv:1604.06174).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .activation_offload import ActivationOffload
from .layer_stacks import subclass_of

# Only a layer's forward is recomputed, not its hooks: a hook that shards hidden states runs once, outside. Collectives
# in the forward are repeated on all ranks. Random numbers repeat: torch restores the default generator, and the RNG
# streams of tensor-parallel regions are a function of its state.
POLICY = "_activation_policy"  # attributes of a layer
LAYER_NAME = "_activation_policy_name"
_CACHES = ("past_key_values", "layer_past")  # arguments of transformers' layers, as its own checkpointing names them
# Purposes of layers' subclasses. What a layer's forward needs in a recomputation, too, is below them.
WHOLE_LAYERS = "recomputed"
BY_OPERATION = "recomputed by operation"
COMPILED_BY_OPERATION = "compiled and recomputed by operation"
RECOMPUTED = frozenset({WHOLE_LAYERS, BY_OPERATION, COMPILED_BY_OPERATION})

_Function = Callable[..., Any]


class ActivationPolicy(ABC):
    """What a layer keeps for backward. Copies of a model share it.

    Args:
        offload: Offload of the layers' inputs, optional.

    Attributes:
        purpose: Purpose of the layers' subclass. Operations are selected inside of a compiled graph, where the compiler
            sees them; whole layers are recomputed outside of it, so that they may contain graph breaks.
        end_step: Function to call at the end of every step, on all ranks, or None.
        fingerprint: What must be equal on all ranks, as text.
    """

    purpose = WHOLE_LAYERS
    end_step: Callable[[], None] | None = None

    def __init__(self, offload: ActivationOffload | None = None) -> None:
        self.offload = offload
        self.fingerprint = type(self).__name__ + ("" if offload is None else " with offload")

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationPolicy:
        return self

    def prepare(self, plugin: str, *, gathers_layers: bool) -> None:  # noqa: B027 (most policies need nothing)
        """Prepare for a plugin, before it configures the model.

        Args:
            plugin: Class name of the plugin.
            gathers_layers: If True, a layer's weights are whole only while it or its backward runs.

        Raises:
            ConfigError: The policy can't be followed under such a plugin; on all ranks.
        """

    @abstractmethod
    def run(self, layer: nn.Module, forward: _Function, *args: Any) -> Any:
        """Run a layer's forward in training."""

    def recompute(self, forward: _Function, *args: Any) -> Any:
        """Run a function and keep its inputs only."""
        if self.offload is None:
            return checkpoint(forward, *args, use_reentrant=False)
        with self.offload.of_inputs(args):
            return checkpoint(forward, *args, use_reentrant=False)


class RecomputeLayers(ActivationPolicy):
    """Layers keep their inputs and are recomputed."""

    def run(self, layer: nn.Module, forward: _Function, *args: Any) -> Any:
        return self.recompute(forward, *args)


class RecomputeCheapOperations(ActivationPolicy):
    """Layers keep the outputs of matrix products, convolutions and fused attention; all other operations are repeated.

    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022 (arXiv:2205.05198). The
    scores of an attention that is not fused are repeated, too: they are larger than all else.
    """

    purpose = BY_OPERATION

    def run(self, layer: nn.Module, forward: _Function, *args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_selective_contexts)


def checkpoint_layer(layer: nn.Module, policy: ActivationPolicy, name: str) -> None:
    """Give a layer a policy; it holds in training with gradients. Parameter names and `isinstance` are unchanged.

    Args:
        layer: Layer of a stack without a policy, whose class is replaced by a subclass of the same name.
        policy: Its policy.
        name: Its name in the model.

    Collective: no.
    """
    layer.__class__ = subclass_of(type(layer), policy.purpose, _members)
    layer.__dict__ |= {POLICY: policy, LAYER_NAME: name}


def policy_of(layer: nn.Module) -> ActivationPolicy | None:
    """Return the policy of a layer, or None."""
    policy: ActivationPolicy | None = layer.__dict__.get(POLICY)
    return policy


def is_checkpointed_by_transformers(layer: nn.Module) -> bool:
    """Whether transformers' `gradient_checkpointing_enable()` recomputes a layer."""
    return _is_of_transformers(layer) and bool(getattr(layer, "gradient_checkpointing", False))


def _members(base: type[nn.Module]) -> dict[str, Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.training or not torch.is_grad_enabled():
            return base.forward(self, *args, **kwargs)
        if _is_of_transformers(self):
            kwargs = _without_caches(self, kwargs)
        # All arguments by position, as torch keeps only these as inputs.
        function = partial(_call, base.forward, self, len(args), tuple(kwargs))
        return getattr(self, POLICY).run(self, function, *args, *kwargs.values())

    return {"forward": forward}


def _call(forward: _Function, layer: nn.Module, num_args: int, names: Sequence[str], *values: Any) -> Any:
    return forward(layer, *values[:num_args], **dict(zip(names, values[num_args:], strict=True)))


def _is_of_transformers(layer: nn.Module) -> bool:
    transformers_layers = sys.modules.get("transformers.modeling_layers")  # without an import of transformers
    own = getattr(transformers_layers, "GradientCheckpointingLayer", None)
    return own is not None and isinstance(layer, own)


def _without_caches(layer: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without a key-value cache, which the recomputation would fill a second time."""
    if kwargs.get("use_cache"):
        kwargs = {**kwargs, "use_cache": False}
    if getattr(layer, "_can_checkpoint_with_cache", False):
        return kwargs
    return {**kwargs, **{name: None for name in _CACHES if kwargs.get(name) is not None}}


def _operations(*names: str) -> frozenset[Any]:
    """Return the operations of these names, as `package.name.overload`, that this torch has."""
    found = []
    for name in names:
        package, operation, overload = name.split(".")
        packet = getattr(getattr(torch.ops, package), operation, None)
        if packet is not None and overload in packet.overloads():
            found.append(getattr(packet, overload))
    return frozenset(found)


_KEPT = _operations(
    "aten.mm.default",
    "aten.addmm.default",
    "aten.convolution.default",
    "aten._scaled_mm.default",
    "aten._grouped_mm.default",
    "aten._scaled_grouped_mm.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
)


def _is_kept(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_collective = getattr(operation, "namespace", None) == "booster"
    return CheckpointPolicy.MUST_SAVE if is_collective or operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_is_kept)  # type: ignore[no-untyped-call, no-any-return]
