"""Several ranks on one simulated GPU, over the backend that tests/gpu/test_shared_gpu.py uses on a real one."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
from device_cases import PARALLEL, check_collectives
from harness import RanksFailed, distributed, run_ranks, shared_gpu

import booster
from booster.plugins import TorchDDPPlugin

DEVICE = "simulated_shared_gpu"
IN_THE_DEFAULT_RUN = ("ddp 2", "zero 2 2", "gemini 2", "fsdp 2", "tensor 2", "pipeline 2")


# A function: the default run takes one case of a function with parameters.
def test_every_plugin_equals_one_process():
    for name in IN_THE_DEFAULT_RUN:
        PARALLEL[name](DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PARALLEL if name not in IN_THE_DEFAULT_RUN])
def test_every_case_of_a_real_gpu(name):
    PARALLEL[name](DEVICE)


@distributed(2, device=DEVICE)
def test_collectives():
    assert dist.get_backend() == shared_gpu.BACKEND
    assert torch.cuda.current_device() == 0
    check_collectives(torch.device("cuda", 0))


@distributed(2, device=DEVICE)
def test_operations_follow_each_other_without_a_wait():
    rank = dist.get_rank()
    tensor = torch.full((3,), 1.0 + rank, device="cuda")
    dist.all_reduce(tensor, async_op=True)  # 3 on both
    tensor_of_first = tensor if rank == 0 else torch.empty(3, device="cuda")
    dist.broadcast(tensor_of_first, src=0, async_op=True)
    dist.all_reduce(tensor_of_first, async_op=True).wait()
    assert tensor_of_first.tolist() == [6.0] * 3
    # Messages in both directions, and one that hands on what arrives.
    passed, received = torch.full((2**20,), float(rank), device="cuda"), torch.empty(2**20, device="cuda")
    works = [dist.isend(passed, 1 - rank), dist.irecv(received, 1 - rank), dist.isend(received, 1 - rank)]
    works.append(dist.irecv(passed, 1 - rank))
    for work in works:
        work.wait()
    assert received.unique().tolist() == [1.0 - rank]
    assert passed.unique().tolist() == [float(rank)]


@distributed(2, device=DEVICE)
def test_what_nccl_refuses_is_refused():
    with pytest.raises(RuntimeError, match="must be CUDA and dense"):
        dist.all_reduce(torch.zeros(2))
    with pytest.raises(RuntimeError, match="contiguous"):
        dist.all_reduce(torch.zeros(4, 4, device="cuda")[:, :2])
    with pytest.raises(RuntimeError, match="takes the largest or smallest"):
        dist.all_reduce(torch.zeros(2, dtype=torch.int32, device="cuda"), dist.ReduceOp.BOR)
    with pytest.raises(ValueError, match="got 3 and 2 elements"):
        dist.all_gather_into_tensor(torch.zeros(3, device="cuda"), torch.zeros(2, device="cuda"))


def read_without_a_wait() -> None:
    tensor = torch.ones(2, device="cuda")
    work = dist.all_reduce(tensor, async_op=True)
    tensor + 1
    work.wait()


def test_a_missing_wait_is_reported():
    with pytest.raises(RanksFailed, match="race: "):
        run_ranks(read_without_a_wait, 2, device=DEVICE)


def train_after_a_launch(port: int) -> tuple[str, float]:
    rank = dist.get_rank()
    dist.destroy_process_group()
    booster.launch(
        rank=rank, world_size=2, host="127.0.0.1", port=port, backend=shared_gpu.BACKEND, local_rank=0, seed=1
    )
    model = torch.nn.Linear(3, 1)
    model, optimizer, *_ = booster.Booster(plugin=TorchDDPPlugin()).boost(model, torch.optim.SGD(model.parameters()))
    loss = model(torch.full((2, 3), float(rank), device="cuda")).sum()
    loss.backward()
    optimizer.step()
    (weight,) = {parameter.device for parameter in model.parameters()}
    total = sum(float(parameter.sum()) for parameter in model.parameters())
    booster.DistCoordinator().destroy()
    return str(weight), total


def test_a_launch_puts_all_ranks_on_one_gpu():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (device, total), other = run_ranks(train_after_a_launch, 2, port, device=DEVICE, fresh=True)
    assert device == "cuda:0"
    assert other == (device, total)
