"""Measurement of a machine: operators and collectives, timed on all ranks at once."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from booster.comm import (
    all_to_all_single,
    barrier,
    broadcast,
    count_communication,
    group_rank,
    group_size,
    max_of_numbers,
    new_group_of_rows,
    receive_tensor,
    release_groups,
    send_tensor,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    transport,
)
from booster.device import current_device, device_type, num_cores, synchronize

from .machine_profile import CollectiveSpeed, Curve, MachineProfile, machine_name
from .operator_costs import CostRecorder

_MIN_SECONDS = 0.005  # of a repeat
_REPEATS = 5
_MAX_CALLS = 4096
_DTYPES = (torch.float32, torch.bfloat16)
# Sides of products, and bytes of tensors: up to what takes some 30 ms on a core.
_SIDES = {"cpu": (32, 128, 256, 512), "accelerator": (128, 512, 1024, 2048, 4096, 8192)}
_NUM_BYTES = {
    "cpu": (2**12, 2**16, 2**19, 2**22, 2**25),
    "accelerator": (2**16, 2**20, 2**24, 2**28),
}
_UNCACHED = 2**27  # more than the caches of a CPU, where nothing is allocated
_NUM_WAITS = 40
_NUM_BUFFERS = 8  # of a collective, so that its data are in no cache, as those of a model
_PAYLOADS = {"cpu": (2**6, 2**14, 2**17, 2**20, 2**23), "accelerator": (2**8, 2**16, 2**20, 2**24, 2**27)}
_KEPT_BYTES = 2**24
_ALLOCATION, _NUM_ALLOCATIONS = 31 * 2**20, 4  # before a measurement
_LEAST_SHARE = 0.1  # of a measured time that is left to the kernel when that of a call is subtracted


def measure_machine() -> MachineProfile:
    """Return the profile of the launched world, with as many ranks on each host; the slowest rank's times count.

    Collective: every rank must call it. It takes about ten seconds.
    """
    device = current_device()
    scale = "cpu" if device.type == "cpu" else "accelerator"
    ranks_per_host = _ranks_per_host()
    _warm_allocator(device)
    bare_call = _seconds_of(partial(torch.add, *_random(8, device, torch.float32)))
    operators = {
        kind: {
            _name(dtype): _curve(make, dtype, _SIDES[scale], device, bare_call)
            for dtype in _DTYPES
            if kind != "convolution" or dtype == torch.float32 or scale != "cpu"
        }
        for kind, make in _PRODUCTS.items()
    }
    for kind, make in _MEMORY_BOUND.items():
        sizes = _NUM_BYTES[scale] + ((_UNCACHED,) if scale == "cpu" and kind == "inplace" else ())
        operators[kind] = {_name(dtype): _curve(make, dtype, sizes, device, bare_call) for dtype in _DTYPES}
    profile = MachineProfile(
        machine=machine_name(),
        num_ranks=group_size(),
        ranks_per_host=ranks_per_host,
        operators=operators,
        call_seconds=bare_call,
        step_call_seconds=bare_call,
        is_asynchronous=device.type != "cpu",
        ranks_per_core=_ranks_per_core() if device.type == "cpu" else 1.0,
        host_bytes_per_second=0.0 if device.type == "cpu" else _host_speed(device),
    )
    model_call, step_call = _call_seconds(profile, device)
    profile = replace(profile, call_seconds=model_call, step_call_seconds=step_call)
    if group_size() == 1:
        return profile
    collectives = tuple(_measure_collectives(ranks_per_host, device, _PAYLOADS[scale]))
    return replace(profile, wait_seconds=_wait_seconds(device), collectives=collectives)


def _warm_allocator(device: torch.device) -> None:
    """Bring the allocator to the state that it has after some steps of training, in which it maps no further memory.

    The C library's allocator maps large blocks, and raises the size that is large, to 32 MiB, as they are freed.
    """
    for _ in range(2):
        kept = [torch.zeros(_ALLOCATION, dtype=torch.uint8, device=device) for _ in range(_NUM_ALLOCATIONS)]
        del kept


def _host_speed(device: torch.device) -> float:
    """Return the bytes per second of a copy from pinned host memory."""
    on_host = torch.empty(_ALLOCATION, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty_like(on_host, device=device)
    return on_host.nbytes / _seconds_of(partial(on_device.copy_, on_host, non_blocking=True))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _random(numel: int, device: torch.device, dtype: torch.dtype, count: int = 2) -> list[torch.Tensor]:
    return [torch.rand(numel, device=device).to(dtype) for _ in range(count)]


def _seconds_of(run: Callable[[], Any], *, computes: bool = True) -> float:
    """Return the time of a call, of the slowest rank; all ranks make as many calls at the same time.

    Args:
        run: The call.
        computes: If True, the call waits for no other rank. On a CPU its time is then that of this thread, of which
            other programs take nothing, in the median, as often as ranks take turns on a core. Otherwise it is that of
            the fastest repeat.
    """
    is_on_cpu = computes and device_type() == "cpu"
    clock, turns = (time.thread_time, _ranks_per_core()) if is_on_cpu else (time.perf_counter, 1.0)
    run()
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    once = max(1e-7, time.perf_counter() - start)
    wanted = min(_MAX_CALLS, max(1, int(_MIN_SECONDS / once)))
    num_calls = max_of_numbers([wanted])[0]
    times = []
    for _ in range(_REPEATS):
        barrier()
        start = clock()
        for _ in range(num_calls):
            run()
        synchronize()
        times.append(turns * (clock() - start) / num_calls)
    seconds = statistics.median(times) if computes else min(times)
    return 1e-9 * max_of_numbers([max(1, round(1e9 * seconds))])[0]


def _ranks_per_host() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", group_size()))


def _ranks_per_core() -> float:
    """Return the number of ranks of this host for each of its cores, at least 1."""
    return max(1.0, _ranks_per_host() / num_cores())


# Operators. Each function returns the amount of work of a size, and the call.

Work = tuple[float, Callable[[], Any]]


def _matmul(side: int, dtype: torch.dtype, device: torch.device) -> Work:
    left, right = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
    return 2.0 * side**3, partial(torch.mm, left, right)


def _attention(side: int, dtype: torch.dtype, device: torch.device) -> Work:
    width = 64
    query, key, value = (torch.rand(1, 1, side, width, device=device).to(dtype) for _ in range(3))
    return 4.0 * side**2 * width, partial(functional.scaled_dot_product_attention, query, key, value)


def _convolution(side: int, dtype: torch.dtype, device: torch.device) -> Work:
    channels, edge = 32, max(4, side // 16)
    images = torch.rand(4, channels, edge, edge, device=device).to(dtype)
    weight = torch.rand(channels, channels, 3, 3, device=device).to(dtype)
    return 2.0 * 4 * edge**2 * channels**2 * 9, partial(functional.conv2d, images, weight, padding=1)


def _of_tensors(count: int, call: Callable[..., Any]) -> Callable[[int, torch.dtype, torch.device], Work]:
    """Return the function of a call on a number of tensors, whose result is as large as one of them."""

    def make(num_bytes: int, dtype: torch.dtype, device: torch.device) -> Work:
        tensors = _random(num_bytes // (count + 1) // dtype.itemsize, device, dtype, count)
        return (count + 1.0) * tensors[0].nbytes, partial(call, *tensors)

    return make


def _reduction(num_bytes: int, dtype: torch.dtype, device: torch.device) -> Work:
    rows = max(1, num_bytes // 2 // dtype.itemsize // 256)
    tensor = torch.rand(rows, 256, device=device).to(dtype)
    return 2.0 * tensor.nbytes, partial(functional.layer_norm, tensor, (256,))


def _index(num_bytes: int, dtype: torch.dtype, device: torch.device) -> Work:
    rows = max(1, num_bytes // 2 // dtype.itemsize // 256)
    table = torch.rand(8192, 256, device=device).to(dtype)
    indices = torch.randint(8192, (rows,), device=device)
    return 2.0 * rows * 256 * dtype.itemsize, partial(functional.embedding, indices, table)


_PRODUCTS = {"matmul": _matmul, "attention": _attention, "convolution": _convolution}
_MEMORY_BOUND = {
    "elementwise": _of_tensors(2, torch.add),
    "inplace": _of_tensors(2, partial(torch.Tensor.add_, alpha=1e-6)),
    "special": _of_tensors(1, functional.gelu),
    "transcendental": _of_tensors(1, torch.tanh),
    "random": _of_tensors(1, lambda tensor: tensor.bernoulli_(0.9)),
    "reduction": _reduction,
    "index": _index,
}


def _keeping_results(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Return a call that keeps its last results, as autograd does: the next one is in memory that is not cached."""
    kept: deque[torch.Tensor] = deque()
    num_bytes = 0

    def call() -> None:
        nonlocal num_bytes
        kept.append(run())
        num_bytes += kept[-1].nbytes
        while num_bytes > _KEPT_BYTES:
            num_bytes -= kept.popleft().nbytes

    return call


def _curve(
    make: Callable[[int, torch.dtype, torch.device], Work],
    dtype: torch.dtype,
    sizes: Sequence[int],
    device: torch.device,
    bare_call: float,
) -> Curve:
    points: dict[float, float] = {}
    for size in sizes:
        amount, run = make(size, dtype, device)
        measured = _seconds_of(_keeping_results(run))
        points[amount] = max(measured - bare_call, _LEAST_SHARE * measured)
    return Curve(tuple(sorted(points.items())))


# Calls.


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        heads = [one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.qkv(self.norms[0](inputs)).chunk(3, dim=-1)]
        attended = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        hidden = inputs + self.projection(attended)
        outputs: torch.Tensor = hidden + self.down(functional.gelu(self.up(self.norms[1](hidden))))
        return outputs


def _call_seconds(profile: MachineProfile, device: torch.device) -> tuple[float, float]:
    """Return the time of a call in forward and backward, and in an optimizer's step.

    On a CPU the time of a call includes what its kernel takes longer than when it is called again and again: blocks of
    the size of those of a model are run. A device's kernels must be short to run in the time of their calls.
    """
    small, inputs = nn.Sequential(*(_Block(16) for _ in range(4))).to(device), torch.rand(1, 4, 16, device=device)
    _train(small, inputs)  # gives the optimizer gradients
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-5)
    in_model = _seconds_of_call(partial(_train, small, inputs), profile)
    if not profile.is_asynchronous:
        in_model = max(in_model, _seconds_of_call(partial(_train, *_model_block(device)), profile))
    return in_model, _seconds_of_call(optimizer.step, profile)


def _seconds_of_call(run: Callable[[], Any], profile: MachineProfile) -> float:
    """Return the time of a call, without that of the kernels."""
    run()
    recorder = CostRecorder()
    with recorder:
        run()
    kernels = 0.0 if profile.is_asynchronous else sum(cost.seconds(profile) for cost in recorder.costs)
    return max(profile.call_seconds * _LEAST_SHARE, (_seconds_of(run) - kernels) / recorder.num_calls)


def _model_block(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    return _Block(256).to(device), torch.rand(8, 64, 256, device=device)


def _train(model: nn.Module, inputs: torch.Tensor) -> None:
    model(inputs).mean().backward()


# Collectives. Each function returns the start, and the wait that takes what it returned.

_StartAndWait = tuple[Callable[[], Any], Callable[[Any], None]]


def _measure_collectives(
    ranks_per_host: int, device: torch.device, payloads: Sequence[int]
) -> Iterator[CollectiveSpeed]:
    """Yield the speeds in groups of each size that divides the world: of neighbors, and of ranks on several hosts."""
    world = group_size()
    for size in (one for one in range(2, world + 1) if world % one == 0):
        neighbors = [[*range(first, first + size)] for first in range(0, world, size)]
        strided = [[*range(first, world, world // size)] for first in range(world // size)]
        by_hosts = {len({rank // ranks_per_host for rank in rows[0]}): rows for rows in (strided, neighbors)}
        for num_hosts, rows in by_hosts.items():
            group = new_group_of_rows(rows)
            name = transport(group) if device.type == "cpu" else str(torch.distributed.get_backend(group))
            for operation, make in _COLLECTIVES.items():
                of_group = partial(make, device=device, group=group)
                latency, per_byte = _latency(operation, of_group, payloads)
                start, wait = of_group(payloads[-2])
                yield CollectiveSpeed(
                    operation=operation,
                    num_ranks=size,
                    num_hosts=num_hosts,
                    transport=name,
                    latency=latency,
                    seconds_per_byte=per_byte,
                    overlap=_overlap(start, wait, device),
                )
            release_groups([group])


def _latency(operation: str, make: Callable[[int], _StartAndWait], payloads: Sequence[int]) -> tuple[float, float]:
    volumes, seconds = [], []
    for num_bytes in payloads:
        calls = [make(num_bytes) for _ in range(_NUM_BUFFERS)]
        start, wait = calls[0]
        with count_communication() as count:
            wait(start())
        volumes.append(max_of_numbers([max(count.sent[operation], count.received[operation])])[0])
        seconds.append(_seconds_of(partial(_run_next, itertools.cycle(calls)), computes=False))
    return fit_latency(volumes, seconds)


def _run(start: Callable[[], Any], wait: Callable[[Any], None]) -> None:
    wait(start())


def _run_next(calls: Iterator[_StartAndWait]) -> None:
    _run(*next(calls))


def fit_latency(volumes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return latency and time per byte, by least squares of relative errors, neither of them negative."""
    times = np.asarray(seconds)
    columns = np.stack([np.ones(len(times)), np.asarray(volumes, dtype=float)], axis=1) / times[:, None]
    latency, per_byte = (float(one) for one in np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)[0])
    if latency < 0:
        ratios = columns[:, 1]
        return 0.0, float(ratios.sum() / (ratios**2).sum())
    if per_byte < 0:
        ratios = columns[:, 0]
        return float(ratios.sum() / (ratios**2).sum()), 0.0
    return latency, per_byte


def _wait_seconds(device: torch.device) -> float:
    """Return the time of a core that a wait amid computation takes, in addition to that of one after another."""
    if device.type != "cpu":
        return 0.0
    block, inputs = _model_block(device)
    start, wait = _all_reduce(64, device, None)
    in_loop = _seconds_of(partial(_run, start, wait))  # of this thread, as below

    def train(num_waits: int) -> None:
        for _ in range(num_waits):
            _run(start, wait)
        hidden = block(inputs)
        for _ in range(num_waits):
            _run(start, wait)
        hidden.mean().backward()

    times: tuple[list[float], list[float]] = [], []
    for _ in range(_NUM_WAITS):
        for num_waits in (0, 1):
            begin = time.thread_time()
            train(num_waits)
            times[num_waits].append(time.thread_time() - begin)
    without, with_waits = map(statistics.median, times)
    seconds = _ranks_per_core() * (with_waits - without) / 2 - in_loop
    return 1e-9 * max_of_numbers([max(0, round(1e9 * seconds))])[0]


def _overlap(start: Callable[[], Any], wait: Callable[[Any], None], device: torch.device) -> float:
    """Return which part of a collective products of matrices hide that run between its start and its wait."""
    _, product = _matmul(256, torch.float32, device)
    alone = _seconds_of(partial(_run, start, wait), computes=False)
    num_products = max(1, round(alone / _seconds_of(product)))

    def compute() -> None:
        for _ in range(num_products):
            product()

    def both() -> None:
        started = start()
        compute()
        wait(started)

    computing = _seconds_of(compute, computes=False)
    hidden = alone + computing - _seconds_of(both, computes=False)
    return min(1.0, max(0.0, hidden / min(alone, computing)))


def _all_reduce(num_bytes: int, device: torch.device, group: Any) -> Any:
    tensor = torch.zeros(num_bytes // 4, device=device)
    return partial(start_all_reduce, tensor, group), lambda started: started.wait()


def _reduce_scatter(num_bytes: int, device: torch.device, group: Any) -> Any:
    shard = torch.zeros(-(-num_bytes // 4 // group_size(group)), device=device)
    payload = torch.zeros(shard.numel() * group_size(group), device=device)
    return partial(start_reduce_scatter, payload, group), lambda started: started.wait(shard, accumulate=False)


def _all_gather(num_bytes: int, device: torch.device, group: Any) -> Any:
    shard = -(-num_bytes // 4 // group_size(group))
    buffer = torch.zeros(shard * group_size(group), device=device)
    return partial(start_all_gather, buffer, group), lambda started: started.wait()


def _all_to_all(num_bytes: int, device: torch.device, group: Any) -> Any:
    rows = -(-num_bytes // 4 // group_size(group)) * group_size(group)
    payload, output = torch.zeros(rows, device=device), torch.zeros(rows, device=device)
    return partial(all_to_all_single, output, payload, group), lambda started: None


def _broadcast(num_bytes: int, device: torch.device, group: Any) -> Any:
    tensor = torch.zeros(num_bytes // 4, device=device)
    return partial(broadcast, [tensor], group), lambda started: None


def _send(num_bytes: int, device: torch.device, group: Any) -> Any:
    """Pass a tensor from each even rank to the next one."""
    tensor = torch.zeros(num_bytes // 4, device=device)
    rank, size = group_rank(group), group_size(group)

    def exchange() -> None:
        if rank % 2 == 0 and rank + 1 < size:
            send_tensor(tensor, rank + 1, group)
        elif rank % 2 == 1:
            receive_tensor(rank - 1, group)

    return exchange, lambda started: None


_COLLECTIVES = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}
