"""All-gather of updated weights, in place in the flat buffers."""

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


class ParamAllGather:
    """All-gather of the weights after a step.

    Args:
        buckets: All buckets in the order of backward; forward needs them in reverse order.
        group: Ranks that share the shards.
    """

    def __init__(self, buckets: Sequence[GradientBucket], group: dist.ProcessGroup | None) -> None:
        self._buckets = buckets[::-1]
        self._group = group
        self._in_flight: dict[int, AllGather] = {}
        self._needed: dict[int, list[int]] = {}

    @property
    def is_pending(self) -> bool:
        """Whether weights of other ranks are in flight."""
        return bool(self._in_flight)

    @torch.no_grad()
    def start(self) -> None:
        """Start the all-gather of all buckets. Collective over the group."""
        for index, one in enumerate(self._buckets):
            buffer = one.group.weights[one.bucket.start : one.bucket.stop]
            self._in_flight[index] = start_all_gather(buffer, self._group)
            for param_grad in one.param_grads:
                self._needed.setdefault(id(param_grad.parameter), []).append(index)

    @not_compiled
    def wait(self) -> None:
        """Wait for all weights."""
        for index in list(self._in_flight):
            self._in_flight.pop(index).wait()
        self._needed.clear()

    def wait_for(self, parameter: nn.Parameter) -> None:
        """Wait for one parameter."""
        for index in self._needed.pop(id(parameter), ()):
            if index in self._in_flight:
                self._in_flight.pop(index).wait()


class WaitForParams(TorchFunctionMode):
    """Makes every operator wait for the weights that it reads.

    Module hooks are not enough: a module may read the weights of another one that is never called, as
    `nn.MultiheadAttention` reads those of its `out_proj`.

    Args:
        all_gather: All-gathers in flight.
    """

    def __init__(self, all_gather: ParamAllGather) -> None:
        super().__init__()
        self._all_gather = all_gather

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._all_gather.is_pending:
            self._wait_for(args)
            self._wait_for(kwargs.values())
        return function(*args, **kwargs)

    def _wait_for(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, nn.Parameter):
                self._all_gather.wait_for(value)
            elif isinstance(value, (list, tuple)):
                self._wait_for(value)
