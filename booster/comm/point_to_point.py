"""Point-to-point messages: into an existing tensor, or with a header of shape and dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from booster.comm.collectives import collective_device, global_rank_of, group_rank, group_size
from booster.comm.counter import record
from booster.comm.groups import new_group
from booster.comm.imagined import is_fake_world
from booster.comm.operation import CollectiveOp, start_op
from booster.errors import ConfigError

__all__ = [
    "TensorReceive",
    "TensorSend",
    "new_cpu_group",
    "receive",
    "receive_tensor",
    "send",
    "send_tensor",
    "start_receive_tensor",
    "start_send_tensor",
]

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


def new_cpu_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return a new gloo group of the same ranks, for a thread beside the collectives of training.

    Collective: every rank of the group must call it.
    """
    if is_fake_world() and group is not None:
        return group
    ranks = [global_rank_of(rank, group) for rank in range(group_size(group))]
    made = new_group(ranks, "gloo", use_local_synchronization=group is not None)
    if made is None:
        raise AssertionError(f"rank {dist.get_rank()} is not among its own group's ranks {ranks}")
    return made


def send(tensor: torch.Tensor, receiver: int, group: dist.ProcessGroup) -> None:
    """Send a CPU tensor to a rank of the group, and return when it may be changed.

    Raises:
        RankFailedError: The receiver is lost or too late.
    """
    operation = _begin("send", receiver, group, sent=tensor.nbytes)
    operation.wait(operation.send_to(tensor, receiver, operation.tag))


def receive(tensor: torch.Tensor, sender: int, group: dist.ProcessGroup) -> None:
    """Receive a CPU tensor of equal size that a rank of the group sends by `send`.

    Raises:
        RankFailedError: The sender is lost or too late.
    """
    operation = _begin("receive", sender, group, received=tensor.nbytes)
    operation.wait(operation.receive_from(tensor, sender, operation.tag))


class TensorSend:
    """Send in flight, started by `start_send_tensor`."""

    def __init__(self, operation: CollectiveOp, works: Sequence[dist.Work], buffers: Sequence[torch.Tensor]) -> None:
        self._operation = operation
        self._works = works
        self._buffers = buffers  # must live until they are sent

    def wait(self) -> None:
        """Wait until the receiver has the tensor, and it may be changed.

        Raises:
            RankFailedError: The receiver is lost or too late.
        """
        for work in self._works:
            self._operation.wait(work)
        self._works, self._buffers = (), ()


class TensorReceive:
    """Receive in flight, started by `start_receive_tensor`."""

    def __init__(self, operation: CollectiveOp, sender: int, header: torch.Tensor, work: dist.Work) -> None:
        self._operation = operation
        self._sender = sender
        self._header = header
        self._work = work
        self._tensor: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Wait for the tensor and return it, contiguous, on the backend's device.

        Raises:
            RankFailedError: The sender is lost or too late.
        """
        if self._tensor is None:
            self._operation.wait(self._work)
            self._tensor = self._receive(_empty_like_header(self._header))
        return self._tensor

    def _receive(self, tensor: torch.Tensor) -> torch.Tensor:
        record("receive", calls=0, received=tensor.nbytes)
        if tensor.numel():
            operation = self._operation
            operation.wait(operation.receive_from(_as_bytes(tensor), self._sender, operation.tag))
        return tensor


def send_tensor(tensor: torch.Tensor, receiver: int, group: dist.ProcessGroup | None = None) -> None:
    """Send any dense tensor to a rank of the group that calls `receive_tensor`; return when it has arrived.

    Two ranks that both send first deadlock: use `start_send_tensor` there. Raises as that does.
    """
    start_send_tensor(tensor, receiver, group).wait()


def receive_tensor(sender: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the tensor, of any shape and dtype, that a rank of the group sends by `send_tensor`.

    Raises:
        RankFailedError: The sender is lost or too late.
    """
    return start_receive_tensor(sender, group).wait()


def start_send_tensor(tensor: torch.Tensor, receiver: int, group: dist.ProcessGroup | None = None) -> TensorSend:
    """Start sending a tensor of any dtype and up to 16 dimensions; it must not be changed until `wait` returns.

    Args:
        tensor: Dense tensor; may be empty or not contiguous.
        receiver: Rank in the group.
        group: Process group, optional; defaults to the world.

    Raises:
        ConfigError: The tensor is sparse or quantized or has too many dimensions, or the receiver is this rank.
        RankFailedError: The receiver is lost.
    """
    header = _header_of(tensor)
    operation = _begin("send", receiver, group, sent=tensor.nbytes)
    device = collective_device(group)
    buffers = [header.to(device)]
    works = [operation.send_to(buffers[0], receiver, operation.header_tag)]
    if tensor.numel():
        buffers.append(_as_bytes(tensor.detach().resolve_conj().resolve_neg().to(device).contiguous()))
        works.append(operation.send_to(buffers[1], receiver, operation.tag))
    return TensorSend(operation, works, buffers)


def start_receive_tensor(sender: int, group: dist.ProcessGroup | None = None) -> TensorReceive:
    """Start receiving a tensor that a rank of the group sends by `send_tensor` or `start_send_tensor`.

    Args:
        sender: Rank in the group.
        group: Process group, optional; defaults to the world.

    Raises:
        ConfigError: The sender is this rank.
        RankFailedError: The sender is lost.
    """
    operation = _begin("receive", sender, group)
    header = torch.empty(_HEADER_NUMEL, dtype=torch.int64, device=collective_device(group))
    return TensorReceive(operation, sender, header, operation.receive_from(header, sender, operation.header_tag))


def _begin(name: str, peer: int, group: dist.ProcessGroup | None, *, sent: int = 0, received: int = 0) -> CollectiveOp:
    if peer == group_rank(group) or not 0 <= peer < group_size(group):
        raise ConfigError(
            f"rank {group_rank(group)} of a group of {group_size(group)} cannot {name} with rank {peer}: give another"
            " rank of the group"
        )
    return start_op(name, group, sent=sent, received=received, peer=global_rank_of(peer, group))


def _header_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIMS:
        raise ConfigError(
            f"a tensor of dtype {tensor.dtype}, layout {tensor.layout} and {tensor.dim()} dimensions cannot be sent:"
            f" send a dense one of a plain dtype and at most {_MAX_DIMS} dimensions"
        )
    shape = [*tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())]
    return torch.tensor([_DTYPES.index(tensor.dtype), tensor.dim(), *shape])


def _empty_like_header(header: torch.Tensor) -> torch.Tensor:
    dtype, num_dims, *shape = header.tolist()
    return torch.empty(shape[:num_dims], dtype=_DTYPES[dtype], device=header.device)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
