"""Point-to-point communication of activations and their gradients between stages.

Note [Cached shapes]
The first activation of a kind is sent with a header that describes its tree, later ones without. The kind is the
receiving position, the signature of the microbatch, and whether gradients will return. Both ends process the same
batches, so both know which kinds are cached. Gradients return for the tensors that required them, in their shapes, and
never need a header.

Note [Send completion]
Gloo does not report the completion of a send without waiting for it. But a message from the receiver implies it: all
that the receiver took before it sent that message has arrived, and the schedule determines what that was.

Note [Ordered links]
Operations of an accelerator's communicator run one after the other, in the order of their calls: a receive that is
posted too early blocks the sends behind it, and stages can wait for each other in a ring. A communicator per pair of
stages and direction would avoid most of that, but each costs device memory. So there are two for the whole pipeline,
for messages to later and to earlier stages. The first one is that of the pp axis, whose collectives run between the
batches. Each stage starts its operations in the order of a simulated step: no message depends on a later one in it, so
of those that are not through yet the first one can always run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from booster.comm import RecvChannel, SendChannel, TensorMeta
from booster.errors import ConfigError

from .schedules import Message, StageAction, action_list, check_orders, incoming_messages, message_order
from .stage_partition.stage_plan import StagePartition
from .tree_spec import TreeSpec, flatten

_MAX_CACHED_SPECS = 1024
_NUM_POSTED_AHEAD = 2  # number of actions whose receives are posted ahead

LinkPeer = Callable[[int, int], tuple["dist.ProcessGroup | None", int]]
"""Returns the group of the link from a sending to a receiving stage, and the peer's rank in it."""


@dataclass(frozen=True, slots=True)
class ReceivedActivation:
    """A received activation.

    Attributes:
        tree: The activation.
        leaves: Its tensors that require gradients.
    """

    tree: Any
    leaves: Sequence[torch.Tensor]


class StageP2P:
    """Sends and receives of a stage.

    Args:
        partition: Assignment of model chunks to stages.
        stage: Index of this stage.
        ends: Returns group and peer of a link.
        device: Compute device of the stage.
        caches_specs: If True, headers are cached, see Note [Cached shapes]; otherwise each activation has one.
        is_ordered: If True, operations start in a common order, see Note [Ordered links].
    """

    def __init__(
        self,
        partition: StagePartition,
        stage: int,
        ends: LinkPeer,
        device: torch.device,
        *,
        caches_specs: bool,
        is_ordered: bool,
    ) -> None:
        self._partition = partition
        self._stage = stage
        self._ends = ends
        self._device = device
        self._caches = caches_specs
        self._is_ordered = is_ordered
        self._due: dict[bool, deque[Message]] = {}  # of each direction, in order; what has not started yet
        self._cached_specs: dict[Hashable, TreeSpec] = {}
        self._outgoing: dict[int, SendChannel] = {}
        self._incoming: dict[int, RecvChannel] = {}
        self._headers_due: dict[int, Message] = {}
        self._checked: set[int] = set()  # numbers of microbatches for which the schedule was checked

    @property
    def is_cache_full(self) -> bool:
        """Whether the cache should be cleared, as batches with ever new values have ever new signatures."""
        return len(self._cached_specs) > _MAX_CACHED_SPECS

    def clear_cache(self) -> None:
        """Clear the cache of headers; all stages must do so at the same batch."""
        self._cached_specs.clear()

    def begin(self, signatures: Sequence[Hashable], *, with_gradients: bool) -> Sequence[StageAction]:
        """Start a batch, and return the stage's actions. No communication.

        Args:
            signatures: Signatures of the microbatches.
            with_gradients: If True, the batch has backwards.

        Raises:
            ConfigError: The schedule does not support this number of microbatches.
        """
        self._signatures = signatures
        self._with_gradients = with_gradients
        schedule = self._partition.schedule
        sizes = (self._partition.num_stages, len(signatures), self._partition.num_chunks)
        if len(signatures) not in self._checked:
            check_orders(schedule, *sizes)
            self._checked.add(len(signatures))
        self._steps = action_list(schedule, self._stage, *sizes, forward_only=not with_gradients)
        self._local: dict[Message, Any] = {}
        self._spec_of: dict[tuple[int, int], TreeSpec] = {}
        self._in_flight: dict[int, deque[Message]] = {}
        self._recv_index: dict[Message, tuple[int, int]] = {}
        expected = incoming_messages(schedule, self._stage, *sizes, forward_only=not with_gradients)
        for sender, messages in expected.items():
            if sender not in self._incoming:
                group, rank = self._ends(sender, self._stage)
                self._incoming[sender] = RecvChannel(rank, group, partial(self._read_header, sender))
            self._incoming[sender].expect([partial(self._expected_specs, sender, message) for message in messages])
            self._recv_index |= {message: (sender, index) for index, message in enumerate(messages)}
        self._due = {is_later: deque() for is_later in (True, False)}
        self._started: set[Message] = set()  # receives
        for message in message_order(schedule, *sizes, forward_only=not with_gradients) if self._is_ordered else ():
            if self._stage in (message.sender, message.receiver):
                self._due[message.is_to_later_stage].append(message)
        peers = {step.sends.receiver for step in self._steps if step.sends} | set(expected)
        self._sent_at: dict[Message, int] = {}
        self._received_at: dict[Message, int] = {}
        for peer in peers - {self._stage}:
            for place, step in enumerate(action_list(schedule, peer, *sizes, forward_only=not with_gradients)):
                if step.sends is not None:
                    self._sent_at[step.sends] = place
                if step.receives is not None:
                    self._received_at[step.receives] = place
        return self._steps

    def post_recvs(self, index: int) -> None:
        """Post the receives of the next actions from index `index` on.

        Not those whose shapes are not known yet or that a send must come before.
        """
        for step in self._steps[index : index + _NUM_POSTED_AHEAD + 1]:
            message = step.receives
            if message is None or message not in self._recv_index:
                continue
            if self._is_ordered:
                self._start_in_order(message, can_wait=False)
            else:
                sender, place = self._recv_index[message]
                self._incoming[sender].post_recvs(place + 1)

    def send_output(self, message: Message, tree: Any) -> list[GradientEdge]:
        """Send an activation to the next chunk, and return the gradient edges of its tensors that require gradients.

        Raises:
            ConfigError: It has unsupported values, or other shapes than an earlier one of the same kind.
        """
        tensors, spec = flatten(tree)
        edges = [
            get_gradient_edge(tensor) for tensor, one in zip(tensors, spec.tensors, strict=True) if one.requires_grad
        ]
        self._spec_of[message.microbatch, message.position] = spec
        if message.receiver == self._stage:
            self._local[message] = [tensor.detach() for tensor in tensors]
            return edges
        kind = self._kind(message)
        known = self._cached_specs.get(kind) if self._caches else None
        if known is not None and known != spec:
            raise ConfigError(
                f"a pipeline stage's output has tensors {_listed(spec)} for microbatch {message.microbatch}, and had"
                f" {_listed(known)} for an earlier one of the same shapes: by default shapes are cached and must not"
                " depend on values. Give enable_metadata_cache=False to the plugin"
            )
        self._cached_specs[kind] = spec
        self._send(message, tensors, None if known is not None else spec.encode())
        return edges

    def recv_output(self, message: Message) -> ReceivedActivation:
        """Wait for an activation.

        Raises:
            RankFailedError: The connection is lost, or the wait timed out.
        """
        is_own = message.sender == self._stage
        if is_own:
            tensors = self._local.pop(message)
        else:
            tensors = self._recv(message)
        spec = self._spec_of[message.microbatch, message.position]
        leaves, given = [], []
        for tensor, one in zip(tensors, spec.tensors, strict=True):
            if one.requires_grad and self._with_gradients:
                leaves.append(tensor.requires_grad_())
                # Not a leaf, which in-place layers could not modify; and separate memory, which they may modify.
                tensor = tensor.clone() if is_own else _ReceivedTensor.apply(tensor)  # type: ignore[no-untyped-call]
            given.append(tensor)
        return ReceivedActivation(spec.build(given), leaves)

    def send_gradients(self, message: Message, received: ReceivedActivation) -> None:
        """Send the gradients of a received activation to the previous chunk, zeros where backward left none."""
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in received.leaves]
        if message.receiver == self._stage:
            self._local[message] = gradients
        else:
            self._send(message, gradients, None)

    def recv_gradients(self, message: Message) -> list[torch.Tensor]:
        """Wait for the gradients of a sent activation.

        Raises:
            RankFailedError: The connection is lost, or the wait timed out.
        """
        if message.sender == self._stage:
            gradients: list[torch.Tensor] = self._local.pop(message)
            return gradients
        return self._recv(message)

    def wait(self) -> None:
        """Wait for all sends.

        Raises:
            RankFailedError: A connection is lost, or the wait timed out.
        """
        for link in self._outgoing.values():
            link.wait()

    def _kind(self, message: Message) -> Hashable:
        return message.position, self._signatures[message.microbatch], self._with_gradients

    def _expected_specs(self, sender: int, message: Message) -> Sequence[TensorMeta] | None:
        """Return the specs of an incoming message's tensors, or None if they are not known yet."""
        if message.is_gradient:
            sent = self._spec_of.get((message.microbatch, message.position + 1))
            if sent is None:  # not sent yet
                return None
            return [one for one in sent.tensors if one.requires_grad]
        spec = self._cached_specs.get(self._kind(message)) if self._caches else None
        if spec is None:
            self._headers_due[sender] = message
            return None
        self._spec_of[message.microbatch, message.position] = spec
        return spec.tensors

    def _read_header(self, sender: int, header: bytes) -> Sequence[TensorMeta]:
        message = self._headers_due.pop(sender)
        spec = TreeSpec.decode(header)
        self._cached_specs[self._kind(message)] = self._spec_of[message.microbatch, message.position] = spec
        return spec.tensors

    def _recv(self, message: Message) -> list[torch.Tensor]:
        if self._is_ordered:
            self._start_in_order(message, can_wait=True)
        sender, index = self._recv_index[message]
        tensors = self._incoming[sender].recv(index)
        self._complete_sends(sender, self._sent_at[message])
        return [tensor.to(self._device) for tensor in tensors]

    def _start_in_order(self, last: Message, *, can_wait: bool) -> None:
        """Start the receives up to one that is due, or up to a send, in the common order; see Note [Ordered links].

        If `can_wait`, wait for headers. Otherwise stop before a message with a header.
        """
        due = self._due[last.is_to_later_stage]
        while last not in self._started and due[0] in self._recv_index:
            sender, index = self._recv_index[due[0]]
            channel = self._incoming[sender]
            if can_wait:
                channel.start(index)
            else:
                channel.post_recvs(index + 1)
            if channel.num_started <= index:
                return
            self._started.add(due.popleft())

    def _send(self, message: Message, tensors: Sequence[torch.Tensor], header: bytes | None) -> None:
        if self._is_ordered:
            self._start_in_order(message, can_wait=True)
            if self._due[message.is_to_later_stage].popleft() != message:
                raise AssertionError(f"stage {self._stage} sends {message} before one that precedes it")
        if message.receiver not in self._outgoing:
            group, rank = self._ends(self._stage, message.receiver)
            self._outgoing[message.receiver] = SendChannel(rank, group)
        self._outgoing[message.receiver].send(tensors, header)
        self._in_flight.setdefault(message.receiver, deque()).append(message)

    def _complete_sends(self, peer: int, index: int) -> None:
        """Complete the sends that `peer` received before its action `index`; see Note [Send completion]."""
        messages = self._in_flight.get(peer)
        count = 0
        while messages and self._received_at[messages[0]] <= index:
            messages.popleft()
            count += 1
        if count:
            self._outgoing[peer].finish(count)


class _ReceivedTensor(torch.autograd.Function):
    """Identity without a copy, as there is no other reference to a received tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _listed(spec: TreeSpec) -> str:
    return ", ".join(f"{one.dtype} {one.shape}{' with gradient' * one.requires_grad}" for one in spec.tensors) or "none"
