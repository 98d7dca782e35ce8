"""The measuring code of benchmarks/finetune: its engines on a tiny model, targets, and a run of the script."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import benchmark_ranks
import pytest
from harness import run_ranks


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules under their names."""
    return SimpleNamespace(**benchmark_ranks.import_benchmark("finetune"))


@pytest.mark.slow
def test_all_engines_train_alike(bench):
    """Tensor parallelism changes the order of sums, the others nothing."""
    engines = bench.engines
    for losses in run_ranks(benchmark_ranks.train, 2, "finetune", 4):
        assert list(losses) == [engine.name for engine in engines.engines_of("tiny")]
        expected = losses.pop(engines.DDP)
        assert expected[0] != expected[1]
        for name, found in losses.items():
            assert found == pytest.approx(expected, abs=1e-5 if name == engines.TENSOR else 1e-6), name


def _comparison(bench, seconds, peaks):
    """Returns a comparison of engines with these times and peaks of memory, by name."""
    control = f"{bench.engines.DDP} (control)"
    seconds = {bench.engines.DDP: 1.0, control: 1.0, **seconds}
    engines = [bench.pair.Engine(name=name, build=int) for name in seconds]
    samples = {name: bench.samples.Samples(seconds=[value] * 3, losses=[1.0]) for name, value in seconds.items()}
    memory = {
        name: bench.memory.Memory(after_build=0, build_peak=0, after_steps=0, step_peak=peak)
        for name, peak in peaks.items()
    }
    reports = bench.pair.report_engines(engines, [(dict.fromkeys(seconds, "measured"), samples)] * 2, memory)
    world, schedule = bench.pair.World(size=2), bench.pair.Schedule(steps=3)
    return bench.pair.Comparison(title="t", world=world, schedule=schedule, engines=reports)


def test_targets_are_over_the_peer_of_each_plugin(bench):
    engines = bench.engines
    seconds = {engines.ACCELERATE_FSDP2: 2.0, engines.OUR_DDP: 1.04, engines.OUR_FSDP: 1.8, engines.GEMINI: 2.2}
    peaks = {engines.DDP: 100, engines.ACCELERATE_FSDP2: 50, engines.OUR_DDP: 104, engines.OUR_FSDP: 60}
    comparison = _comparison(bench, seconds, peaks)
    ddp, zero_1, _, gemini, fsdp = bench.script.speed_targets(comparison)
    assert [one.value for one in (ddp, zero_1, gemini, fsdp)] == [1.04, None, 1.1, 0.9]
    assert [one.verdict for one in (ddp, zero_1, gemini, fsdp)] == ["PASS", "FAIL", "FAIL", "PASS"]
    ddp, zero_1, _, gemini, fsdp = bench.script.memory_targets(comparison)
    assert [one.value for one in (ddp, zero_1, gemini, fsdp)] == [1.04, None, None, 1.2]
    assert [one.verdict for one in (ddp, zero_1, gemini, fsdp)] == ["PASS", "FAIL", "FAIL", "FAIL"]


@pytest.mark.slow
def test_the_whole_script():
    script = str(benchmark_ranks.BENCHMARKS / "finetune" / "run.py")
    command = [sys.executable, script, "--size", "tiny", "--steps", "3", "--memory"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TorchFSDPPlugin over peft, Accelerate FSDP2, LoRA of a tiny Llama in fp32" in done.stdout
    assert "peak memory of GeminiPlugin over peft, Accelerate FSDP2" in done.stdout
