"""Tensors that travel with their shape and dtype."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed

from booster.comm import p2p, receive, receive_tensor, send, send_tensor, start_receive_tensor, start_send_tensor
from booster.device import current_device
from booster.errors import ConfigError

pytestmark = pytest.mark.on_device


def _random(shape, dtype):
    numel = torch.Size(shape).numel()
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    if dtype == torch.bool:
        raw %= 2
    return raw.view(dtype).view(shape).to(current_device())


def _same_bits(one, other):
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _exchanged(tensor):
    """Returns what rank 1 got on rank 1, and the tensor itself on rank 0."""
    if dist.get_rank() == 0:
        send_tensor(tensor, 1)
        return tensor
    return receive_tensor(0)


@distributed(2)
def test_every_dtype_arrives():
    for dtype in p2p._DTYPES:
        tensor = _random((3, 5), dtype)  # the same on both ranks: both are seeded alike
        assert _same_bits(_exchanged(tensor), tensor), dtype


@distributed(2)
@pytest.mark.parametrize(
    "shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4), (1,) * 15 + (2,), (1000, 1000)], ids=lambda shape: str(len(shape))
)
def test_every_shape_arrives(shape):
    tensor = _random(shape, torch.float32)
    assert _same_bits(_exchanged(tensor), tensor)


@distributed(2)
def test_what_lies_apart_arrives_together():
    whole = torch.arange(60.0, device=current_device()).view(5, 12)
    views = {
        "transposed": whole.t(),
        "strided": whole[::2, 1::3],
        "expanded": torch.ones(1, 4, device=current_device()).expand(3, 4),
        "conjugated": torch.view_as_complex(whole.view(30, 2)).conj(),
        "negated": torch.view_as_complex(whole.view(30, 2)).conj().imag,
        "parameter": torch.nn.Parameter(whole),
    }
    for name, view in views.items():
        got = _exchanged(view)
        assert torch.equal(got, view), name
        assert dist.get_rank() == 0 or got.is_contiguous(), name
        assert dist.get_rank() == 0 or not got.requires_grad, name


@distributed([2, 3], device="cpu")  # with NCCL, both ends start in one order
def test_all_send_before_any_receives(world_size):
    """Several messages between the same ranks, of different shapes, waited for in another order than started."""
    rank = dist.get_rank()
    others = [other for other in range(world_size) if other != rank]
    incoming = {(other, number): start_receive_tensor(other) for other in others for number in range(4)}
    outgoing = [
        start_send_tensor(torch.full((number * 10, rank + 1), float(number)), other)
        for other in others
        for number in range(4)
    ]
    for (other, number), awaited in reversed(list(incoming.items())):
        expected = torch.full((number * 10, other + 1), float(number))
        assert torch.equal(awaited.wait(), expected)
        assert awaited.wait() is awaited.wait()
    for started in outgoing:
        started.wait()
        started.wait()


@distributed(4, device="cpu")
def test_ranks_are_those_of_the_group():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, other = groups[rank % 2], 1 - rank // 2
    awaited = start_receive_tensor(other, group)
    started = start_send_tensor(torch.tensor(rank), other, group)
    assert awaited.wait().item() == (rank + 2) % 4
    started.wait()
    buffer = torch.zeros(2)
    if other:
        send(torch.full((2,), float(rank)), other, group)
    else:
        receive(buffer, other, group)
        assert buffer.tolist() == [rank - 2.0] * 2


@distributed(2)
def test_what_cannot_travel_is_refused_before_anything_is_sent():
    other = 1 - dist.get_rank()
    with pytest.raises(ConfigError, match="17 dimensions"):
        send_tensor(torch.ones((1,) * 17), other)
    with pytest.raises(ConfigError, match=r"torch\.sparse_coo"):
        send_tensor(torch.ones(3).to_sparse(), other)
    with pytest.raises(ConfigError, match="cannot send with rank"):
        send_tensor(torch.ones(3), dist.get_rank())
    with pytest.raises(ConfigError, match="cannot receive with rank 2"):
        receive_tensor(2)
    assert _exchanged(torch.ones(2)).tolist() == [1.0, 1.0]  # both still count alike
