"""Reduce-scatter and all-gather of flat buffers give what a sum in one process gives, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed

from booster.comm import all_reduce_max, bucket_collectives, start_all_gather, start_reduce_scatter
from booster.device import current_device

pytestmark = pytest.mark.on_device

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTO_FP32 = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
BLOCK = bucket_collectives._BLOCK_NUMEL


def _payload(rank, numel, dtype, draw=0):
    generator = torch.Generator().manual_seed(1000 * draw + rank)
    return torch.randn(numel, generator=generator).to(current_device(), dtype)


def _sum_of_part(rank, size, numel, dtype, draw=0):
    """Returns the shard summed in fp32: the own one first, then those of rank + 1, rank + 2, ..."""
    start, stop = rank * numel, (rank + 1) * numel
    total = torch.zeros(numel)
    for distance in range(size):
        other = (rank + distance) % size
        total += _payload(other, size * numel, dtype, draw)[start:stop].float()
    return total


def slow(*values):
    """Returns a case that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


# On other devices the backend sums, in its own order, and writes into the payload.
@distributed([slow(1), 2, 3, slow(4)], device="cpu")
@pytest.mark.parametrize(("dtype", "output_dtype"), [*zip(DTYPES, DTYPES, strict=True), *INTO_FP32])
@pytest.mark.parametrize("accumulate", [False, True])
def test_reduce_scatter_is_a_sum_in_fp32(world_size, dtype, output_dtype, accumulate):
    rank = dist.get_rank()
    for numel in (0, 1, 1000, BLOCK, 2 * BLOCK + 3):
        payload = _payload(rank, world_size * numel, dtype)
        output = _payload(rank, numel, output_dtype, draw=1)
        expected = _sum_of_part(rank, world_size, numel, dtype)
        if accumulate:
            expected += output.float()
        start_reduce_scatter(payload).wait(output, accumulate=accumulate)
        assert torch.equal(output, expected.to(output_dtype))
        assert torch.equal(payload, _payload(rank, world_size * numel, dtype))


@distributed([slow(1), slow(2), 3, slow(4)], device="cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_may_go_into_the_payload(world_size, dtype):
    rank, numel = dist.get_rank(), BLOCK + 5
    payload = _payload(rank, world_size * numel, dtype)
    own = payload[rank * numel : (rank + 1) * numel]
    received = torch.empty((world_size - 1) * numel, dtype=dtype)
    start_reduce_scatter(payload, received=received).wait(own, accumulate=False)
    expected = _payload(rank, world_size * numel, dtype)
    expected[rank * numel : (rank + 1) * numel] = _sum_of_part(rank, world_size, numel, dtype).to(dtype)
    assert torch.equal(payload, expected)


@distributed([1, 2, 3, 4])
def test_fp64_and_integers_keep_their_precision(world_size):
    rank, numel = dist.get_rank(), 50
    for dtype in (torch.float64, torch.int64):
        with current_device():
            payload = torch.arange(world_size * numel).to(dtype) + 2**40 + rank
            output = torch.ones(numel, dtype=dtype)
            own = torch.arange(rank * numel, (rank + 1) * numel)
        expected = world_size * (own + 2**40) + sum(range(world_size)) + 1
        start_reduce_scatter(payload).wait(output, accumulate=True)
        assert torch.equal(output, expected.to(dtype))


@distributed([slow(1), slow(2), slow(3), 4])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
def test_all_gather_brings_every_part(world_size, dtype):
    rank = dist.get_rank()
    for numel in (0, 1, 1000, 100_003):
        whole = _payload(9, world_size * numel, torch.float32).mul(100).to(dtype)
        buffer = torch.zeros_like(whole)
        own = slice(rank * numel, (rank + 1) * numel)
        buffer[own] = whole[own]
        start_all_gather(buffer).wait()
        assert torch.equal(buffer, whole)


@distributed([2, 3, 4], device="cpu")
def test_several_under_way_find_their_own_messages(world_size):
    """Shards of different lengths, finished in another order than started, beside all-gathers and an all-reduce."""
    rank = dist.get_rank()
    lengths = [70_000, 3, 20_000, 1]
    payloads = [_payload(rank, world_size * numel, torch.float32, draw) for draw, numel in enumerate(lengths)]
    buffers = [torch.full((world_size * numel,), float(rank)) for numel in lengths]
    sums, gatherings = [], []
    for payload, buffer in zip(payloads, buffers, strict=True):
        sums.append(start_reduce_scatter(payload))
        gatherings.append(start_all_gather(buffer))
    total = torch.ones(10)
    dist.all_reduce(total)
    assert torch.equal(total, torch.full((10,), float(world_size)))
    for draw, numel in reversed(list(enumerate(lengths))):
        output = torch.empty(numel)
        sums[draw].wait(output, accumulate=False)
        gatherings[draw].wait()
        assert torch.equal(output, _sum_of_part(rank, world_size, numel, torch.float32, draw))
        assert torch.equal(buffers[draw], torch.arange(float(world_size)).repeat_interleave(numel))


@distributed([2, 3], device="cpu")  # to NCCL, messages and collectives are of one order
def test_other_messages_of_the_group_do_not_mix_in(world_size):
    """A user's own message without a tag, posted before and of another length, waits for its own partner."""
    rank = dist.get_rank()
    receiver, sender = (rank + 1) % world_size, (rank - 1) % world_size
    received = torch.empty(7)
    theirs = dist.irecv(received, src=sender)
    output = torch.empty(5)
    start_reduce_scatter(torch.ones(5 * world_size)).wait(output, accumulate=False)
    dist.isend(torch.full((7,), float(rank)), dst=receiver).wait()
    theirs.wait()
    assert torch.equal(output, torch.full((5,), float(world_size)))
    assert torch.equal(received, torch.full((7,), float(sender)))


@distributed(4)
def test_subgroups_sum_among_themselves():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]  # the second out of order: its ranks are sorted by torch
    group = groups[rank % 2]
    place = dist.get_rank(group)
    output = torch.empty(3, device=current_device())
    start_reduce_scatter(torch.arange(6.0, device=current_device()) + 10 * rank, group).wait(output, accumulate=False)
    members = dist.get_process_group_ranks(group)
    assert output.tolist() == [2.0 * one + 6 * place + 10 * sum(members) for one in range(3)]
    buffer = torch.zeros(8, device=current_device())
    buffer[4 * place : 4 * place + 4] = rank
    start_all_gather(buffer, group).wait()
    assert buffer.tolist() == [float(members[0])] * 4 + [float(members[1])] * 4
    # Numbers are counted by group: the world's are still equal on all ranks.
    if rank % 2:
        start_all_gather(buffer, group).wait()
    world = torch.empty(1, device=current_device())
    start_reduce_scatter(torch.ones(4, device=current_device())).wait(world, accumulate=False)
    assert world.item() == 4


@distributed([2, 4])
def test_parameters_and_their_gradients_may_be_given(world_size):
    weights = torch.nn.Parameter(torch.ones(world_size * 4, device=current_device()))
    output = torch.nn.Parameter(torch.zeros(4, device=current_device()))
    start_reduce_scatter(weights).wait(output, accumulate=True)
    start_all_gather(weights).wait()
    assert output.tolist() == [float(world_size)] * 4


@distributed([2, 4])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_backend_s_own_calls_serve_where_messages_do_not(world_size, accumulate):
    """As on other devices than the CPU; here gloo stands in for the backend."""
    rank, numel = dist.get_rank(), 1000
    with pytest.MonkeyPatch.context() as patch, current_device():
        patch.setattr(bucket_collectives, "_use_p2p", lambda tensor: False)
        payload = torch.arange(float(world_size * numel)) + rank
        output = torch.ones(numel)
        start_reduce_scatter(payload).wait(output, accumulate=accumulate)
        buffer = torch.full((world_size * numel,), float(rank))
        start_all_gather(buffer).wait()
    total = world_size * torch.arange(rank * numel, (rank + 1) * numel) + sum(range(world_size))
    assert torch.equal(output.cpu(), total + float(accumulate))
    assert torch.equal(buffer.cpu(), torch.arange(float(world_size)).repeat_interleave(numel))


@distributed([1, 3])
def test_all_reduce_max(world_size):
    mask = torch.zeros(world_size + 1, dtype=torch.uint8, device=current_device())
    mask[dist.get_rank()] = 1
    assert all_reduce_max(mask) is mask
    assert mask.tolist() == [1] * world_size + [0]


@distributed([2])
@pytest.mark.parametrize(
    "payload", [torch.ones(3), torch.ones(2, 2), torch.ones(8)[::2]], ids=["uneven", "matrix", "strided"]
)
def test_what_is_no_flat_buffer_is_refused_before_it_is_sent(payload):
    with pytest.raises(AssertionError, match="is not 2 equal flat shards"):
        start_reduce_scatter(payload)
    with pytest.raises(AssertionError, match="is not 2 equal flat shards"):
        start_all_gather(payload)


@distributed([2])
def test_a_wrong_output_is_refused():
    started = start_reduce_scatter(torch.ones(8, dtype=torch.bfloat16, device=current_device()))
    with pytest.raises(AssertionError, match=r"a sum of 4 torch.bfloat16 can't go into 4 torch.float16"):
        started.wait(torch.empty(4, dtype=torch.float16, device=current_device()), accumulate=False)
    output = torch.empty(4, device=current_device())
    started.wait(output, accumulate=False)
    assert output.tolist() == [2.0] * 4


@distributed([3])
def test_a_wrong_scratch_is_refused_before_anything_is_sent(world_size):
    with current_device():
        payload, output, *scratch = torch.ones(12), torch.empty(4), torch.empty(9), torch.empty(8, dtype=torch.float64)
    for received in scratch:
        with pytest.raises(AssertionError, match=r"cannot hold 2 copies of 4 torch\.float32"):
            start_reduce_scatter(payload, received=received)
    start_reduce_scatter(payload, received=payload.new_empty(8)).wait(output, accumulate=False)
    assert output.tolist() == [3.0] * 4
