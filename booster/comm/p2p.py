"""Point-to-point messages: into an existing tensor, or with a header of shape and dtype.

Functions that start or wait for a message raise `RankFailedError` if the other rank is lost or too late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from booster.errors import ConfigError

from .collective_op import CollectiveOp, record_received, start_op
from .collectives import collective_device, global_rank_of, group_rank, group_size, tensor_of_bytes
from .fake import fake_headers, is_fake_world

# The header of a tensor is a message of fixed length: the dtype's index in this list, the number of dimensions, and the
# shape, padded with zeros. The elements follow as bytes, so dtypes need no support by the backend. An empty tensor is
# its header alone.
_DTYPE_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128", "complex32"),
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_DTYPES = tuple(getattr(torch, name) for name in _DTYPE_NAMES)
_MAX_DIMS = 16
_HEADER_NUMEL = 2 + _MAX_DIMS


def send(tensor: torch.Tensor, receiver: int, group: dist.ProcessGroup) -> None:
    """Send a CPU tensor to a rank of the group, and return when it may be changed."""
    operation = _begin("send", receiver, group, sent=tensor.nbytes)
    operation.wait(operation.send_to(tensor, receiver, operation.tag))


def receive(tensor: torch.Tensor, sender: int, group: dist.ProcessGroup) -> None:
    """Receive a CPU tensor of equal size that a rank of the group sends by `send`."""
    operation = _begin("receive", sender, group, received=tensor.nbytes)
    operation.wait(operation.receive_from(tensor, sender, operation.tag))


@dataclass(slots=True, eq=False)
class InFlight:
    """Messages of one operation in flight, such as the send that `start_send_tensor` started."""

    _operation: CollectiveOp
    _works: Sequence[dist.Work]
    _buffers: Sequence[torch.Tensor]  # must live until they are sent or received

    def wait(self) -> None:
        """Wait until the receiver has what is sent, and it may be changed."""
        for work in self._works:
            self._operation.wait(work)
        self._works, self._buffers = (), ()


@dataclass(slots=True, eq=False)
class TensorReceive:
    """Receive in flight, started by `start_receive_tensor`."""

    _operation: CollectiveOp
    _sender: int
    _header: torch.Tensor
    _work: dist.Work
    _tensor: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Wait for the tensor and return it, contiguous, on the backend's device."""
        if self._tensor is None:
            operation = self._operation
            operation.wait(self._work)
            dtype, num_dims, *shape = self._header.tolist()
            tensor = torch.empty(shape[:num_dims], dtype=_DTYPES[dtype], device=self._header.device)
            record_received(tensor.nbytes)
            if tensor.numel():
                as_bytes = tensor.view(-1).view(torch.uint8)
                operation.wait(operation.receive_from(as_bytes, self._sender, operation.tag))
            self._tensor = tensor
        return self._tensor


def send_tensor(tensor: torch.Tensor, receiver: int, group: dist.ProcessGroup | None = None) -> None:
    """Send any dense tensor to a rank of the group that calls `receive_tensor`; return when it has arrived.

    Two ranks that both send first deadlock: use `start_send_tensor` there. Raises as that does.
    """
    start_send_tensor(tensor, receiver, group).wait()


def receive_tensor(sender: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the tensor, of any shape and dtype, that a rank of the group sends by `send_tensor`."""
    return start_receive_tensor(sender, group).wait()


def start_send_tensor(tensor: torch.Tensor, receiver: int, group: dist.ProcessGroup | None = None) -> InFlight:
    """Start sending a tensor of any dtype and up to 16 dimensions; it must not be changed until `wait` returns.

    Args:
        tensor: Dense tensor; may be empty or not contiguous.
        receiver: Rank in the group.
        group: Process group, optional; defaults to the world.

    Raises:
        ConfigError: The tensor is sparse or quantized or has too many dimensions, or the receiver is this rank.
    """
    header = _header_of(tensor)
    operation = _begin("send", receiver, group, sent=tensor.nbytes)
    device = collective_device(group)
    buffers = [header.to(device)]
    works = [operation.send_to(buffers[0], receiver, operation.header_tag)]
    if tensor.numel():
        buffers.append(_payload(tensor, device))
        works.append(operation.send_to(buffers[1], receiver, operation.tag))
    return InFlight(operation, works, buffers)


def start_receive_tensor(sender: int, group: dist.ProcessGroup | None = None) -> TensorReceive:
    """Start receiving a tensor that a rank of the group sends by `send_tensor` or `start_send_tensor`.

    Args:
        sender: Rank in the group.
        group: Process group, optional; defaults to the world.

    Raises:
        ConfigError: The sender is this rank.
    """
    operation = _begin("receive", sender, group)
    header = torch.empty(_HEADER_NUMEL, dtype=torch.int64, device=collective_device(group))
    return TensorReceive(operation, sender, header, operation.receive_from(header, sender, operation.header_tag))


def _begin(name: str, peer: int, group: dist.ProcessGroup | None, *, sent: int = 0, received: int = 0) -> CollectiveOp:
    _check_peer(peer, group, name)
    return start_op(name, group, sent=sent, received=received, peer=global_rank_of(peer, group))


def _check_peer(peer: int, group: dist.ProcessGroup | None, action: str) -> None:
    if peer == group_rank(group) or not 0 <= peer < group_size(group):
        raise ConfigError(
            f"rank {group_rank(group)} of a group of {group_size(group)} cannot {action} with rank {peer}: give another"
            " rank of the group"
        )


def _header_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIMS:
        raise ConfigError(
            f"a tensor of dtype {tensor.dtype}, layout {tensor.layout} and {tensor.dim()} dimensions cannot be sent:"
            f" send a dense one of a plain dtype and at most {_MAX_DIMS} dimensions"
        )
    shape = [*tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())]
    return torch.tensor([_DTYPES.index(tensor.dtype), tensor.dim(), *shape])


def _payload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the elements as contiguous bytes on the device."""
    resolved = tensor.detach().resolve_conj().resolve_neg()
    return resolved.to(device).contiguous().view(-1).view(torch.uint8)


# Note [Channels]
# Each tensor of a message is one operation. If the receiver does not know the shapes, a header is one more operation
# before them. The third operation of one end matches the third of the other: both ends must agree which messages have
# headers, and a receiver cannot start messages behind one of unknown shapes before it has read that header. Gloo moves
# a tensor, in its own thread, once both ends have started the operation. So a receiver starts early, and a sender waits
# only for messages that it knows the receiver has started: the receiver may itself wait for this rank.


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class SendChannel:
    """Sending end of a channel; see Note [Channels].

    Args:
        receiver: Rank in the group.
        group: Process group, None for the world. With NCCL, all ranks start its operations in a common order.

    Raises:
        ConfigError: The receiver is not another rank of the group.
    """

    def __init__(self, receiver: int, group: dist.ProcessGroup | None) -> None:
        _check_peer(receiver, group, "have a channel")
        self._receiver = receiver
        self._group = group
        if is_fake_world():
            fake_headers.open(group_rank(), global_rank_of(receiver, group))
        self._messages: deque[list[InFlight]] = deque()

    def send(self, tensors: Sequence[torch.Tensor], header: bytes | None = None) -> None:
        """Start sending a message; its tensors must not be changed until `wait` or `finish` has waited for it.

        Args:
            tensors: Dense tensors of any shape, on any device; may be empty or not contiguous.
            header: Header for a receiver that does not know the shapes, optional.

        Raises:
            ConfigError: A tensor is not dense.
        """
        device = collective_device(self._group)
        for tensor in tensors:
            if tensor.layout != torch.strided:
                raise ConfigError(
                    f"a tensor of layout {tensor.layout} and shape {tuple(tensor.shape)} cannot be sent: send a dense"
                    " one"
                )
        payloads = [_payload(tensor, device) for tensor in tensors]
        started = []
        if header is not None and is_fake_world():
            fake_headers.send(group_rank(), global_rank_of(self._receiver, self._group), header)
        elif header is not None:
            started.append(start_send_tensor(tensor_of_bytes(header), self._receiver, self._group))
        peer = global_rank_of(self._receiver, self._group)
        for payload in payloads:
            if payload.numel():
                operation = start_op("send", self._group, sent=payload.nbytes, peer=peer)
                work = operation.send_to(payload, self._receiver, operation.tag)
                started.append(InFlight(operation, [work], [payload]))
        self._messages.append(started)

    def wait(self) -> None:
        self.finish(len(self._messages))

    def finish(self, count: int) -> None:
        """Wait for the `count` oldest messages, which the receiver must have started to receive."""
        for _ in range(min(count, len(self._messages))):
            for one in self._messages[0]:  # kept if the wait fails: gloo may still read its tensors
                one.wait()
            self._messages.popleft()


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
        self, sender: int, group: dist.ProcessGroup | None, read_header: Callable[[bytes], Sequence[TensorMeta]]
    ) -> None:
        _check_peer(sender, group, "have a channel")
        self._sender = sender
        self._group = group
        self._read_header = read_header
        self._num_headers = 0
        self._descriptions: Sequence[Callable[[], Sequence[TensorMeta] | None]] = ()
        # Tensors and their receives, as far as they have started; None: taken.
        self._messages: list[tuple[list[torch.Tensor], list[InFlight]] | None] = []

    def expect(self, descriptions: Sequence[Callable[[], Sequence[TensorMeta] | None]]) -> None:
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
        """
        while len(self._messages) < min(count, len(self._descriptions)):
            specs = self._descriptions[len(self._messages)]()
            if specs is None:
                return
            self._start(specs)

    @property
    def num_started(self) -> int:
        """Number of the expected messages, from the first, that this rank has started to receive."""
        return len(self._messages)

    def start(self, index: int) -> None:
        """Start receiving the messages up to this index; wait for headers of unknown shapes."""
        while len(self._messages) <= index:
            self.post_recvs(index + 1)
            if len(self._messages) <= index:
                self._start(self._read_header(self._receive_header()))

    def recv(self, index: int) -> list[torch.Tensor]:
        """Wait for a message and return its tensors, contiguous and on the backend's device.

        Args:
            index: Index among the expected messages; in any order, each once.
        """
        self.start(index)
        message = self._messages[index]
        if message is None:
            raise AssertionError(f"rank {dist.get_rank()} takes message {index} for the second time")
        tensors, in_flight = message
        for one in in_flight:
            one.wait()
        self._messages[index] = None
        return tensors

    def _receive_header(self) -> bytes:
        self._num_headers += 1
        if is_fake_world():
            return fake_headers.receive(global_rank_of(self._sender, self._group), group_rank(), self._num_headers - 1)
        return bytes(receive_tensor(self._sender, self._group).cpu().numpy())

    def _start(self, specs: Sequence[TensorMeta]) -> None:
        device, peer = collective_device(self._group), global_rank_of(self._sender, self._group)
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
        in_flight = []
        for tensor in tensors:
            if tensor.numel():
                operation = start_op("receive", self._group, received=tensor.nbytes, peer=peer)
                work = operation.receive_from(tensor.view(-1).view(torch.uint8), self._sender, operation.tag)
                in_flight.append(InFlight(operation, [work], [tensor]))
        self._messages.append((tensors, in_flight))
