"""The measuring code of benchmarks/tensor_parallel: its engines on a tiny model, targets, and a run of the script."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import benchmark_ranks
import pytest
import torch
from harness import run_ranks

STEPS = 4


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules under their names."""
    return SimpleNamespace(**benchmark_ranks.import_benchmark("tensor_parallel"))


def test_the_floor_comes_first_and_names_are_told_apart(bench):
    names = [engine.name for engine in bench.engines.engines_of("tiny", has_sequence_modes=True)]
    assert names[0] == bench.engines.HALF
    assert len(set(names)) == len(names) == 6
    assert [engine.name for engine in bench.engines.engines_of("tiny")] == names[:4]


def test_all_train_as_one_process_does(bench):
    """Tensor parallelism changes nothing but the order of sums; a share of the model learns something else."""
    engines = bench.engines
    ours = [engines.OURS, *map(engines.sequence_name, engines.SEQUENCE_MODES)]
    for losses in run_ranks(benchmark_ranks.train, 2, "tensor_parallel", STEPS, has_sequence_modes=True):
        assert list(losses) == [engines.HALF, engines.WHOLE, engines.DTENSOR, *ours]
        whole, half = losses[engines.WHOLE], losses[engines.HALF]
        assert abs(half[0] - whole[0]) > 0.1
        for name in (engines.DTENSOR, *ours):
            assert losses[name] == pytest.approx(whole, abs=1e-5), name


@pytest.mark.parametrize("size", ["tiny", "10m", "50m"])
def test_a_share_is_half_of_the_work(bench, size):
    whole = bench.llama.LLAMA_SIZES[size]
    share = whole.share(2)
    with torch.device("meta"):
        count = {one: sum(p.numel() for p in bench.llama.Llama(one).parameters()) for one in (whole, share)}
    norms = (2 * whole.layers + 1) * whole.width
    assert count[whole] - norms == 2 * (count[share] - norms)
    if size != "tiny":
        assert count[whole] == pytest.approx({"10m": 10.5e6, "50m": 50e6}[size], rel=0.01)


def test_a_share_that_is_not_equal_is_refused(bench):
    with pytest.raises(ValueError, match="heads=4 can't be shared equally by 3 ranks"):
        bench.llama.LLAMA_SIZES["tiny"].share(3)


# Targets.


def _comparison(bench, seconds):
    world, schedule = bench.pair.World(size=2), bench.pair.Schedule(steps=3)
    control = f"{bench.engines.HALF} (control)"
    seconds = {bench.engines.HALF: [1.0] * 3, control: [1.0] * 3, **seconds}
    engines = [bench.pair.Engine(name=name, build=int) for name in seconds]
    samples = {name: bench.samples.Samples(seconds=list(values), losses=[1.0]) for name, values in seconds.items()}
    reports = bench.pair.report_engines(engines, [(dict.fromkeys(seconds, "measured"), samples)] * 2, {})
    return bench.pair.Comparison(title="t", world=world, schedule=schedule, engines=reports)


def test_counted_bytes_are_those_of_the_papers(bench, monkeypatch):
    monkeypatch.setattr(bench.grid_bytes, "NUM_RANKS", (4, 8))
    rows = bench.grid_bytes.grid_bytes()
    assert [(row.num_ranks, row.mode) for row in rows] == [
        *[(4, "1d"), (4, "2d")],
        *[(8, "1d"), (8, "2.5d depth 2"), (8, "3d")],
    ]
    for row in rows:
        assert row.counted == row.theory


def test_targets_are_over_the_floor_and_over_dtensor(bench):
    engines = bench.engines
    comparison = _comparison(bench, {engines.DTENSOR: [1.4] * 3, engines.OURS: [1.05] * 3})
    over_half, over_dtensor = bench.script.speed_targets(comparison)
    assert (over_half.value, over_half.high, over_half.verdict) == (1.05, 1.08, "PASS")
    assert over_dtensor.value == pytest.approx(0.75)
    assert (over_dtensor.high, over_dtensor.verdict) == (0.85, "PASS")
    comparison = _comparison(bench, {engines.DTENSOR: [1.4] * 3, engines.OURS: [1.3] * 3})
    assert [target.verdict for target in bench.script.speed_targets(comparison)] == ["FAIL", "FAIL"]


def test_what_was_not_measured_is_not_met(bench):
    comparison = _comparison(bench, {bench.engines.DTENSOR: [1.4] * 3})
    assert [target.verdict for target in bench.script.speed_targets(comparison)] == ["FAIL", "FAIL"]


@pytest.mark.parametrize(("arguments", "steps"), [([], 40), (["--quick"], 4), (["--steps", "70", "--quick"], 7)])
def test_steps(bench, arguments, steps):
    assert bench.script._schedule(bench.script._parser().parse_args(arguments)).steps == steps


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--memory", "--sequence-modes"], ["--no-shared-memory"]])
def test_the_whole_script(options):
    script = str(benchmark_ranks.BENCHMARKS / "tensor_parallel" / "run.py")
    command = [sys.executable, script, "--size", "tiny", "--steps", "3", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "HybridParallel over DTensor parallelize_module, tiny Llama in fp32" in done.stdout
    assert ("HybridParallel, ring" in done.stdout) == ("--sequence-modes" in options)
    assert ("peak MiB" in done.stdout) == ("--memory" in options)
