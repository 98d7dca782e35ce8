"""Spreads updated weights: every rank sends its pieces straight from the flat buffers into those of the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from booster.comm import AllGather, start_all_gather
from booster.plugins.sharding.compiling import not_compiled

from .grad_bucket import GradientBucket


class WeightGathering:
    """The all-gather of the weights after a step.

    Args:
        buckets: All buckets, in the order in which backward fills them: forward needs them from the last to the first.
        group: The ranks that share the shards.
    """

    def __init__(self, buckets: Sequence[GradientBucket], group: dist.ProcessGroup | None) -> None:
        self._buckets = buckets[::-1]
        self._group = group
        self._flights: dict[int, AllGather] = {}
        self._needed: dict[int, list[int]] = {}

    @property
    def is_pending(self) -> bool:
        """True while weights of other ranks are on their way."""
        return bool(self._flights)

    @torch.no_grad()
    def start(self) -> None:
        """Begin to send and receive. Collective over the group."""
        for index, one in enumerate(self._buckets):
            buffer = one.group.weights[one.bucket.start : one.bucket.stop]
            self._flights[index] = start_all_gather(buffer, self._group)
            for slot in one.slots:
                self._needed.setdefault(id(slot.parameter), []).append(index)

    @not_compiled
    def wait(self) -> None:
        """Wait until all weights are here."""
        for index in list(self._flights):
            self._flights.pop(index).wait()
        self._needed.clear()

    def wait_for(self, parameter: nn.Parameter) -> None:
        """Wait until one parameter is here."""
        for index in self._needed.pop(id(parameter), ()):
            if index in self._flights:
                self._flights.pop(index).wait()


class WaitingForWeights(TorchFunctionMode):
    """Lets every operator wait for the weights that it reads.

    Not hooks of the modules: a module may read the weights of another one that is never called, as
    `nn.MultiheadAttention` does with those of its `out_proj`.

    Args:
        gathering: All-gathers in flight.
    """

    def __init__(self, gathering: WeightGathering) -> None:
        super().__init__()
        self._gathering = gathering

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._gathering.is_pending:
            self._wait_for(args)
            self._wait_for(kwargs.values())
        return function(*args, **kwargs)

    def _wait_for(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, nn.Parameter):
                self._gathering.wait_for(value)
            elif isinstance(value, (list, tuple)):
                self._wait_for(value)
