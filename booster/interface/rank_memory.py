"""What a plugin says about the memory that a rank will need, before there is a model in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from booster.interface.mixed_precision import MixedPrecision

__all__ = ["ActivationProfile", "MemoryParts", "MemoryQuestion", "RankMemory", "Stretch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """What a rank holds at one moment, in bytes.

    Attributes:
        parameters: The weights that the model computes with, as the rank keeps them between steps.
        gradients: Gradients of parameters.
        optimizer_states: The optimizer's, and fp32 masters.
        activations: What forward and backward keep and compute; while the optimizer steps, what that computes with.
        buffers: The model's buffers, gathered weights, and what is under way between ranks.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What training takes on the rank that needs the most.

    Attributes:
        backward: At the worst moment of forward and backward.
        step: At the worst moment of the optimizer's step.
        kept: Between steps.
        sent: Bytes that the rank sends in a step.
        elsewhere: Bytes kept in another tier: in host memory beside an accelerator, or in files.
    """

    backward: MemoryParts
    step: MemoryParts
    kept: MemoryParts
    sent: int
    elsewhere: int = 0

    @property
    def peak(self) -> MemoryParts:
        """The worst moment of all."""
        return max((self.backward, self.step, self.kept), key=lambda parts: parts.total)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a forward and backward, from one event to the next.

    Attributes:
        event: What begins it: "enter" and "leave", a module's forward begins and has ended, by an exception too;
            "backward", the gradient of what a module returned is there; "gradient", one of a parameter is, and counts
            as an activation no more. Activation checkpointing has modules enter and leave again amid the backward.
        name: Of the module or parameter in the model, its first one.
        begin: Bytes of activations at its begin.
        activations: The most of them until the next event.
        returned: With "leave", bytes of the tensors that the module returned.
    """

    event: str
    name: str
    begin: int
    activations: int
    returned: int = 0


@dataclass(frozen=True, slots=True)
class ActivationProfile:
    """What a forward and backward of one batch take beside the model's own tensors, in bytes.

    Attributes:
        moments: (activations, parameters' gradients) at the moments that matter: those at which no other moment has
            more of the one and not less of the other.
        kept: Activations at the end of the forward.
        gradients: Parameters' gradients at the end of the backward.
        sent: What this rank sent meanwhile, where the model communicates.
        course: All of it, in the order of time.
    """

    moments: tuple[tuple[int, int], ...]
    kept: int
    gradients: int
    sent: int = 0
    course: tuple[Stretch, ...] = ()

    def worst_moment(self, share_of_gradients: float = 1.0) -> tuple[int, int]:
        """Returns the moment at which activations and this share of the gradients take the most together."""
        return max(self.moments, key=lambda moment: moment[0] + share_of_gradients * moment[1])


class MemoryQuestion(ABC):
    """What a plugin is asked about, and what it may ask back.

    Attributes:
        model: The user's model, whole, on the meta device, and not to be changed.
        trained: Parameters of it that the optimizer updates, tied ones once.
        precision: The Booster's; None: none, or the plugin has one of its own.
    """

    model: nn.Module
    trained: Sequence[nn.Parameter]
    precision: MixedPrecision | None

    @abstractmethod
    def state_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype, share: float = 1.0) -> int:
        """Returns what the optimizer keeps for parameters, its step's counters left out.

        Args:
            shapes: Of the whole parameters.
            dtype: That it updates: of masters, where there are.
            share: The part of the elements that the rank updates. Of what is kept for whole parameters, such as means
                over rows, every rank keeps all.
        """

    @abstractmethod
    def step_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> int:
        """Returns what the optimizer's step computes with for a moment.

        Args:
            shapes: Of what is in its param groups: of shards, where parameters are divided.
            dtype: Of these.
        """

    @abstractmethod
    def prepared_model(self) -> nn.Module:
        """Returns a copy of the model as the Booster's precision makes it."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Samples in this rank's batch."""

    @property
    def keeps_masters(self) -> bool:
        """Whether the Booster's precision has the optimizer update fp32 copies of the weights."""
        return self.precision is not None and self.precision.keeps_masters

    @property
    @abstractmethod
    def is_fused(self) -> bool:
        """Whether the optimizer updates from gradients as they are, and rounds into the weights, in one pass."""

    @abstractmethod
    def activations(
        self,
        dtype: torch.dtype | None = None,
        *,
        divide: Callable[[nn.Module], None] | None = None,
        divided_as: Hashable = None,
        num_micro_batches: int = 1,
        outputs_fp32: bool = True,
    ) -> ActivationProfile:
        """Returns what a forward and backward of this rank's batch take.

        Args:
            dtype: Format that the plugin casts the model and its inputs to; None: none.
            divide: Makes of a whole copy of the model, in place, what this rank has of it.
            divided_as: What tells this division from others, so that it is not measured twice; None: it is.
            num_micro_batches: Into how many parts the batch is divided; measured is the largest one.
            outputs_fp32: Whether the plugin gives the criterion outputs in fp32, where it casts the model.
        """
