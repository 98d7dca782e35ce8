"""Channels: ordered messages of tensors in one direction between two ranks, overlapped with computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from booster.comm.collectives import collective_device, global_rank_of, group_rank, group_size
from booster.comm.operation import CollectiveOp, start_op
from booster.comm.point_to_point import TensorSend, receive_tensor, start_send_tensor
from booster.errors import ConfigError

__all__ = ["RecvChannel", "SendChannel", "TensorSpec"]

# Note [Channels]
# Each tensor of a message is one operation. If the receiver does not know the shapes, a header is one more operation
# before them. The third operation of one end matches the third of the other: both ends must agree which messages have
# headers, and a receiver cannot start messages behind one of unknown shapes before it has read that header. Gloo moves
# a tensor, in its own thread, once both ends have started the operation. So a receiver starts early, and a sender waits
# only for messages that it knows the receiver has started: the receiver may itself wait for this rank.


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _TensorInFlight:
    """Tensor in flight; `tensor` must live until the wait returns."""

    operation: CollectiveOp
    work: dist.Work
    tensor: torch.Tensor

    def wait(self) -> None:
        self.operation.wait(self.work)


@dataclass(frozen=True, slots=True)
class _SentMessage:
    tensors: Sequence[_TensorInFlight]
    header: TensorSend | None

    def wait(self) -> None:
        if self.header is not None:
            self.header.wait()
        for part in self.tensors:
            part.wait()


@dataclass(frozen=True, slots=True)
class _ReceivedMessage:
    header: bytes | None
    tensors: list[torch.Tensor]
    works: Sequence[_TensorInFlight]


class SendChannel:
    """Sending end of a channel; see Note [Channels].

    Args:
        receiver: Rank in the group.
        group: Process group, None for the world. With NCCL, one that no other channel uses.

    Raises:
        ConfigError: The receiver is not another rank of the group.
    """

    def __init__(self, receiver: int, group: dist.ProcessGroup | None) -> None:
        _check_peer(receiver, group)
        self._receiver = receiver
        self._group = group
        self._messages: deque[_SentMessage] = deque()

    @property
    def num_in_flight(self) -> int:
        """Number of messages in flight."""
        return len(self._messages)

    def send(self, tensors: Sequence[torch.Tensor], header: bytes | None = None) -> None:
        """Start sending a message; its tensors must not be changed until `wait` or `finish` has waited for it.

        Args:
            tensors: Dense tensors of any shape, on any device; may be empty or not contiguous.
            header: Header for a receiver that does not know the shapes, optional.

        Raises:
            ConfigError: A tensor is not dense.
            RankFailedError: The receiver is lost.
        """
        device = collective_device(self._group)
        payloads = [_payload(tensor, device) for tensor in tensors]
        ahead = None
        if header is not None:
            ahead = start_send_tensor(_tensor_of(header), self._receiver, self._group)
        self._messages.append(_SentMessage([self._start(payload) for payload in payloads if payload.numel()], ahead))

    def wait(self) -> None:
        """Wait for all messages.

        Raises:
            RankFailedError: The receiver is lost or too late.
        """
        while self._messages:
            self._wait_for_oldest()

    def finish(self, count: int) -> None:
        """Wait for the `count` oldest messages, which the receiver must have started to receive.

        Raises:
            RankFailedError: The receiver is lost or too late.
        """
        for _ in range(min(count, len(self._messages))):
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        self._messages[0].wait()  # kept if it fails: gloo may still read its tensors
        self._messages.popleft()

    def _start(self, payload: torch.Tensor) -> _TensorInFlight:
        operation = start_op("send", self._group, sent=payload.nbytes, peer=global_rank_of(self._receiver, self._group))
        return _TensorInFlight(operation, operation.send_to(payload, self._receiver, operation.tag), payload)


class RecvChannel:
    """Receiving end of a channel; see Note [Channels].

    Args:
        sender: Rank in the group.
        group: Process group of the sending end.
        read_header: Function that returns the tensors of a message with this header. Called once for each message with
            a header, in the order of the messages, and before the descriptions of later ones, which may depend on it.

    Raises:
        ConfigError: The sender is not another rank of the group.
    """

    def __init__(
        self, sender: int, group: dist.ProcessGroup | None, read_header: Callable[[bytes], Sequence[TensorSpec]]
    ) -> None:
        _check_peer(sender, group)
        self._sender = sender
        self._group = group
        self._read_header = read_header
        self._descriptions: Sequence[Callable[[], Sequence[TensorSpec] | None]] = ()
        self._messages: list[_ReceivedMessage | None] = []  # as far as begun; None: taken

    def expect(self, descriptions: Sequence[Callable[[], Sequence[TensorSpec] | None]]) -> None:
        """Set the next messages, in order; all earlier ones must have been taken. No communication.

        Args:
            descriptions: Functions that return the tensors of a message, or None if it has a header. Called when the
                message is started.
        """
        num_taken = self._messages.count(None)
        if num_taken < len(self._descriptions):
            raise AssertionError(
                f"rank {dist.get_rank()} expects new messages from rank {self._sender} of the group, and has taken"
                f" {num_taken} of {len(self._descriptions)} earlier ones"
            )
        self._descriptions = list(descriptions)
        self._messages = []

    def post_recvs(self, count: int) -> None:
        """Start receiving the first messages, up to the first one of unknown shapes.

        Args:
            count: Number of the expected messages, from the first, including those started already.

        Raises:
            RankFailedError: The sender is lost.
        """
        while len(self._messages) < min(count, len(self._descriptions)):
            specs = self._descriptions[len(self._messages)]()
            if specs is None:
                return
            self._messages.append(self._start(None, specs))

    def recv(self, index: int) -> tuple[bytes | None, list[torch.Tensor]]:
        """Wait for a message and return it.

        Args:
            index: Index among the expected messages; in any order, each once.

        Returns:
            The header, if it has one, and contiguous tensors on the backend's device.

        Raises:
            RankFailedError: The sender is lost or too late.
        """
        while len(self._messages) <= index:
            self.post_recvs(index + 1)
            if len(self._messages) <= index:
                header = bytes(receive_tensor(self._sender, self._group).cpu().numpy())
                self._messages.append(self._start(header, self._read_header(header)))
        message = self._messages[index]
        if message is None:
            raise AssertionError(f"rank {dist.get_rank()} takes message {index} for the second time")
        for part in message.works:
            part.wait()
        self._messages[index] = None
        return message.header, message.tensors

    def _start(self, header: bytes | None, specs: Sequence[TensorSpec]) -> _ReceivedMessage:
        device = collective_device(self._group)
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
        return _ReceivedMessage(header, tensors, [self._start_tensor(tensor) for tensor in tensors if tensor.numel()])

    def _start_tensor(self, tensor: torch.Tensor) -> _TensorInFlight:
        peer = global_rank_of(self._sender, self._group)
        operation = start_op("receive", self._group, received=tensor.nbytes, peer=peer)
        return _TensorInFlight(
            operation, operation.receive_from(_as_bytes(tensor), self._sender, operation.tag), tensor
        )


def _check_peer(peer: int, group: dist.ProcessGroup | None) -> None:
    if peer == group_rank(group) or not 0 <= peer < group_size(group):
        raise ConfigError(
            f"rank {group_rank(group)} of a group of {group_size(group)} cannot have a channel with rank {peer}: give"
            " another rank of the group"
        )


def _payload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.layout != torch.strided:
        raise ConfigError(
            f"a tensor of layout {tensor.layout} and shape {tuple(tensor.shape)} cannot be sent: send a dense one"
        )
    return _as_bytes(tensor.detach().resolve_conj().resolve_neg().to(device).contiguous())


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _tensor_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
