"""Point-to-point communication of activations and their gradients between stages.

Note [Cached shapes]
The first activation of a kind is sent with a header that describes its tree, later ones without. The kind is the
receiving position, the signature of the microbatch, and whether gradients will return. Both ends process the same
batches, so both know which kinds are cached. Gradients return for the tensors that required them, in their shapes, and
never need a header.

Note [Send completion]
Gloo does not report the completion of a send without waiting for it. But a message from the receiver implies it: all
that the receiver took before it sent that message has arrived, and the schedule determines what that was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from booster.comm import RecvChannel, SendChannel, TensorSpec
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import (
    Message,
    StageAction,
    action_list,
    check_orders,
    incoming_messages,
)
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.pieces import StagePartition
from booster.plugins.hybrid_parallel.pipeline_parallel.tensor_trees import TreeSpec, flatten

__all__ = ["ReceivedActivation", "SentActivation", "StageP2P"]

_MAX_CACHED_SPECS = 1024
_NUM_POSTED_AHEAD = 2  # number of actions whose receives are posted ahead

LinkPeer = Callable[[int, int], tuple["dist.ProcessGroup | None", int]]
"""Returns the group of the link from a sending to a receiving stage, and the peer's rank in it."""


@dataclass(frozen=True, slots=True)
class SentActivation:
    """A sent activation.

    Attributes:
        form: Tree spec of the activation.
        edges: Gradient edges of its tensors that require gradients, in order.
    """

    spec: TreeSpec
    edges: Sequence[torch.autograd.graph.GradientEdge]


@dataclass(frozen=True, slots=True)
class ReceivedActivation:
    """A received activation.

    Attributes:
        tree: The activation.
        leaves: Its tensors that require gradients.
    """

    tree: Any
    leaves: Sequence[torch.Tensor]

    def gradients(self) -> list[torch.Tensor]:
        """Return the leaves' gradients after backward, zeros where there are none."""
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves]


class StageP2P:
    """Sends and receives of a stage.

    Args:
        division: Assignment of model chunks to stages.
        stage: Index of this stage.
        ends: Returns group and peer of a link.
        device: Compute device of the stage.
        caches_forms: If True, headers are cached, see Note [Cached shapes]; otherwise each activation has one.
    """

    def __init__(
        self, division: StagePartition, stage: int, ends: LinkPeer, device: torch.device, *, caches_specs: bool
    ) -> None:
        self._division = division
        self._stage = stage
        self._ends = ends
        self._device = device
        self._caches = caches_specs
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

    def begin(self, signatures: Sequence[Hashable], *, with_gradients: bool) -> list[StageAction]:
        """Start a batch, and return the stage's actions. No communication.

        Args:
            signatures: Signatures of the microbatches.
            with_gradients: If True, the batch has backwards.

        Raises:
            ConfigError: The schedule does not support this number of microbatches.
        """
        self._signatures = signatures
        self._with_gradients = with_gradients
        if len(signatures) not in self._checked:
            division = self._division
            check_orders(division.schedule, division.num_stages, len(signatures), division.num_chunks)
            self._checked.add(len(signatures))
        self._steps = self._actions_of(self._stage)
        self._local: dict[Message, Any] = {}
        self._spec_of: dict[tuple[int, int], TreeSpec] = {}
        self._in_flight: dict[int, deque[Message]] = {}
        self._recv_index: dict[Message, tuple[int, int]] = {}
        expected = incoming_messages(*self._arguments(self._stage), forward_only=not with_gradients)
        for sender, messages in expected.items():
            self._link_from(sender).expect([self._expected_specs(sender, message) for message in messages])
            self._recv_index |= {message: (sender, index) for index, message in enumerate(messages)}
        peers = {step.sends.receiver for step in self._steps if step.sends} | set(expected)
        self._sent_at: dict[Message, int] = {}
        self._received_at: dict[Message, int] = {}
        for peer in peers - {self._stage}:
            for place, step in enumerate(self._actions_of(peer)):
                if step.sends is not None:
                    self._sent_at[step.sends] = place
                if step.receives is not None:
                    self._received_at[step.receives] = place
        return self._steps

    def post_recvs(self, index: int) -> None:
        """Post the receives of the next actions from index `index` on."""
        for step in self._steps[index : index + _NUM_POSTED_AHEAD + 1]:
            if step.receives in self._recv_index:
                sender, index = self._recv_index[step.receives]  # type: ignore[index]
                self._incoming[sender].post_recvs(index + 1)

    def send_output(self, message: Message, tree: Any) -> SentActivation:
        """Send an activation to the next chunk.

        Raises:
            ConfigError: It has unsupported values, or other shapes than an earlier one of the same kind.
        """
        tensors, spec = flatten(tree)
        edges = [
            torch.autograd.graph.get_gradient_edge(tensor)
            for tensor, one in zip(tensors, spec.tensors, strict=True)
            if one.requires_grad
        ]
        self._spec_of[message.microbatch, message.position] = spec
        if message.receiver == self._stage:
            self._local[message] = [tensor.detach() for tensor in tensors]
            return SentActivation(spec, edges)
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
        return SentActivation(spec, edges)

    def recv_output(self, message: Message) -> ReceivedActivation:
        """Wait for an activation.

        Raises:
            RankFailedError: The connection is lost, or the wait timed out.
        """
        is_own = message.sender == self._stage
        if is_own:
            tensors = self._local.pop(message)
        else:
            tensors = [tensor.to(self._device) for tensor in self._recv(message)]
        spec = self._spec_of[message.microbatch, message.position]
        leaves, given = [], []
        for tensor, one in zip(tensors, spec.tensors, strict=True):
            if one.requires_grad and self._with_gradients:
                leaves.append(tensor.requires_grad_())
                # Not a leaf, which in-place layers could not modify; and separate memory, which they may modify.
                tensor = tensor.clone() if is_own else _ReceivedTensor.apply(tensor)  # type: ignore[no-untyped-call]
            given.append(tensor)
        return ReceivedActivation(spec.build(given), leaves)

    def send_gradients(self, message: Message, gradients: Sequence[torch.Tensor]) -> None:
        """Send gradients to the previous chunk."""
        if message.receiver == self._stage:
            self._local[message] = list(gradients)
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
        return [tensor.to(self._device) for tensor in self._recv(message)]

    def wait(self) -> None:
        """Wait for all sends.

        Raises:
            RankFailedError: A connection is lost, or the wait timed out.
        """
        for link in self._outgoing.values():
            link.wait()

    def _actions_of(self, stage: int) -> list[StageAction]:
        return action_list(*self._arguments(stage), forward_only=not self._with_gradients)

    def _arguments(self, stage: int) -> tuple[Any, int, int, int, int]:
        division = self._division
        return division.schedule, stage, division.num_stages, len(self._signatures), division.num_chunks

    def _kind(self, message: Message) -> Hashable:
        return message.position, self._signatures[message.microbatch], self._with_gradients

    def _expected_specs(self, sender: int, message: Message) -> Callable[[], Sequence[TensorSpec] | None]:
        def gradient() -> Sequence[TensorSpec] | None:
            spec = self._spec_of.get((message.microbatch, message.position + 1))
            if spec is None:  # not sent yet
                return None
            return [TensorSpec(one.shape, one.dtype) for one in spec.tensors if one.requires_grad]

        def output() -> Sequence[TensorSpec] | None:
            spec = self._cached_specs.get(self._kind(message)) if self._caches else None
            if spec is None:
                self._headers_due[sender] = message
                return None
            self._spec_of[message.microbatch, message.position] = spec
            return spec.specs

        return gradient if message.is_gradient else output

    def _read_header(self, sender: int, header: bytes) -> Sequence[TensorSpec]:
        message = self._headers_due.pop(sender)
        spec = TreeSpec.decode(header)
        self._cached_specs[self._kind(message)] = self._spec_of[message.microbatch, message.position] = spec
        return spec.specs

    def _recv(self, message: Message) -> list[torch.Tensor]:
        sender, index = self._recv_index[message]
        _, tensors = self._incoming[sender].recv(index)
        self._complete_sends(sender, self._sent_at[message])
        return tensors

    def _send(self, message: Message, tensors: Sequence[torch.Tensor], header: bytes | None) -> None:
        self._link_to(message.receiver).send(tensors, header)
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

    def _link_to(self, receiver: int) -> SendChannel:
        if receiver not in self._outgoing:
            group, rank = self._ends(self._stage, receiver)
            self._outgoing[receiver] = SendChannel(rank, group)
        return self._outgoing[receiver]

    def _link_from(self, sender: int) -> RecvChannel:
        if sender not in self._incoming:
            group, rank = self._ends(sender, self._stage)
            self._incoming[sender] = RecvChannel(rank, group, lambda header: self._read_header(sender, header))
        return self._incoming[sender]


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
