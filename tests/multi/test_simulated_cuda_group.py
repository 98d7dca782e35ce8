"""The backend of the simulated device: NCCL's collectives, dtypes and refusals."""

from __future__ import annotations

import copy
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from device_cases import check_collectives
from harness import RanksFailed, distributed, run_ranks

from booster.comm import new_group, new_groups, num_communicators

SIMULATED = "simulated_cuda"
MOVED = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
MOVED += (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)


def _device() -> torch.device:
    return torch.device("cuda", dist.get_rank())


@distributed(2, device=SIMULATED)
def test_collectives():
    device = _device()
    assert dist.get_backend() == "nccl"
    assert dist.group.WORLD.bound_device_id == device
    check_collectives(device)


@distributed(2, device=SIMULATED)
def test_every_dtype_of_nccl_moves_and_others_are_refused():
    device = _device()
    for dtype in MOVED:
        mine = (torch.arange(3, device=device) + dist.get_rank()).to(dtype)
        joined = torch.empty(6, dtype=dtype, device=device)
        dist.all_gather_into_tensor(joined, mine)
        expected = torch.cat([torch.arange(3, device=device), torch.arange(3, device=device) + 1]).to(dtype)
        assert torch.equal(joined.view(torch.uint8), expected.view(torch.uint8)), dtype
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        with pytest.raises(TypeError, match="data type is not supported for NCCL"):
            dist.broadcast(torch.zeros(2, dtype=dtype, device=device), src=0)
    with pytest.raises(RuntimeError, match="Unsupported Float8 type for NCCL reduction"):
        dist.all_reduce(torch.zeros(2, device=device).to(torch.float8_e5m2))
    with pytest.raises(ValueError, match="bitwise"):
        dist.all_reduce(torch.zeros(2, dtype=torch.int32, device=device), dist.ReduceOp.BOR)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.zeros(2))
    with pytest.raises(RuntimeError, match="contiguous"):
        dist.all_reduce(torch.zeros(4, 4, device=device)[:, :2])


@distributed(2, device=SIMULATED)
def test_tensors_without_elements_travel_too():
    empty, other = (torch.empty(0, dtype=torch.bfloat16, device=_device()) for _ in range(2))
    dist.all_reduce(empty)
    dist.reduce_scatter_tensor(other, empty)
    dist.all_gather_into_tensor(other, empty)
    assert other.numel() == empty.numel() == 0


@distributed(2, device=SIMULATED)
def test_sums_are_rounded_to_the_dtype_that_travels():
    value = torch.tensor([1.0 if dist.get_rank() == 0 else 2**-9], dtype=torch.bfloat16, device=_device())
    dist.all_reduce(value)
    assert value.item() == 1.0


@distributed(4, device=SIMULATED, timeout=20)
def test_groups_and_splits():
    rank, device = dist.get_rank(), _device()
    pair = dist.new_group([3, 1])  # torch sorts the ranks
    if rank in (1, 3):
        dist.all_reduce(total := torch.tensor([rank], device=device), group=pair)
        assert total.item() == 4
        assert dist.get_rank(pair) == rank // 2
    mesh = dist.device_mesh.init_device_mesh("cuda", (2, 2), mesh_dim_names=("a", "b"))
    for name, expected in (("a", rank % 2 * 2 + 2), ("b", rank // 2 * 4 + 1)):
        dist.all_reduce(total := torch.tensor([rank], device=device), group=mesh.get_group(name))
        assert total.item() == expected


@distributed(2, device=SIMULATED)
def test_messages_of_a_batch_meet_in_both_directions():
    rank, device = dist.get_rank(), _device()
    sent, received = torch.full((3,), float(rank), device=device), torch.empty(3, device=device)
    operations = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    works = dist.batch_isend_irecv(operations)
    assert len(works) == 1
    works[0].wait()
    assert received.tolist() == [1.0 - rank] * 3
    if rank == 0:  # one after the other, in the order of both ends
        dist.send(sent, 1)
        dist.recv(received, 1)
    else:
        dist.recv(received, 0)
        dist.send(sent, 0)
    assert received.tolist() == [1.0 - rank] * 3


def broadcast_against_all_reduce() -> None:
    tensor = torch.zeros(2, device=_device())
    dist.broadcast(tensor, src=0) if dist.get_rank() == 0 else dist.all_reduce(tensor)


def test_different_collectives_are_named():
    with pytest.raises(RanksFailed, match="rank 0 of a communicator calls broadcast of 8 bytes, and rank 1 calls anot"):
        run_ranks(broadcast_against_all_reduce, 2, device=SIMULATED)


def share_a_device(path: str) -> None:
    torch.cuda.set_device(0)
    dist.destroy_process_group()
    store = dist.FileStore(path, 2)
    rank = int(os.environ["RANK"])
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.zeros(2, device="cuda"))


def test_two_ranks_cannot_share_a_device(tmp_path):
    with pytest.raises(RanksFailed, match="Duplicate GPU detected"):
        run_ranks(share_a_device, 2, str(tmp_path / "store"), device=SIMULATED, fresh=True)


def wait_for_a_lost_rank() -> None:
    dist.all_reduce(tensor := torch.zeros(2, device=_device()))
    backend = dist.group.WORLD._get_backend(_device())
    backend._set_default_timeout(timedelta(seconds=2))
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(tensor)  # neither returns nor raises


def test_a_lost_rank_ends_the_process_at_the_timeout():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(wait_for_a_lost_rank, 2, device=SIMULATED, fresh=True, timeout=30)
    ends = {one.rank: one.summary for one in failed.value.failures}
    assert ends == {0: "killed by SIGABRT", 1: "left with exit code 3"}


@distributed(4, device=SIMULATED)
def test_groups_of_the_host_take_no_part_in_splits():
    # torch lets ranks outside of a gloo group take part in a split of which its members know nothing (issue 145376).
    device = _device()
    of_host = new_group([0, 3], "gloo")
    everyone, pair = new_groups([[0, 1, 2, 3]]), new_groups([[0, 3], [1, 2]])
    other = new_groups([[2, 1]])
    assert [one is not None for one in (of_host, other)] == [dist.get_rank() in (0, 3), dist.get_rank() in (1, 2)]
    for group, expected in ((everyone, 6.0), (pair, 3.0), (other, 3.0)):
        if group is not None:
            value = torch.full((2,), float(dist.get_rank()), device=device)
            dist.all_reduce(value, group=group)
            assert value.tolist() == [expected] * 2
    assert num_communicators() == 3 + (other is not None)
    assert dist.group.WORLD.bound_device_id == device


@distributed(1, device=SIMULATED)
def test_operators_that_cuda_alone_has():
    torch.manual_seed(0)
    device = _device()
    numbers = torch.randint(-2, 9, (64,))
    counts = torch.histc(numbers.int().to(device), bins=8, min=0, max=7)
    assert counts.dtype == torch.int32
    assert torch.equal(counts.cpu(), torch.histc(numbers.float(), bins=8, min=0, max=7).int())
    values = torch.randn(100)
    for arguments in ({"bins": 10}, {"bins": 7, "min": -1, "max": 2}):
        assert torch.equal(torch.histc(values.to(device), **arguments).cpu(), torch.histc(values, **arguments))
    x, gradients = torch.randn(5, 3, 4), []
    for cls in (torch.nn.LSTM, torch.nn.GRU):
        on_host = cls(4, 6, num_layers=2)
        on_device = copy.deepcopy(on_host).to(device)
        gradients.clear()
        for model, given in ((on_host, x), (on_device, x.to(device))):
            output = model(given)[0]
            output.square().sum().backward()
            gradients.append([output.detach().cpu(), *(one.grad.cpu() for one in model.parameters())])
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*gradients, strict=True))
