"""Result of memory estimates: memory of a rank at the peaks of a training step."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Memory of a rank at one time, in bytes.

    Attributes:
        parameters: Weights that the model computes with, as the rank stores them between steps.
        gradients: Gradients of parameters.
        optimizer_states: Optimizer states and fp32 master weights.
        activations: Tensors that forward and backward save and compute; in the optimizer's step, its temporaries.
        buffers: The model's buffers, gathered weights, and communication buffers.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of training on the rank that needs the most.

    Attributes:
        backward: Peak of forward and backward.
        step: Peak of the optimizer's step.
        steady_state: Steady state between steps.
        sent: Bytes that the rank sends in a step.
        offloaded: Bytes offloaded to another tier: host memory beside an accelerator, or files.
    """

    backward: MemoryParts
    step: MemoryParts
    steady_state: MemoryParts
    sent: int
    offloaded: int = 0

    @property
    def peak(self) -> MemoryParts:
        """Peak of all."""
        return max((self.backward, self.step, self.steady_state), key=lambda parts: parts.total)
