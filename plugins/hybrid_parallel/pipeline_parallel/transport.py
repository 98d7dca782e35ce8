"""What travels between stages: outputs with their form, and gradients of which both ends know the form already.

Note [Forms that are known]
The first output of a kind goes with a header that describes it, further ones without: a kind is the position that
receives it, the signature of its micro-batch, and whether gradients will come back. Both ends see the same batches, so
both know which kinds have been before. Gradients come back for those tensors that required them, in their shapes, so
they never need a header.

Note [Letting go of what was sent]
Gloo does not tell when a message has arrived, short of waiting for it. But a message from the receiver does: whatever
it took before it sent that has arrived, and the schedule says what that was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from booster.comm import IncomingLink, OutgoingLink, TensorSpec
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import (
    Message,
    Step,
    check_orders,
    incoming,
    program,
)
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.pieces import StageDivision
from booster.plugins.hybrid_parallel.pipeline_parallel.tensor_trees import TreeForm, flatten

__all__ = ["Received", "Sent", "Transport"]

_MANY_FORMS = 1024
_AHEAD = 2  # works whose messages are under way before their turn

Ends = Callable[[int, int], tuple["dist.ProcessGroup | None", int]]
"""Returns for a sending and a receiving stage the group of their link, and the rank in it of the other end."""


@dataclass(frozen=True, slots=True)
class Sent:
    """An output that has left: where gradients go in, in the order of the form's tensors that require them.

    Attributes:
        form: Of the output.
        edges: In the graph.
    """

    form: TreeForm
    edges: Sequence[torch.autograd.graph.GradientEdge]


@dataclass(frozen=True, slots=True)
class Received:
    """An output that has arrived.

    Attributes:
        tree: The output.
        leaves: Those of its tensors that require gradients.
    """

    tree: Any
    leaves: Sequence[torch.Tensor]

    def gradients(self) -> list[torch.Tensor]:
        """Returns what backward has left of the leaves' gradients."""
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves]


class Transport:
    """A stage's messages.

    Args:
        division: Who has which position.
        stage: This one.
        ends: Of links.
        device: Where the stage computes.
        caches_forms: See Note [Forms that are known]; False: every output goes with a header.
    """

    def __init__(
        self, division: StageDivision, stage: int, ends: Ends, device: torch.device, *, caches_forms: bool
    ) -> None:
        self._division = division
        self._stage = stage
        self._ends = ends
        self._device = device
        self._caches = caches_forms
        self._forms: dict[Hashable, TreeForm] = {}
        self._outgoing: dict[int, OutgoingLink] = {}
        self._incoming: dict[int, IncomingLink] = {}
        self._headers_due: dict[int, Message] = {}
        self._checked: set[int] = set()  # numbers of micro-batches for which the schedule is known to work

    @property
    def knows_many_forms(self) -> bool:
        """Whether it is time to forget them: batches with other values each time have other signatures each time."""
        return len(self._forms) > _MANY_FORMS

    def forget_forms(self) -> None:
        """Has the next output of each kind go with a header; all stages at once."""
        self._forms.clear()

    def begin(self, signatures: Sequence[Hashable], *, with_gradients: bool) -> list[Step]:
        """Begins with a batch, and returns what the stage has to do for it. No communication.

        Args:
            signatures: Of the micro-batches.
            with_gradients: Backwards follow.

        Raises:
            ConfigError: The schedule does not work with as many micro-batches.
        """
        self._signatures = signatures
        self._with_gradients = with_gradients
        if len(signatures) not in self._checked:
            division = self._division
            check_orders(division.schedule, division.num_stages, len(signatures), division.num_chunks)
            self._checked.add(len(signatures))
        self._steps = self._program(self._stage)
        self._handed: dict[Message, Any] = {}
        self._form_of: dict[tuple[int, int], TreeForm] = {}
        self._under_way: dict[int, deque[Message]] = {}
        self._places: dict[Message, tuple[int, int]] = {}
        expected = incoming(*self._arguments(self._stage), forward_only=not with_gradients)
        for sender, messages in expected.items():
            self._link_from(sender).expect([self._description(sender, message) for message in messages])
            self._places |= {message: (sender, index) for index, message in enumerate(messages)}
        peers = {step.sends.receiver for step in self._steps if step.sends} | set(expected)
        self._sent_at: dict[Message, int] = {}
        self._taken_at: dict[Message, int] = {}
        for peer in peers - {self._stage}:
            for place, step in enumerate(self._program(peer)):
                if step.sends is not None:
                    self._sent_at[step.sends] = place
                if step.receives is not None:
                    self._taken_at[step.receives] = place
        return self._steps

    def post(self, place: int) -> None:
        """Has the messages under way that the works from a place of the program on need soon."""
        for step in self._steps[place : place + _AHEAD + 1]:
            if step.receives in self._places:
                sender, index = self._places[step.receives]  # type: ignore[index]
                self._incoming[sender].post(index + 1)

    def send_output(self, message: Message, tree: Any) -> Sent:
        """Sends an output on.

        Raises:
            ConfigError: It can't travel, or has other shapes than one before it of the same kind.
        """
        tensors, form = flatten(tree)
        edges = [
            torch.autograd.graph.get_gradient_edge(tensor)
            for tensor, one in zip(tensors, form.tensors, strict=True)
            if one.requires_grad
        ]
        self._form_of[message.micro_batch, message.position] = form
        if message.receiver == self._stage:
            self._handed[message] = [tensor.detach() for tensor in tensors]
            return Sent(form, edges)
        kind = self._kind(message)
        known = self._forms.get(kind) if self._caches else None
        if known is not None and known != form:
            raise ConfigError(
                f"a pipeline stage's output has tensors {_listed(form)} for micro-batch {message.micro_batch}, and had"
                f" {_listed(known)} for one of the same shapes before it: shapes that depend on the data's values are"
                " not sent with every message by default. Give enable_metadata_cache=False to the plugin"
            )
        self._forms[kind] = form
        self._send(message, tensors, None if known is not None else form.encode())
        return Sent(form, edges)

    def take_output(self, message: Message) -> Received:
        """Waits for an output.

        Raises:
            RankFailedError: The sender is lost or too late.
        """
        is_own = message.sender == self._stage
        if is_own:
            tensors = self._handed.pop(message)
        else:
            tensors = [tensor.to(self._device) for tensor in self._take(message)]
        form = self._form_of[message.micro_batch, message.position]
        leaves, given = [], []
        for tensor, one in zip(tensors, form.tensors, strict=True):
            if one.requires_grad and self._with_gradients:
                leaves.append(tensor.requires_grad_())
                # No leaf, which a layer that works in place could not change; and its own memory, which it may.
                tensor = tensor.clone() if is_own else _Arrived.apply(tensor)  # type: ignore[no-untyped-call]
            given.append(tensor)
        return Received(form.build(given), leaves)

    def send_gradients(self, message: Message, gradients: Sequence[torch.Tensor]) -> None:
        """Sends gradients back."""
        if message.receiver == self._stage:
            self._handed[message] = list(gradients)
        else:
            self._send(message, gradients, None)

    def take_gradients(self, message: Message) -> list[torch.Tensor]:
        """Waits for the gradients of an output that was sent.

        Raises:
            RankFailedError: The sender is lost or too late.
        """
        if message.sender == self._stage:
            gradients: list[torch.Tensor] = self._handed.pop(message)
            return gradients
        return [tensor.to(self._device) for tensor in self._take(message)]

    def finish(self) -> None:
        """Waits until everything has left.

        Raises:
            RankFailedError: A receiver is lost or too late.
        """
        for link in self._outgoing.values():
            link.wait()

    # Inside.

    def _program(self, stage: int) -> list[Step]:
        return program(*self._arguments(stage), forward_only=not self._with_gradients)

    def _arguments(self, stage: int) -> tuple[Any, int, int, int, int]:
        division = self._division
        return division.schedule, stage, division.num_stages, len(self._signatures), division.num_chunks

    def _kind(self, message: Message) -> Hashable:
        return message.position, self._signatures[message.micro_batch], self._with_gradients

    def _description(self, sender: int, message: Message) -> Callable[[], Sequence[TensorSpec] | None]:
        def gradient() -> Sequence[TensorSpec] | None:
            form = self._form_of.get((message.micro_batch, message.position + 1))
            if form is None:  # not sent yet
                return None
            return [TensorSpec(one.shape, one.dtype) for one in form.tensors if one.requires_grad]

        def output() -> Sequence[TensorSpec] | None:
            form = self._forms.get(self._kind(message)) if self._caches else None
            if form is None:
                self._headers_due[sender] = message
                return None
            self._form_of[message.micro_batch, message.position] = form
            return form.specs

        return gradient if message.is_gradient else output

    def _read_header(self, sender: int, header: bytes) -> Sequence[TensorSpec]:
        message = self._headers_due.pop(sender)
        form = TreeForm.decode(header)
        self._forms[self._kind(message)] = self._form_of[message.micro_batch, message.position] = form
        return form.specs

    def _take(self, message: Message) -> list[torch.Tensor]:
        sender, index = self._places[message]
        _, tensors = self._incoming[sender].take(index)
        self._let_go(sender, self._sent_at[message])
        return tensors

    def _send(self, message: Message, tensors: Sequence[torch.Tensor], header: bytes | None) -> None:
        self._link_to(message.receiver).send(tensors, header)
        self._under_way.setdefault(message.receiver, deque()).append(message)

    def _let_go(self, peer: int, place: int) -> None:
        """Lets go of what a stage has taken before it sent from a place of its program."""
        messages = self._under_way.get(peer)
        count = 0
        while messages and self._taken_at[messages[0]] <= place:
            messages.popleft()
            count += 1
        if count:
            self._outgoing[peer].finish(count)

    def _link_to(self, receiver: int) -> OutgoingLink:
        if receiver not in self._outgoing:
            group, rank = self._ends(self._stage, receiver)
            self._outgoing[receiver] = OutgoingLink(rank, group)
        return self._outgoing[receiver]

    def _link_from(self, sender: int) -> IncomingLink:
        if sender not in self._incoming:
            group, rank = self._ends(sender, self._stage)
            self._incoming[sender] = IncomingLink(rank, group, lambda header: self._read_header(sender, header))
        return self._incoming[sender]


class _Arrived(torch.autograd.Function):
    """The identity, in the same memory: nobody else refers to what has arrived."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _listed(form: TreeForm) -> str:
    return ", ".join(f"{one.dtype} {one.shape}{' with gradient' * one.requires_grad}" for one in form.tensors) or "none"
