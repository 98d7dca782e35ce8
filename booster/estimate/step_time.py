"""Predicted time of a simulated step: a rank's clock, which operators and collectives advance."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from booster.comm import CollectiveOp
from booster.fault_tolerance.progress import is_in_phase
from booster.interface import ModelWrapper, Plugin

from .machine_profile import MachineProfile
from .operator_costs import is_call, operator_cost

_MESSAGES = ("send", "receive")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted time of a training step on the rank that takes the longest, in seconds; see Note [Time model].

    Attributes:
        model: Forward and backward of all microbatches, with what ranks wait for in them.
        step: The optimizer's step.
        computation: Time of operators, in both.
        communication: Time of collectives, in both, whether or not they run beside computation.
        exposed_communication: Part of it that the rank waits for.
        bubble: Time in which a pipeline stage waits for others.
        offloading: Time in which offloaded data travel and are updated; part of the optimizer's step.
        flops: Floating-point operations of the rank.
        num_calls: Calls of operators, also of those that return a view or memory.
    """

    model: float
    step: float
    computation: float
    communication: float
    exposed_communication: float
    bubble: float
    offloading: float
    flops: float
    num_calls: float

    @property
    def total(self) -> float:
        """Time of the whole step."""
        return self.model + self.step


@dataclass(slots=True)
class _InFlight:
    """Collective in flight: when it could begin at the earliest, its time, and how much computation hides it."""

    begin: float
    seconds: float
    overlap: float


class StepClock:
    """Clock of a rank in a simulated step; see Note [Time model].

    Attributes:
        now: Time since the start of the step, in seconds.
    """

    def __init__(self, profile: MachineProfile, plugin: Plugin) -> None:
        self._profile = profile
        self._plugin = plugin
        self._has_stages = plugin.pp_size > 1
        self._thread = threading.get_ident()
        self.reset()

    def reset(self) -> None:
        """Start a step."""
        self._host = self.now = 0.0  # the host is ahead of the device, unless it computes itself
        self._channel_free = 0.0
        self._in_flight: dict[CollectiveOp, _InFlight] = {}
        self._messages: list[float] = []
        self._forward = self._backward = 0.0
        self._computation = self._communication = self._exposed = self._flops = 0.0
        self._num_calls = 0
        self._end_of_model: float | None = None

    def end_model(self) -> None:
        """Record the end of forward and backward; what follows is the optimizer's step."""
        self._end_of_model = self.now

    def on_operator(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Advance the clock by an operator."""
        if not is_call(func):
            return
        cost = operator_cost(func, args, kwargs, result)
        is_step = self._end_of_model is not None
        call = self._profile.step_call_seconds if is_step else self._profile.call_seconds
        kernel = 0.0
        if cost is not None:
            kernel = cost.seconds(self._profile, is_cold=is_step)
            self._flops += cost.flops
        self._num_calls += 1
        before = self.now
        if self._profile.is_asynchronous:
            self._host += call
            if cost is not None:
                self.now = max(self.now, self._host) + kernel
            self._computation += kernel
        else:
            self.now += call + kernel
            self._computation += call + kernel
        self._spend(self.now - before)

    def on_start(self, operation: CollectiveOp, sent: int, received: int) -> None:
        """Let a collective begin as soon as those before it have ended."""
        if self._has_stages and operation.name in _MESSAGES:
            if operation.name == "send":  # the schedule's simulation has the waits
                self._messages.append(self._seconds(operation, sent)[0])
            return
        seconds, overlap = self._seconds(operation, max(sent, received))
        begin = max(self.now, self._channel_free)
        self._channel_free = begin + seconds
        self._in_flight[operation] = _InFlight(begin, seconds, overlap)
        self._communication += seconds

    def on_end(self, operation: CollectiveOp) -> None:
        """Wait for what is left of a collective."""
        started = self._in_flight.pop(operation, None)
        if started is None:  # a message of a pipeline, or waited for before
            return
        hidden = started.overlap * min(started.seconds, max(0.0, self.now - started.begin))
        left = started.seconds - hidden + self._profile.wait_seconds
        self.now += left
        self._exposed += left
        self._spend(left)

    def result(self, model: ModelWrapper, num_offloaded: int) -> StepTime:
        """Return the time of the step of a boosted model that offloads so many bytes to the host."""
        end_of_model = self.now if self._end_of_model is None else self._end_of_model
        speed = self._profile.host_bytes_per_second
        offloading = 2 * num_offloaded / speed if speed else 0.0
        step = self.now - end_of_model + offloading
        bubble = 0.0
        if self._has_stages:
            message = statistics.fmean(self._messages) if self._messages else 0.0
            busy = self._forward + self._backward
            length = self._plugin.pipeline_seconds(model, self._forward, self._backward, message)
            bubble = max(0.0, length - busy) / self._profile.ranks_per_core
        return StepTime(
            model=end_of_model + bubble,
            step=step,
            computation=self._computation,
            communication=self._communication + sum(self._messages),
            exposed_communication=self._exposed,
            bubble=bubble,
            offloading=offloading,
            flops=self._flops,
            num_calls=self._num_calls,
        )

    def _spend(self, seconds: float) -> None:
        if not self._has_stages:
            return
        if is_in_phase("forward"):
            self._forward += seconds
        elif is_in_phase("backward") or threading.get_ident() != self._thread:  # a device's thread of autograd
            self._backward += seconds

    def _seconds(self, operation: CollectiveOp, num_bytes: int) -> tuple[float, float]:
        """Return the time of an operation, and the part of computation that hides it."""
        group, peer = operation.group, operation.peer
        ranks = dist.get_process_group_ranks(group) if peer is None else [dist.get_rank(), peer]
        hosts = {rank // self._profile.ranks_per_host for rank in ranks}
        name = "send" if operation.name in _MESSAGES else operation.name
        speed = self._profile.speed(name, len(ranks), len(hosts))
        return (0.0, 0.0) if speed is None else (speed.seconds(num_bytes), speed.overlap)
