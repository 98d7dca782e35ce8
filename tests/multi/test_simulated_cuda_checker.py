"""The checker of the simulated device reports faults that are planted, in small programs and in the plugins."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from device_costs import measure
from harness import RanksFailed, run_ranks
from parity import Case, train_parallel
from simulated_cuda import device
from torch.utils.checkpoint import checkpoint

SIMULATED = "simulated_cuda"
SIZE = 1000


def _values() -> torch.Tensor:
    return torch.ones(SIZE, device="cuda")


def _pinned() -> torch.Tensor:
    return torch.zeros(SIZE, pin_memory=True)


# Each program is right with `waits`, and has one fault without.


def read_on_another_stream(waits: bool) -> None:
    values, side = _values(), torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = values.sum()
    torch.cuda.current_stream().wait_stream(side)
    del total


def write_on_another_stream(waits: bool) -> None:
    values, side = _values(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.mul_(2)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    values.add_(1)
    torch.cuda.synchronize()


def overwrite_what_another_stream_reads(waits: bool) -> None:
    values, side = _values(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = values * 2
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    values.zero_()
    torch.cuda.synchronize()
    del doubled


def event_before_the_work(waits: bool) -> None:
    values, side, event = _values(), torch.cuda.Stream(), torch.cuda.Event()
    if not waits:
        event.record()
    values.mul_(2)
    if waits:
        event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        total = values.sum()
    torch.cuda.synchronize()
    del total


def wait_for_the_wrong_stream(waits: bool) -> None:
    values, side, other = _values(), torch.cuda.Stream(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.mul_(2)
    torch.cuda.current_stream().wait_stream(side if waits else other)
    values.add_(1)
    torch.cuda.synchronize()


def prefetch_without_a_wait(waits: bool) -> None:
    source, side = _pinned(), torch.cuda.Stream()
    target = _values()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    target.add_(1)
    torch.cuda.synchronize()


def free_while_another_stream_reads(waits: bool) -> None:
    values, side = _values(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = values * 2
    if waits:
        values.record_stream(side)
    del values
    torch.cuda.synchronize()
    del doubled


def free_behind_what_a_recorded_stream_follows(waits: bool) -> None:
    values, side, last = torch.ones(2 * SIZE, device="cuda"), torch.cuda.Stream(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = values * 2
    if waits:
        last.wait_stream(side)
    values.record_stream(last)
    del values
    torch.cuda.synchronize()
    del doubled


def change_a_pinned_source(waits: bool) -> None:
    source, target = _pinned(), _values()
    target.copy_(source, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    source.fill_(3)
    torch.cuda.synchronize()


def change_a_pinned_target(waits: bool) -> None:
    target, values = _pinned(), _values()
    target.copy_(values, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    target.fill_(3)
    torch.cuda.synchronize()
    assert target[0].item() == (3 if waits else 1)


def pinned_memory_on_two_streams(waits: bool) -> None:
    host, values, side = _pinned(), _values(), torch.cuda.Stream()
    host.copy_(values, non_blocking=True)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        back = torch.empty(SIZE, device="cuda").copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    assert not waits or back.sum().item() == SIZE


def result_of_a_collective(waits: bool) -> None:
    values = _values()
    work = dist.all_reduce(values, async_op=True)
    if waits:
        work.wait()
    values.add_(1)
    work.wait()


def result_of_a_callback(waits: bool) -> None:
    values = _values()
    future = dist.all_reduce(values, async_op=True).get_future().then(lambda done: done.value()[0].mul_(2))
    if waits:
        future.wait()
    while not future.done():
        time.sleep(0)
    values.sub_(1)
    torch.cuda.synchronize()


def payload_of_a_collective(waits: bool) -> None:
    values, joined = _values(), torch.empty(SIZE * dist.get_world_size(), device="cuda")
    work = dist.all_gather_into_tensor(joined, values, async_op=True)
    if waits:
        work.wait()
    values.zero_()
    work.wait()


def two_communicators_at_one_buffer(waits: bool) -> None:
    values, group = _values(), dist.new_group(list(range(dist.get_world_size())))
    first = dist.all_reduce(values, async_op=True)
    if waits:
        first.wait()
    second = dist.all_reduce(values, group=group, async_op=True)
    first.wait()
    second.wait()


def hidden_by_an_accidental_wait(waits: bool) -> None:
    device.set_options(drops_avoidable_waits=True)
    values, side = _values(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = values * 2
        assert doubled.sum().item() == 2 * SIZE  # waits for the stream, which no program should rely on
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    total = doubled + 1
    torch.cuda.synchronize()
    del doubled, total


PROGRAMS = {
    read_on_another_stream: "race: aten::sum reads",
    write_on_another_stream: "race: aten::add writes",
    overwrite_what_another_stream_reads: "race: aten::zero_ writes",
    event_before_the_work: "race: aten::sum reads",
    wait_for_the_wrong_stream: "race: aten::add writes",
    prefetch_without_a_wait: "race: aten::add writes",
    free_while_another_stream_reads: "lifetime: 4000 bytes",
    free_behind_what_a_recorded_stream_follows: "lifetime: 8000 bytes",
    change_a_pinned_source: "pinned: the host changed 4000 pinned bytes",
    change_a_pinned_target: "their copy from the device",
    pinned_memory_on_two_streams: "race: copy_ from pinned memory",
    result_of_a_collective: "race: aten::add writes",
    result_of_a_callback: "race: aten::sub writes",
    payload_of_a_collective: "race: aten::zero_ writes",
    two_communicators_at_one_buffer: "race: nccl all_reduce writes",
    hidden_by_an_accidental_wait: "race: aten::add reads",
}


def _run_all(programs: list[str], waits: bool) -> None:
    for name in programs:
        globals()[name](waits)


def test_programs_without_faults():
    run_ranks(_run_all, 2, [program.__name__ for program in PROGRAMS], True, device=SIMULATED)


def _use_on_another_stream_after_the_end() -> None:
    values, side = _values(), torch.cuda.Stream()
    recorded = torch.cuda.Event()
    recorded.record()
    assert not recorded.query()
    device.settle()
    assert recorded.query()
    with torch.cuda.stream(side):
        values.mul_(2)
    torch.cuda.current_stream().wait_stream(side)


def test_the_end_of_a_program_orders_all_that_came_before():
    run_ranks(_use_on_another_stream_after_the_end, 1, device=SIMULATED)


def _reports_of_each(programs: list[str]) -> dict[str, str]:
    from simulated_cuda import reports

    found = {}
    for name in programs:
        with reports.recording() as record:
            globals()[name](False)
            device.settle()
        device.set_options()
        found[name] = "\n".join(record.faults())
    return found


def test_each_fault_is_reported_with_its_place():
    # All in one job, which fails with all of them.
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_reports_of_each, 2, [program.__name__ for program in PROGRAMS], device=SIMULATED)
    text = str(failed.value)
    lines = [line for line in text.splitlines() if " x " in line]
    for program, expected in PROGRAMS.items():
        assert any(expected in line for line in lines), f"{program.__name__}: {expected}\n{text}"
    assert all("test_simulated_cuda_checker.py:" in line for line in lines)


def _read_too_early() -> list[float]:
    host, values = _pinned(), _values()
    host.copy_(values, non_blocking=True)
    early = host.sum().item()
    torch.cuda.synchronize()
    return [early, host.sum().item()]


def test_pinned_memory_shows_garbage_until_the_host_waits():
    ((early, late),) = run_ranks(_read_too_early, 1, device=SIMULATED)
    assert early != late == SIZE


def _masks_and_generators(recomputes: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    host, own = torch.get_rng_state(), torch.cuda.get_rng_state()
    values = _values().requires_grad_()

    def drop(one: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(one, 0.5)

    dropped = checkpoint(drop, values, use_reentrant=False) if recomputes else drop(values)
    assert torch.equal(torch.get_rng_state(), host)
    after = torch.cuda.get_rng_state()
    assert not torch.equal(after, own)
    dropped.sum().backward()
    assert torch.equal(torch.cuda.get_rng_state(), after)
    assert torch.equal(dropped.detach() > 0, values.grad > 0)
    return [dropped.detach(), torch.rand(3, device="cuda")]


def test_dropout_draws_from_the_generator_of_the_device():
    plain, again = (run_ranks(_masks_and_generators, 2, one, device=SIMULATED) for one in (False, True))
    for one in (*plain, *again):
        for found, expected in zip(one, plain[0], strict=True):
            assert torch.equal(found, expected)


# The plugins, each with one wait left out.


def _without_wait(name: str) -> Any:
    from booster.comm.collective_op import CollectiveOp

    original = CollectiveOp.wait

    def wait(self: CollectiveOp, work: dist.Work) -> None:
        if self.name != name:
            original(self, work)

    return mock.patch.object(CollectiveOp, "wait", wait)


def train_with_a_fault(settings: dict[str, Any], fault: str) -> None:
    """Train with one wait for a collective left out."""
    with _without_wait(fault):
        measure(settings)  # without collectives of the test, which would order those before them


CHUNKS = {"chunk_config_dict": {"chunk_size": 512}}
PLANTED = {
    "gemini, gather": ("gemini", CHUNKS, "all_gather"),
    "gemini, reduction": ("gemini", CHUNKS, "reduce_scatter"),
    "zero 2, reduction": ("low_level_zero", {"stage": 2}, "reduce_scatter"),
    "zero 1, gather": ("low_level_zero", {"stage": 1}, "all_gather"),
    "fsdp, gather": ("torch_fsdp", {}, "all_gather"),
    "fsdp, reduction": ("torch_fsdp", {}, "reduce_scatter"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wait_that_a_plugin_leaves_out_is_reported(name):
    plugin, arguments, fault = PLANTED[name]
    case = Case(plugin=plugin, model="mlp_odd", plugin_arguments=arguments, device=SIMULATED)
    with pytest.raises(RanksFailed, match=r"(?s)the simulated device reports.*race"):
        run_ranks(train_with_a_fault, 2, asdict(case), fault, device=SIMULATED, timeout=30)


def losses_without_waits_for_pinned_memory(settings: dict[str, Any]) -> list[float]:
    from booster.plugins.gemini.tiers import _HostTransfer
    from booster.plugins.torch_fsdp import param_group

    def copy_as_if_arrived(tensor: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        return copy(tensor, **options)[0], None

    copy = param_group.copy_to_host
    device.set_options(drops_avoidable_waits=True)
    with (
        mock.patch.object(_HostTransfer, "wait_on_host"),
        mock.patch.object(param_group, "copy_to_host", copy_as_if_arrived),
    ):
        return train_parallel(settings).losses


def test_weights_that_the_host_updates_while_they_arrive_are_reported():
    arguments = {"placement_policy": "cpu", **CHUNKS}
    case = Case(plugin="gemini", model="mlp_odd", plugin_arguments=arguments, optimizer="hybrid_adam", device=SIMULATED)
    run_ranks(train_parallel, 2, asdict(case), device=SIMULATED)
    with pytest.raises(RanksFailed, match="pinned: the host changed 640 pinned bytes"):
        run_ranks(losses_without_waits_for_pinned_memory, 2, asdict(case), device=SIMULATED, timeout=30)


def test_pinned_weights_that_the_host_updates_too_early_are_reported():
    case = Case(plugin="torch_fsdp", model="mlp_odd", plugin_arguments={"cpu_offload": True}, device=SIMULATED)
    with pytest.raises(RanksFailed, match="pinned: the host changed 196 pinned bytes"):
        run_ranks(losses_without_waits_for_pinned_memory, 2, asdict(case), device=SIMULATED, timeout=30)
