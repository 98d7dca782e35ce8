"""Links: messages of tensors that go one way between two ranks, in order, while both compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from booster.comm.collectives import collective_device, global_rank_of, group_rank, group_size
from booster.comm.operation import Operation, begin
from booster.comm.point_to_point import TensorSend, receive_tensor, start_send_tensor
from booster.errors import ConfigError

__all__ = ["IncomingLink", "OutgoingLink", "TensorSpec"]

# Note [Links]
# Each tensor of a message is one operation, and a header one more, which goes ahead where the receiver does not know
# the shapes. The third operation of one end is for the third of the other: so both ends have to agree which messages
# have headers, and a receiver that meets a message of unknown shapes can't begin with those behind it before it has
# read the header. Gloo starts to move a tensor when both ends have begun with it, and moves it in a thread of its own.
# So a receiver begins early, and a sender waits only for what it knows to have been begun: its receiver may itself wait
# for this rank.


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a receiver has to know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor that is under way; `tensor` has to live until the end."""

    operation: Operation
    work: dist.Work
    tensor: torch.Tensor

    def wait(self) -> None:
        self.operation.wait(self.work)


@dataclass(frozen=True, slots=True)
class _Outgoing:
    parts: Sequence[_Part]
    header: TensorSend | None

    def wait(self) -> None:
        if self.header is not None:
            self.header.wait()
        for part in self.parts:
            part.wait()


@dataclass(frozen=True, slots=True)
class _Incoming:
    header: bytes | None
    tensors: list[torch.Tensor]
    parts: Sequence[_Part]


class OutgoingLink:
    """The sending end of a link; see Note [Links].

    Args:
        receiver: Rank in the group.
        group: None: the world. With NCCL, one that no other link uses.

    Raises:
        ConfigError: There is no such rank beside this one.
    """

    def __init__(self, receiver: int, group: dist.ProcessGroup | None) -> None:
        _check_peer(receiver, group)
        self._receiver = receiver
        self._group = group
        self._messages: deque[_Outgoing] = deque()

    @property
    def num_under_way(self) -> int:
        """Messages that this rank has not seen to be done."""
        return len(self._messages)

    def send(self, tensors: Sequence[torch.Tensor], header: bytes | None = None) -> None:
        """Starts to send a message; its tensors must not be changed until the end, which `wait` or `finish` sees.

        Args:
            tensors: Dense ones of any shape, on any device; may be empty or not contiguous.
            header: Goes ahead, for a receiver that does not know the shapes; None: it knows them.

        Raises:
            ConfigError: A tensor is not dense.
            RankFailedError: The receiver is lost.
        """
        device = collective_device(self._group)
        payloads = [_payload(tensor, device) for tensor in tensors]
        ahead = None
        if header is not None:
            ahead = start_send_tensor(_tensor_of(header), self._receiver, self._group)
        self._messages.append(_Outgoing([self._start(payload) for payload in payloads if payload.numel()], ahead))

    def wait(self) -> None:
        """Waits for all messages.

        Raises:
            RankFailedError: The receiver is lost or too late.
        """
        while self._messages:
            self._wait_for_oldest()

    def finish(self, count: int) -> None:
        """Waits for the oldest messages, of which the caller knows that the receiver has begun with them.

        Raises:
            RankFailedError: The receiver is lost or too late.
        """
        for _ in range(min(count, len(self._messages))):
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        self._messages[0].wait()  # stays where it fails: gloo may still read from its tensors
        self._messages.popleft()

    def _start(self, payload: torch.Tensor) -> _Part:
        operation = begin("send", self._group, sent=payload.nbytes, peer=global_rank_of(self._receiver, self._group))
        return _Part(operation, operation.send_to(payload, self._receiver, operation.tag), payload)


class IncomingLink:
    """The receiving end of a link; see Note [Links].

    Args:
        sender: Rank in the group.
        group: As for the other end.
        read_header: Returns what a message with this header consists of. Called once for each message with a header, in
            the order of the messages, and before the descriptions of later ones, which may depend on it.

    Raises:
        ConfigError: There is no such rank beside this one.
    """

    def __init__(
        self, sender: int, group: dist.ProcessGroup | None, read_header: Callable[[bytes], Sequence[TensorSpec]]
    ) -> None:
        _check_peer(sender, group)
        self._sender = sender
        self._group = group
        self._read_header = read_header
        self._descriptions: Sequence[Callable[[], Sequence[TensorSpec] | None]] = ()
        self._messages: list[_Incoming | None] = []  # as far as begun; None: taken

    def expect(self, descriptions: Sequence[Callable[[], Sequence[TensorSpec] | None]]) -> None:
        """Says what will come, in order; all that was to come before must have been taken. No communication.

        Args:
            descriptions: Each returns what its message consists of, or None where that is not known and a header comes
                ahead. Called once its turn has come.
        """
        num_taken = self._messages.count(None)
        if num_taken < len(self._descriptions):
            raise AssertionError(
                f"rank {dist.get_rank()} has taken {num_taken} of {len(self._descriptions)} messages from rank"
                f" {self._sender} of the group, and expects others already"
            )
        self._descriptions = list(descriptions)
        self._messages = []

    def post(self, count: int) -> None:
        """Begins to receive the first messages, as far as their shapes are known.

        Args:
            count: How many of those that `expect` was told, from the first; those begun already included.

        Raises:
            RankFailedError: The sender is lost.
        """
        while len(self._messages) < min(count, len(self._descriptions)):
            specs = self._descriptions[len(self._messages)]()
            if specs is None:
                return
            self._messages.append(self._start(None, specs))

    def take(self, index: int) -> tuple[bytes | None, list[torch.Tensor]]:
        """Waits for a message and returns its header (None: it had none) and its tensors.

        Args:
            index: Place in what `expect` was told; in any order, each once.

        Returns:
            The header, and contiguous tensors on the device that the group's backend communicates from.

        Raises:
            RankFailedError: The sender is lost or too late.
        """
        while len(self._messages) <= index:
            self.post(index + 1)
            if len(self._messages) <= index:
                header = bytes(receive_tensor(self._sender, self._group).cpu().numpy())
                self._messages.append(self._start(header, self._read_header(header)))
        message = self._messages[index]
        if message is None:
            raise AssertionError(f"rank {dist.get_rank()} takes message {index} for the second time")
        for part in message.parts:
            part.wait()
        self._messages[index] = None
        return message.header, message.tensors

    def _start(self, header: bytes | None, specs: Sequence[TensorSpec]) -> _Incoming:
        device = collective_device(self._group)
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
        return _Incoming(header, tensors, [self._start_part(tensor) for tensor in tensors if tensor.numel()])

    def _start_part(self, tensor: torch.Tensor) -> _Part:
        peer = global_rank_of(self._sender, self._group)
        operation = begin("receive", self._group, received=tensor.nbytes, peer=peer)
        return _Part(operation, operation.receive_from(_as_bytes(tensor), self._sender, operation.tag), tensor)


def _check_peer(peer: int, group: dist.ProcessGroup | None) -> None:
    if peer == group_rank(group) or not 0 <= peer < group_size(group):
        raise ConfigError(
            f"rank {group_rank(group)} of a group of {group_size(group)} can't have a link with rank {peer}: give the"
            " number of another rank of the group"
        )


def _payload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.layout != torch.strided:
        raise ConfigError(
            f"a tensor of layout {tensor.layout} and shape {tuple(tensor.shape)} can't be sent: send a dense one"
        )
    return _as_bytes(tensor.detach().resolve_conj().resolve_neg().to(device).contiguous())


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _tensor_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
