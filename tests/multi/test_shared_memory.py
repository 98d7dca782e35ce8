"""Collectives through shared memory give gloo's bits, in one order on all ranks, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import distributed, run_ranks

from booster.comm import (
    Fault,
    InjectedFault,
    all_gather_equal,
    all_reduce_max,
    all_reduce_numbers,
    all_reduce_sum,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_coalesced,
    count_communication,
    inject_faults,
    shared_memory,
    start_all_gather,
    start_reduce_scatter,
    transport,
    use_shared_memory,
)
from booster.errors import ConfigError, RankFailedError
from booster.fault_tolerance import collective_errors
from booster.kernels import shared_memory as kernel

MEMORY, GLOO = "shared memory", "gloo"
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
REDUCED = [*FLOATS, torch.uint8, torch.int32, torch.int64]
MOVED = [*REDUCED, torch.bool, torch.complex64, torch.float8_e4m3fn]


def slow(*values):
    """Returns a case that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def _kernel():
    assert kernel.is_available()


def _values(dtype, numel, draw, rank=None):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * draw + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 60, (numel,), generator=generator).to(dtype)


def _same(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _lengths(dtype, world_size):
    slot = kernel._slot_bytes(world_size) // dtype.itemsize
    return 0, 1, 17, slot // world_size + 3, 2 * slot + 1, 5 * slot - 5


def _by(way, call):
    use_shared_memory(way == MEMORY)
    try:
        assert transport() == way
        return call()
    finally:
        use_shared_memory(None)


# Results


@distributed([slow(2), 3, slow(4)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_reduce_scatter_has_the_bits_of_gloo_s(world_size, dtype, accumulate):
    outputs = {dtype, torch.float32} if dtype.itemsize == 2 else {dtype}
    for numel in _lengths(dtype, world_size):
        for output_dtype in outputs:
            payload = _values(dtype, world_size * numel, draw=1)
            before = payload.clone()

            def reduce(payload=payload, output_dtype=output_dtype, numel=numel):
                output = _values(output_dtype, numel, draw=2)
                start_reduce_scatter(payload).wait(output, accumulate=accumulate)
                return output

            assert _same(_by(MEMORY, reduce), _by(GLOO, reduce)), numel
            assert _same(payload, before)


@distributed([2, slow(3), 4])
@pytest.mark.parametrize("dtype", MOVED)
def test_an_all_gather_brings_every_part(world_size, dtype):
    for numel in _lengths(dtype, world_size):
        shards = [_values(dtype, numel, draw=3, rank=rank) for rank in range(world_size)]
        buffer = torch.zeros(world_size * numel, dtype=dtype)
        buffer[dist.get_rank() * numel : (dist.get_rank() + 1) * numel] = shards[dist.get_rank()]
        start_all_gather(buffer).wait()
        assert _same(buffer, torch.cat(shards))
        assert _same(all_gather_equal(shards[dist.get_rank()]), torch.cat(shards))


def _sum_from_rank_0(dtype, numel, world_size):
    wide = torch.float32 if dtype.itemsize == 2 and dtype.is_floating_point else dtype
    total = _values(dtype, numel, draw=4, rank=0).to(wide)
    for rank in range(1, world_size):
        total += _values(dtype, numel, draw=4, rank=rank).to(wide)
    return total.to(dtype)


@distributed([slow(2), 3, slow(4)])
@pytest.mark.parametrize("dtype", REDUCED)
def test_an_all_reduce_goes_from_rank_0_on(world_size, dtype):
    for numel in (*_lengths(dtype, world_size), *(32_768 * factor // dtype.itemsize + 1 for factor in (4, 8, 17))):
        mine = _values(dtype, numel, draw=4)
        assert _same(all_reduce_sum(mine.clone()), _sum_from_rank_0(dtype, numel, world_size)), numel
        everyones = [_values(dtype, numel, draw=4, rank=rank) for rank in range(world_size)]
        largest = torch.stack(everyones).amax(0) if numel else mine
        assert _same(all_reduce_max(mine.clone()), largest), numel


@distributed(3)
def test_inf_and_nan_reach_every_rank(world_size):
    rank = dist.get_rank()
    for dtype in FLOATS:
        tensor = torch.zeros(300, dtype=dtype)
        tensor[rank] = [float("nan"), float("inf"), -float("inf")][rank]
        summed, largest = all_reduce_sum(tensor.clone()), all_reduce_max(tensor.clone())
        assert summed[:4].tolist()[1:] == [float("inf"), -float("inf"), 0.0]
        assert summed[0].isnan()
        assert largest[:4].tolist()[1:] == [float("inf"), 0.0, 0.0]
        assert largest[0].isnan()


@distributed([slow(2), 3, slow(4)])
@pytest.mark.parametrize("way", [MEMORY, GLOO])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_to_all(world_size, way, dtype):
    rank = dist.get_rank()
    for numel in _lengths(dtype, world_size):
        payload = _values(dtype, world_size * numel, draw=5)
        output = torch.zeros_like(payload)
        _by(way, lambda payload=payload, output=output: all_to_all_single(output, payload))
        expected = [
            _values(dtype, world_size * numel, 5, other)[rank * numel : (rank + 1) * numel]
            for other in range(world_size)
        ]
        assert _same(output, torch.cat(expected))


@distributed([1, 2])
def test_parts_of_an_all_to_all_are_rows(world_size):
    payload = torch.arange(12.0).view(4, 3) + 100 * dist.get_rank()
    output = torch.empty_like(payload)
    with count_communication() as count:
        all_to_all_single(output, payload)
    rank = dist.get_rank()
    rows = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    assert torch.equal(output, torch.cat([payload[rows] - 100 * rank + 100 * other for other in range(world_size)]))
    assert count.sent["all_to_all"] == count.received["all_to_all"] == (24 if world_size == 2 else 0)


@distributed([2])
def test_what_is_not_equal_parts_is_refused():
    for output, payload in [
        (torch.empty(3), torch.empty(3)),
        (torch.empty(4), torch.empty(2)),
        (torch.empty(4), torch.empty(4, dtype=torch.int32)),
        (torch.empty(4), torch.empty(8)[::2]),
    ]:
        with pytest.raises(AssertionError, match="is not 2 equal shards"):
            all_to_all_single(output, payload)


@distributed([slow(2), slow(3), 4])
@pytest.mark.parametrize("dtype", MOVED)
def test_broadcast(world_size, dtype):
    for source, numel in enumerate(_lengths(dtype, world_size)[: world_size + 1]):
        tensors = [_values(dtype, numel, draw=6), _values(dtype, 2, draw=7)]
        broadcast(tensors, source=source % world_size)
        assert _same(tensors[0], _values(dtype, numel, 6, source % world_size))
        assert _same(tensors[1], _values(dtype, 2, 7, source % world_size))
    long = _values(dtype, _lengths(dtype, world_size)[-1], draw=8)
    broadcast([long], source=1)
    assert _same(long, _values(dtype, len(long), 8, 1))


@distributed([2])
def test_broadcasts_of_expanded_tensors(world_size):
    rank = float(dist.get_rank())
    expanded = [torch.full((1,), rank).expand(8), torch.full((1, 1), rank).expand(2, 8), torch.full((), rank).expand(3)]
    rows = torch.stack([torch.arange(4.0) + 10 * rank] * 1).expand(5, 4)
    broadcast([*expanded, rows], source=1)
    assert all(one.eq(1).all() and 0 in one.stride() for one in expanded)
    assert torch.equal(rows, (torch.arange(4.0) + 10).expand(5, 4))
    broadcast_coalesced([torch.full((1,), rank).expand(8)], None)


@distributed([2])
def test_misaligned_tensors(world_size):
    """Views that begin in the middle of a vector or a cache line."""
    memory = torch.zeros(70_000)
    for start in (1, 3, 7, 15):
        whole = memory[start : start + 65_536]
        whole.copy_(_values(torch.float32, len(whole), draw=9))
        output = torch.empty(40_000)[start : start + len(whole) // 2]
        start_reduce_scatter(whole).wait(output, accumulate=False)
        shards = [_values(torch.float32, len(whole), 9, rank).chunk(2)[dist.get_rank()] for rank in range(2)]
        assert torch.equal(output, shards[0] + shards[1])
        start_all_gather(whole).wait()
        assert torch.equal(
            whole, torch.cat([_values(torch.float32, len(whole), 9, rank).chunk(2)[rank] for rank in (0, 1)])
        )


@distributed([2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 3])
def test_results_that_go_past_the_caches(world_size, dtype, start):
    """As they do from 8 MiB on; aligned and not, and with an end that fills no vector."""
    rank, numel = dist.get_rank(), 8 * 2**20 // dtype.itemsize + 5
    shards = [_values(dtype, 2 * numel, 12, other).chunk(2) for other in range(2)]
    payload, memory = torch.cat(shards[rank]), torch.zeros(2 * numel + start, dtype=dtype)
    output = memory[start : start + numel]
    start_reduce_scatter(payload).wait(output, accumulate=False)
    assert torch.equal(output, (shards[0][rank].float() + shards[1][rank].float()).to(dtype))
    wide = torch.zeros(numel + start)[start:]
    start_reduce_scatter(payload).wait(wide, accumulate=False)
    assert torch.equal(wide, shards[rank][rank].float() + shards[1 - rank][rank].float())
    whole = memory[start:]
    all_to_all_single(whole, payload)
    assert torch.equal(whole, torch.cat([shards[0][rank], shards[1][rank]]))
    start_all_gather(whole).wait()
    assert torch.equal(whole, torch.cat([shards[0][0], shards[1][1]]))
    broadcast([whole.copy_(payload)], source=1)
    assert torch.equal(whole, torch.cat(shards[1]))


# More ranks than processors


def _train_a_little(steps):
    assert transport() == MEMORY
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        payload = torch.full((size * 5000,), float(rank + step))
        output = torch.empty(5000)
        start_reduce_scatter(payload).wait(output, accumulate=False)
        assert output.unique().tolist() == [float(sum(range(size)) + size * step)]
        buffer = torch.zeros(size * 3)
        buffer[3 * rank : 3 * rank + 3] = rank
        start_all_gather(buffer).wait()
        assert buffer[::3].tolist() == list(range(size))
        assert all_reduce_numbers([1.0, rank]) == [size, sum(range(size))]
    return True


def test_more_ranks_than_processors():
    assert run_ranks(_train_a_little, 8, 5) == [True] * 8


@pytest.mark.slow
def test_many_ranks():
    assert run_ranks(_train_a_little, 24, 2, timeout=120) == [True] * 24


# Order


def _sums(started, numels):
    outputs = [torch.empty(numel) for numel in numels]
    for index in range(len(started))[:: -1 if dist.get_rank() % 2 else 1]:  # each rank in its own order
        started[index].wait(outputs[index], accumulate=False)
    return outputs


@distributed([2, 3])
def test_ranks_may_wait_in_different_orders(world_size):
    numels = [300, 1, 70_000, 0]
    started = [start_reduce_scatter(torch.full((world_size * numel,), float(k))) for k, numel in enumerate(numels)]
    for k, output in enumerate(_sums(started, numels)):
        assert torch.equal(output, torch.full((numels[k],), float(k * world_size)))


@distributed([2, slow(3)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_sum_that_is_performed_before_it_is_asked_for_has_the_same_bits(world_size, dtype, accumulate):
    payload = _values(dtype, world_size * 1000, draw=10)
    for output_dtype in {dtype, torch.float32 if dtype.itemsize == 2 else dtype}:
        direct, late = (_values(output_dtype, 1000, draw=11) for _ in range(2))
        start_reduce_scatter(payload).wait(direct, accumulate=accumulate)
        started = start_reduce_scatter(payload)
        barrier()  # performs it
        changed = payload.clone()
        payload.zero_()  # not needed any more
        started.wait(late, accumulate=accumulate)
        payload.copy_(changed)
        assert _same(direct, late)


@distributed([2, 4])
def test_blocking_operations_keep_their_place_among_those_under_way(world_size):
    rank = dist.get_rank()
    buffer = torch.zeros(world_size)
    buffer[rank] = rank + 1.0
    gathering = start_all_gather(buffer)
    reducing = start_reduce_scatter(torch.ones(world_size * 2))
    if rank == 0:
        gathering.wait()
        assert buffer[1] == 2.0
    assert all_reduce_numbers([1.0]) == [world_size]
    output = torch.empty(2)
    reducing.wait(output, accumulate=False)
    gathering.wait()
    assert buffer.tolist() == [float(other + 1) for other in range(world_size)]
    assert output.tolist() == [world_size] * 2


@distributed([2])
def test_what_was_started_in_one_group_is_not_waited_for_behind_another():
    """Rank 0 waits for the first group's operation, rank 1 continues with the second group's."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    buffer = torch.full((2,), float(dist.get_rank()))
    gathering = start_all_gather(buffer, first)
    if dist.get_rank() == 0:
        gathering.wait()
    assert all_reduce_numbers([1.0], second) == [2.0]
    gathering.wait()
    assert buffer.tolist() == [0.0, 1.0]


@distributed([2])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int16])
def test_what_can_t_be_reduced_goes_by_messages_in_between(dtype):
    buffer = torch.full((2,), float(dist.get_rank()))
    gathering = start_all_gather(buffer)
    output = torch.empty(3, dtype=dtype)
    started = start_reduce_scatter(torch.ones(6, dtype=dtype))
    if dist.get_rank() == 0:
        gathering.wait()
    started.wait(output, accumulate=False)
    gathering.wait()
    assert output.tolist() == [2] * 3
    assert buffer.tolist() == [0.0, 1.0]


@distributed([2])
def test_threads_with_a_group_each(world_size):
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    wrong = []

    def work(group, base):
        for index in range(60):
            total = all_reduce_sum(torch.full((5000,), float(base + index)), group)
            if total[0] != 2.0 * (base + index):
                wrong.append((base, index))

    threads = [threading.Thread(target=work, args=(group, 1000 * k)) for k, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# The choice


@distributed([2])
@pytest.mark.parametrize(
    ("values", "expected"), [(("off", "off"), GLOO), (("off", ""), GLOO), (("on", "auto"), MEMORY)]
)
def test_the_environment_switches_it_for_all(values, expected):
    os.environ["BOOSTER_SHARED_MEMORY"] = values[dist.get_rank()]
    group = dist.new_group([0, 1])
    assert all_reduce_numbers([1.0], group) == [2.0]
    assert transport(group) == expected


@distributed([2])
def test_an_unknown_setting_is_an_error():
    os.environ["BOOSTER_SHARED_MEMORY"] = "sometimes"
    with pytest.raises(ConfigError, match="BOOSTER_SHARED_MEMORY='sometimes' is unknown: set it to on or off"):
        barrier(dist.new_group([0, 1]))


@distributed([2])
def test_one_rank_that_does_not_want_it_decides_for_all():
    group = dist.new_group([0, 1])
    use_shared_memory(dist.get_rank() == 0)
    assert all_reduce_numbers([1.0], group) == [2.0]
    assert transport(group) == GLOO
    use_shared_memory(None)
    assert all_reduce_numbers([1.0], group) == [2.0]
    assert transport(group) == MEMORY


@distributed([2])
def test_ranks_of_different_hosts_use_gloo():
    group = dist.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "host_id", lambda: f"host {dist.get_rank()}")
        assert transport(group) == GLOO
    assert all_reduce_numbers([1.0], group) == [2.0]


def _fail(*arguments, **settings):
    raise RuntimeError("no memory left, says the test")


@distributed([3])
@pytest.mark.parametrize("failing", [0, 2])
def test_memory_that_can_t_be_had_on_one_rank_means_gloo_for_all(failing):
    group, said = dist.new_group([0, 1, 2]), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_warn", said.append)
        if dist.get_rank() == failing:
            patch.setattr(kernel.SharedMemory, "attach" if failing else "create", _fail)
        assert transport(group) == GLOO
    assert said == (["no memory left, says the test"] if dist.get_rank() == failing else [])
    assert all_reduce_numbers([1.0], group) == [3.0]


@distributed([2])
def test_without_the_kernel_gloo_does_the_same():
    group = dist.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "is_available", lambda: False)
        assert all_reduce_numbers([1.0], group) == [2.0]
    assert transport(group) == GLOO


@distributed([2])
def test_the_group_s_timeout_is_found():
    for seconds in (7, 1800):
        assert shared_memory._timeout_seconds(dist.new_group([0, 1], timeout=timedelta(seconds=seconds))) == seconds


# What stays


def _maps():
    return Path("/proc/self/maps").read_text().count("booster-collectives")


def _files():
    return [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]


@distributed([2])
def test_nothing_is_left_behind():
    had = _maps()
    group = dist.new_group([0, 1])
    barrier(group)
    assert not any("booster" in name for name in os.listdir("/dev/shm"))
    assert _maps() > had
    assert not any("booster-collectives" in path for path in _files())
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert _maps() == had


def _make_anew(folder):
    rank = dist.get_rank()
    for attempt in range(2):
        barrier()
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/{attempt}", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        assert transport() == MEMORY
        assert all_reduce_numbers([rank + 1.0]) == [3.0]
    return True


def test_a_process_group_that_is_made_anew(tmp_path):
    assert run_ranks(_make_anew, 2, str(tmp_path)) == [True, True]


def _child_of_a_fork():
    """Returns what a forked child saw: it can't take part, and its end does not end its parent's part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, about forks beside threads
        child = os.fork()
    if child == 0:
        try:
            all_reduce_numbers([1.0])
        except RuntimeError as error:
            os._exit(7 if "a forked process can't take part" in str(error) else 8)
        os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@distributed([2])
def test_a_forked_child_is_no_rank():
    barrier()
    assert _child_of_a_fork() == 7
    assert all_reduce_numbers([1.0]) == [2.0]


# Failures that are this transport's own; the others are in test_collective_errors.py


def _call_with_another_length():
    collective_errors.REPORT_SECONDS = 2.0
    group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    barrier(group)
    with pytest.raises(RankFailedError) as caught:
        all_reduce_sum(torch.ones(3 + dist.get_rank()), group)
    dist.barrier()  # of the world: where a rank stands is read by the other until here
    with pytest.raises(RankFailedError) as again:
        start_all_gather(torch.ones(4), group).wait()
    return str(caught.value), str(again.value)


def test_other_lengths_are_found_at_once_and_the_memory_stays_closed():
    """Through gloo, the tail would keep old numbers or the process would end."""
    for text, again in run_ranks(_call_with_another_length, 2, fresh=True):
        assert (
            "no rank is missing; rank 0 is at all_reduce number 2, rank 1 is at all_reduce number 2: all must make the"
            " same calls in the same order"
        ) in text
        assert (
            "shared memory reports: aborted, as the ranks are in different calls: all_reduce number 2 of 3 float32 on"
            " rank 0 of the group, all_reduce number 2 of 4 float32 on rank 1 of the group"
        ) in text
        assert "could not finish all_gather number 1" in again


def _lose_an_operation_of_another_group():
    collective_errors.REPORT_SECONDS = 0.5
    dist.set_debug_level(dist.DebugLevel.OFF)
    ranks = list(range(dist.get_world_size()))
    broken, sound = (dist.new_group(ranks, timeout=timedelta(seconds=seconds)) for seconds in (1, 20))
    barrier(broken)
    barrier(sound)
    if dist.get_rank() == 0:
        start_all_gather(torch.ones(2), broken)
        with pytest.raises(RankFailedError, match="could not finish all_gather number 1"):
            barrier(sound)
    else:
        with inject_faults(Fault.throw(rank=1, at="all_gather")), pytest.raises(InjectedFault):
            start_all_gather(torch.ones(2), broken)
    return all_gather_equal(torch.ones(1), sound).tolist()


def test_what_fails_in_one_group_fails_once():
    """The operation that was only started is reported by the next wait, and does not spoil the other group for ever."""
    assert run_ranks(_lose_an_operation_of_another_group, 2, fresh=True) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool])
@distributed([2])
def test_a_broadcast_by_messages_is_of_any_dtype(dtype):
    use_shared_memory(False)
    try:
        whole = torch.arange(100_000).remainder(2).to(dtype)
        tensor = whole.clone() if dist.get_rank() == 0 else torch.zeros_like(whole)
        broadcast([tensor])
        assert torch.equal(tensor.view(torch.uint8), whole.view(torch.uint8))
    finally:
        use_shared_memory(None)
