"""The measuring tool of the benchmarks: its statistics, its environment, and real runs of tiny engines."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from pair_engines import (
    build_broken,
    build_broken_step,
    build_hoarder,
    build_linear,
    leave_early,
    read_environment,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def tool():
    """The benchmark modules under their names; the folder is on the path while a test of this file runs."""
    sys.path.insert(0, str(BENCHMARKS))
    names = ("engine", "targets", "gpt", "memory", "pair", "ranks", "samples", "table", "timing")
    modules: dict[str, ModuleType] = {name: importlib.import_module(f"_harness.{name}") for name in names}
    yield SimpleNamespace(**modules)
    sys.path.remove(str(BENCHMARKS))


# Statistics.


def test_spread_of_known_numbers(tool):
    spread = tool.samples.Spread.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (spread.first, spread.median, spread.third) == (2.0, 3.0, 4.0)
    assert (spread.low, spread.high) == (1.0, 5.0)
    only = tool.samples.Spread.of([7.0])
    assert (only.first, only.median, only.third, only.low, only.high) == (7.0,) * 5


def test_spread_of_nothing_is_an_error(tool):
    with pytest.raises(ValueError, match="no samples"):
        tool.samples.Spread.of([])


def test_the_median_interval_narrows_with_the_samples(tool):
    low, high = tool.samples.median_interval([float(value) for value in range(1001)])
    assert low <= 500 <= high
    # 1.96 * sqrt(1001) / 2 = 31 places to either side.
    assert low > 460
    assert high < 540


def test_pairs_are_taken_step_by_step(tool):
    assert tool.samples.paired_ratios([2.0, 3.0], [1.0, 6.0]) == [2.0, 0.5]
    assert tool.samples.paired_differences([2.0, 3.0], [1.0, 6.0]) == [1.0, -3.0]
    with pytest.raises(ValueError, match="zip"):
        tool.samples.paired_ratios([1.0], [1.0, 2.0])


def test_every_engine_stands_everywhere_equally_often(tool):
    names = ["a", "b", "c"]
    orders = [tool.samples.order_of_round(names, index) for index in range(6)]
    for place in range(3):
        assert sorted(order[place] for order in orders) == ["a", "a", "b", "b", "c", "c"]
    followers = {(first, second) for order in orders for first, second in itertools.pairwise(order)}
    assert followers == {(first, second) for first in names for second in names if first != second}


def test_loss_differences_see_nan(tool):
    difference = tool.samples.largest_difference
    assert difference([1.0, 2.0], [1.0, 2.5]) == 0.5
    assert difference([math.nan, math.inf], [math.nan, math.inf]) == 0.0
    assert difference([math.nan], [1.0]) == math.inf
    assert difference([], []) == 0.0


def test_targets(tool):
    target = partial(tool.targets.Target, what="ratio", low=0.97, high=1.01)
    assert target(value=1.01).verdict == "PASS"
    assert target(value=1.02).verdict == "FAIL"
    assert target(value=1.02, interval=(1.0, 1.04)).verdict == "NOISY"
    assert target(value=1.02, interval=(1.015, 1.04)).verdict == "FAIL"
    assert not target(value=None).is_met
    assert "target 0.97 to 1.01, control 1" in str(target(value=1.0, control=1.0))


# Processes.


def test_glibc_gives_memory_back_in_memory_runs_alone(tool):
    parent = {"PATH": "/bin", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "8"}
    timed = tool.ranks.child_environment(parent, num_threads=1, gives_memory_back=False)
    assert timed == {"PATH": "/bin", "OMP_NUM_THREADS": "1"}
    weighed = tool.ranks.child_environment(parent, num_threads=2, gives_memory_back=True)
    assert weighed["MALLOC_MMAP_THRESHOLD_"] == "262144"
    assert weighed["MALLOC_TRIM_THRESHOLD_"] == "1048576"


@pytest.mark.slow
def test_ranks_start_with_that_environment_and_the_parent_keeps_its_own(tool, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    run = partial(tool.ranks.on_ranks, read_environment, tool.ranks.World(timeout_seconds=60))
    assert run("MALLOC_TRIM_THRESHOLD_", gives_memory_back=True) == ["1048576"]
    assert run("OMP_NUM_THREADS") == ["1"]
    assert read_environment("OMP_NUM_THREADS") == "7"
    assert read_environment("MALLOC_TRIM_THRESHOLD_") is None


def test_a_rank_that_dies_is_named(tool):
    with pytest.raises(tool.ranks.RankError, match="rank 0 ended with exit code 3"):
        tool.ranks.on_ranks(leave_early, tool.ranks.World(timeout_seconds=60))


@pytest.mark.slow
def test_two_ranks_compare_engines(tool):
    engine = tool.pair.Engine
    engines = [
        engine(name="plain", build=build_linear),
        engine(name="other rate", build=partial(build_linear, rate=0.01)),
        engine(name="broken", build=build_broken),
        engine(name="peer", build=build_linear, requires=("a_package_that_does_not_exist",), is_optional=True),
    ]
    world = tool.pair.World(size=2, timeout_seconds=60)
    comparison = tool.pair.compare("a test", engines, tool.pair.Schedule(steps=6, warmup=1), world)

    assert [report.name for report in comparison.engines] == [
        "plain",
        "plain (control)",
        "other rate",
        "broken",
        "peer",
    ]
    baseline, control, other, broken, peer = comparison.engines
    assert baseline.figures.ratio.median == 1.0
    assert baseline.figures.num_steps == 6
    assert control.figures.largest_loss_difference == 0.0
    assert comparison.control is control
    assert other.figures.largest_loss_difference > 0.0
    assert broken.has_failed
    assert "broken on purpose" in broken.outcome
    assert (peer.outcome, peer.has_failed) == ("not installed", False)
    assert comparison.has_failed
    table = comparison.table()
    assert "broken on purpose" in table
    assert "not installed" in table
    assert json.loads(json.dumps(comparison.document()))["engines"][1]["name"] == "plain (control)"


def test_an_engine_that_must_be_there_fails_the_run(tool):
    missing = tool.pair.Engine(name="ours", build=build_linear, requires=("a_package_that_does_not_exist",))
    step, outcome = tool.engine.build_engine(missing)
    assert step is None
    assert tool.pair.EngineReport(name="ours", outcome=outcome).has_failed


def test_a_failing_step_names_its_engine(tool):
    with pytest.raises(RuntimeError, match="engine 'bad' failed in step 0: no batch 0"):
        tool.timing.time_alternately({"bad": build_broken_step()}, tool.pair.Schedule(steps=1))


def test_no_baseline_no_comparison(tool):
    with pytest.raises(RuntimeError, match="baseline 'bad' was not built"):
        tool.pair.time_engines([tool.pair.Engine(name="bad", build=build_broken)], tool.pair.Schedule(steps=1))
    with pytest.raises(ValueError, match="at least one engine"):
        tool.engine.with_control([])


def test_a_time_limit_keeps_three_steps(tool):
    schedule = tool.pair.Schedule(steps=1000, warmup=2, seconds=0.0)
    samples = tool.timing.time_alternately({"plain": build_hoarder(0)}, schedule)["plain"]
    assert len(samples.seconds) == 3
    assert len(samples.losses) == 5


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_is_what_the_engine_added(tool):
    hoarder = tool.pair.Engine(name="hoarder", build=partial(build_hoarder, 8))
    world = tool.pair.World(timeout_seconds=60)
    (memory,) = tool.ranks.on_ranks(tool.memory.measure_memory, world, hoarder, 5, gives_memory_back=True)
    assert memory.after_build < 8 * 2**20
    assert 40 * 2**20 <= memory.after_steps < 56 * 2**20
    if memory.step_peak is not None:
        assert memory.step_peak >= memory.after_steps - 2**20  # the kernel counts in batches of pages


def test_the_worst_rank_is_reported(tool):
    figures = partial(tool.memory.Memory, after_build=1, build_peak=None, step_peak=7)
    worst = tool.memory.worst([figures(after_steps=5), None, figures(after_steps=9)])
    assert (worst.after_steps, worst.build_peak, worst.step_peak) == (9, None, 7)
    assert tool.memory.worst([None]) is None


def test_json_has_no_nan(tool, tmp_path):
    path = tool.pair.write_json("figures", {"loss": math.nan, "list": [1.5, (math.inf,)]}, tmp_path)
    assert json.loads(path.read_text()) == {"loss": "nan", "list": [1.5, ["inf"]]}


def test_json_has_no_absolute_path(tool, tmp_path):
    repository = tool.pair.RESULTS.parent.parent
    text = (
        f'1/2 of GB/s\n  File "{repository}/benchmarks/zero/run.py", line 3\n  File "/opt/python3.11/lib/x.py", line 4'
    )
    document = {"arguments": {"directory": str(repository / "runs"), "output": Path("/tmp/b")}, "detail": [text]}
    written = json.loads(tool.pair.write_json("figures", document, tmp_path).read_text())
    elsewhere = os.path.relpath("/", repository)
    assert written["arguments"] == {"directory": "runs", "output": os.path.relpath("/tmp/b", repository)}
    assert written["detail"] == [
        f'1/2 of GB/s\n  File "benchmarks/zero/run.py", line 3\n  File "{elsewhere}/opt/python3.11/lib/x.py", line 4'
    ]


def test_results_have_no_absolute_path(tool):
    results = sorted(tool.pair.RESULTS.glob("*.json"))
    assert results
    for path in results:
        document = json.loads(path.read_text())
        assert tool.pair.portable(document) == document, path.name


# The model.


@pytest.mark.parametrize("name", ["tiny", "10m"])
def test_gpt_counts_its_matrices(tool, name):
    size = tool.gpt.SIZES[name]
    with torch.device("meta"):
        model = tool.gpt.GPT(size)
    matrices = [parameter for key, parameter in model.named_parameters() if parameter.dim() == 2]
    tables = model.token.weight.numel() + model.position.weight.numel()
    assert sum(matrix.numel() for matrix in matrices) - tables == size.num_matmul_parameters


def test_gpt_flops_are_those_that_torch_counts(tool):
    size = tool.gpt.SIZES["tiny"]
    model, batch = tool.gpt.make_gpt(size), tool.gpt.batches(size)
    inputs, targets = batch(0)
    # The math backend, because torch does not count the fused attention of the CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        tool.gpt.next_token_loss(model(inputs), targets).backward()
    assert counter.get_total_flops() == tool.gpt.step_flops(size)


def test_gpt_ranks_read_different_data_and_steps_repeat(tool):
    size = tool.gpt.SIZES["tiny"]
    first, second = (tool.gpt.batches(size, rank, 2) for rank in range(2))
    assert not torch.equal(first(0)[0], second(0)[0])
    assert torch.equal(first(0)[0], first(8)[0])
    assert torch.equal(first(3)[0][:, 1:], first(3)[1][:, :-1])
