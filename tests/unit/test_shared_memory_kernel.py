"""The front of the shared-memory kernel: what it refuses, and what every instruction set computes."""

from __future__ import annotations

import os
import random
import threading
from functools import partial

import pytest
import torch

from booster.kernels import shared_memory
from booster.kernels.loader import load_kernel
from booster.kernels.shared_memory import SharedMemory, SharedMemoryError, SharedMemoryHandle, can_reduce, is_available

if not is_available():
    pytest.skip("the kernel can't be built here", allow_module_level=True)

INSTRUCTION_SETS = load_kernel("shm_collectives").instruction_sets()


def _pair(timeout_seconds=20.0, **settings):
    first, ticket = SharedMemory.create(2, timeout_seconds, **settings)
    second = SharedMemory.attach(ticket, 2, 1, timeout_seconds, **settings)
    first.enable()
    second.enable()
    return first, second


def _both(memories, call):
    """Calls `call(memory, rank)` for two ranks that are threads of one process, and returns or raises what they do."""
    outcomes = [None, None]

    def work(rank):
        try:
            outcomes[rank] = call(memories[rank], rank)
        except Exception as error:
            outcomes[rank] = error

    other = threading.Thread(target=work, args=(1,))
    other.start()
    work(0)
    other.join()
    return outcomes


def _reduce(memories, tensors, operator):
    assert _both(memories, lambda memory, rank: memory.all_reduce(tensors[rank], operator, 1)) == [None, None]


def _special_values(dtype):
    numbers = [0.0, -0.0, 1.0, -1.5, 65504.0, 3.0e38, 1e-40, 6e-8, float("inf"), float("nan")]
    drawn = torch.randn(1000, generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor(numbers + numbers[::-1] + drawn).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_instruction_set_gives_the_bits_of_torch(instruction_set, dtype):
    memories = _pair(instruction_set=instruction_set)
    terms = [_special_values(dtype), _special_values(dtype).flip(0)]
    wide = [term.to(torch.float32) if dtype.itemsize == 2 else term for term in terms]
    for length in (*range(40), len(terms[0])):
        summed, largest = ([term[:length].clone() for term in terms] for _ in range(2))
        _reduce(memories, summed, "sum")
        _reduce(memories, largest, "max")
        for rank in range(2):
            expected = (wide[0][:length] + wide[1][:length]).to(dtype)
            assert torch.equal(summed[rank].nan_to_num(7.0), expected.nan_to_num(7.0))
            assert torch.equal(summed[rank].isnan(), expected.isnan())
            expected = torch.maximum(terms[0][:length], terms[1][:length])
            assert torch.equal(largest[rank].nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_sums_of_half_formats_may_stay_wide(instruction_set, dtype):
    memories = _pair(instruction_set=instruction_set)
    payloads = [torch.randn(2 * 77, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(2)]
    outputs = [torch.full((77,), 0.5) for _ in range(2)]
    call = lambda memory, rank: memory.reduce_scatter(payloads[rank], outputs[rank], 1, accumulate=True)  # noqa: E731
    assert _both(memories, call) == [None, None]
    for rank in range(2):
        mine, theirs = (payloads[other][77 * rank : 77 * rank + 77].float() for other in (rank, 1 - rank))
        assert torch.equal(outputs[rank], mine + theirs + 0.5)


def test_integers_that_overflow_wrap_around():
    memories = _pair()
    for dtype in (torch.uint8, torch.int32, torch.int64):
        tensors = [torch.full((100,), torch.iinfo(dtype).max, dtype=dtype) for _ in range(2)]
        _reduce(memories, tensors, "sum")
        expected = torch.full((100,), torch.iinfo(dtype).max, dtype=dtype)
        assert torch.equal(tensors[0], expected + expected)


def _run_operation(memory, rank, name, numel, number, *, is_published, before_the_end=None):
    """Runs one of all operations on tensors of a rank, and returns its result."""
    values = torch.randn(2 * numel, generator=torch.Generator().manual_seed(10 * number + rank))
    output = torch.zeros(numel if name == "reduce_scatter" else 2 * numel)
    arguments = {
        "all_reduce": (values, "sum", number),
        "reduce_scatter": (values, output, number),
        "all_gather": (output, values[:numel], number),
        "all_to_all": (output, values, number),
    }[name]
    if is_published:
        getattr(memory, name)(*arguments, only_publishes=True)
        if before_the_end is not None:
            before_the_end()
    getattr(memory, name)(*arguments)
    return values if name == "all_reduce" else output


@pytest.mark.parametrize("seed", range(4))
def test_operations_may_be_published_first(seed):
    memories, expected = _pair(), _pair()
    draw = random.Random(seed)
    for number in range(1, 25):
        name = draw.choice(["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
        numel = draw.choice([0, 1, 1000, 2**16, 2**17 + 5, 2**19])  # a slot has 2**16
        choices = [draw.random() < 0.6 for _ in range(2)]
        call = partial(_run_operation, name=name, numel=numel, number=number)
        results = _both(memories, lambda memory, rank, call=call, of=choices: call(memory, rank, is_published=of[rank]))
        plain = _both(expected, partial(call, is_published=False))
        assert all(torch.equal(one, other) for one, other in zip(results, plain, strict=True)), (name, numel)


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_a_rank_that_has_published_lets_no_other_wait(name):
    memories, has_ended = _pair(), threading.Event()

    def await_the_other():
        assert has_ended.wait(20)

    def call(memory, rank):
        run = partial(_run_operation, memory, rank, name, 2**14, 1)
        if rank == 0:
            return run(is_published=True, before_the_end=await_the_other)
        result = run(is_published=False)
        has_ended.set()
        return result

    assert all(isinstance(result, torch.Tensor) for result in _both(memories, call))


def test_what_the_front_refuses():
    memory, _ = SharedMemory.create(2, 1.0)
    flat = torch.zeros(8)
    for call in (
        lambda: memory.all_reduce(flat[::2], "sum", 1),
        lambda: memory.all_reduce(torch.zeros(8, device="meta"), "sum", 1),
        lambda: memory.reduce_scatter(flat, torch.zeros(3), 1),
        lambda: memory.reduce_scatter(flat, torch.zeros(4, dtype=torch.float64), 1),
        lambda: memory.reduce_scatter(flat, torch.zeros(4, dtype=torch.bfloat16), 1),
        lambda: memory.all_gather(flat, torch.zeros(3), 1),
        lambda: memory.all_to_all(torch.zeros(6), flat, 1),
        lambda: memory.all_to_all(torch.zeros(3), torch.zeros(3), 1),
        lambda: memory.broadcast(flat, 2, 1),
    ):
        with pytest.raises(AssertionError):
            call()
    assert not can_reduce(torch.complex64)
    assert not can_reduce(torch.bool)


@pytest.mark.parametrize("num_ranks", [0, 1, 65])
def test_too_few_and_too_many_ranks(num_ranks):
    with pytest.raises(ValueError, match=f"shared memory for {num_ranks} ranks"):
        load_kernel("shm_collectives").create(num_ranks, 4096, 1, 1.0, "")


def test_slots_of_many_ranks_stay_small():
    for num_ranks in (2, 3, 8, 24, 64):
        slot = shared_memory._slot_bytes(num_ranks)
        assert slot % 4096 == 0
        assert 64 * num_ranks <= slot
        assert 2 * num_ranks * slot <= 16 * 2**20


def test_only_the_memory_that_was_meant_is_attached():
    _, ticket = SharedMemory.create(2, 1.0)
    with pytest.raises(RuntimeError, match="is not the memory that was meant"):
        SharedMemory.attach(
            SharedMemoryHandle(os.getpid(), ticket.file_number, ticket.key + 1, ticket.slot_bytes), 2, 1, 1.0
        )
    with pytest.raises(RuntimeError, match="is not the memory that was meant"):
        SharedMemory.attach(ticket, 3, 1, 1.0)
    with open(__file__) as other, pytest.raises(RuntimeError, match=r"is not the memory|opening"):
        SharedMemory.attach(SharedMemoryHandle(os.getpid(), other.fileno(), ticket.key, ticket.slot_bytes), 2, 1, 1.0)
    with pytest.raises(RuntimeError, match=r"opening /proc/.*: No such file"):
        SharedMemory.attach(SharedMemoryHandle(os.getpid(), 10**6, ticket.key, ticket.slot_bytes), 2, 1, 1.0)


def test_a_rank_that_does_not_come():
    memory, _ = _pair(timeout_seconds=0.3)
    tensor = torch.zeros(3)
    for text in ("rank 0 of the group timed out after 0.3 s",) * 2:
        with pytest.raises(SharedMemoryError, match=text) as caught:
            memory.all_reduce(tensor, "sum", 1)
    assert caught.value.ended_rank is None


def test_a_rank_that_gives_up_wakes_the_others():
    first, second = _pair()
    threading.Timer(0.05, second.abort).start()
    with pytest.raises(SharedMemoryError, match="aborted by rank 1 of the group") as caught:
        first.broadcast(torch.zeros(3), 1, 1)
    assert not caught.value.is_own_abort
    with pytest.raises(SharedMemoryError, match=r"aborted by this rank$") as caught:
        second.broadcast(torch.zeros(3), 1, 1)
    assert caught.value.is_own_abort


def test_ranks_in_different_calls_learn_what_each_does():
    tensors = [torch.zeros(4), torch.zeros(4)]

    def call(memory, rank):
        if rank == 0:
            return memory.broadcast(tensors[0], 1, 5)
        return memory.all_reduce(tensors[1], "max", 6)

    for outcome in _both(_pair(), call):
        assert isinstance(outcome, SharedMemoryError)
        assert str(outcome) == (
            "aborted, as the ranks are in different calls: broadcast number 5 of 16 bytes from rank 1 on rank 0 of the"
            " group, all_reduce number 6 of 4 float32 (max) on rank 1 of the group"
        )


def test_an_exception_of_a_signal_handler_ends_the_wait():
    import signal

    class Stop(Exception):
        pass

    def stop(*arguments):
        raise Stop

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        first, second = _pair()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Stop):
            first.broadcast(torch.zeros(3), 1, 1)
        with pytest.raises(SharedMemoryError, match="aborted, as rank 0 of the group was interrupted"):
            second.broadcast(torch.zeros(3), 1, 1)
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_signals_that_raise_nothing_do_not_end_the_wait():
    import signal

    previous = signal.signal(signal.SIGALRM, lambda *arguments: None)
    try:
        memories = _pair()
        tensor = torch.ones(3)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        late = threading.Timer(0.1, lambda: memories[1].all_reduce(torch.ones(3), "sum", 1))
        late.start()
        memories[0].all_reduce(tensor, "sum", 1)
        late.join()
        assert tensor.tolist() == [2.0] * 3
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_counters_that_wrap_around_are_told_apart():
    """Thousands of steps with every kind of operation; the counters go round by fours."""
    memories = _pair()

    def call(memory, rank):
        for number in range(2000):
            tensor = torch.full((5,), float(rank + number))
            memory.all_reduce(tensor, "sum", number)
            if tensor.tolist() != [2.0 * number + 1.0] * 5:
                return number
        return "all right"

    assert _both(memories, call) == ["all right"] * 2
