"""The measuring code of benchmarks/pipeline: its engines on a tiny model, formulas, targets, a run of the script."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import benchmark_ranks
import pytest
import torch
from harness import run_ranks

STEPS = 3
NUM_MICROBATCHES = 4  # of the tiny model


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules under their names."""
    return SimpleNamespace(**benchmark_ranks.import_benchmark("pipeline"))


def test_the_floor_comes_first_and_names_are_told_apart(bench):
    names = [engine.name for engine in bench.engines.engines_of("tiny")]
    assert names[0] == bench.engines.ALONE
    assert len(set(names)) == len(names) == 1 + 2 * 4
    only = [engine.name for engine in bench.engines.engines_of("tiny", ["zbv"])]
    assert only == [bench.engines.ALONE, "torch, zbv", "ours, zbv"]


def test_all_schedules_have_the_loss_of_one_process(bench):
    size = bench.model.PIPELINE_SIZES["tiny"]
    model, batch = bench.model.make_stack(size), bench.model.stack_batches(size)
    with torch.no_grad():
        expected = [float(bench.model.next_features_loss(model(batch(i)), batch(i))) for i in range(STEPS)]
    for losses in run_ranks(benchmark_ranks.train, 2, "pipeline", STEPS):
        assert len(losses) == 9
        del losses[bench.engines.ALONE]  # its second half learns something else
        for name, values in losses.items():
            assert values == pytest.approx(expected, rel=1e-5), name


@pytest.mark.slow
def test_live_activations_are_those_that_the_schedules_keep(bench):
    """Both libraries by the same count; a microbatch's input to a stage is kept too, as is its loss."""
    styles = bench.engines.STYLES
    cases = [(name, 2, NUM_MICROBATCHES, style.num_chunks) for name, style in styles.items()]
    simulated = {one.schedule: one.peak_live for one in bench.simulated.simulate_all(cases)}
    for rank, kept in enumerate(run_ranks(benchmark_ranks.pipeline_activations, 2)):
        for name in styles:
            for engine in (bench.engines.torch_name(name), bench.engines.our_name(name)):
                assert kept[engine] == pytest.approx(simulated[name][rank], abs=0.25), (engine, rank)


def test_the_simulator_agrees_with_all_formulas(bench):
    results = bench.simulated.simulate_all()
    assert len(results) == len(bench.simulated.CASES) == 30
    assert all(one.agrees for one in results)
    assert "MISMATCH" not in bench.simulated.simulated_table(results)


def test_a_bubble_that_differs_from_its_formula_fails_the_script(bench, monkeypatch, capsys):
    monkeypatch.setitem(bench.simulated._FORMULAS, "1f1b", lambda p, m, v: p / (m + p))
    assert bench.script.main(["--part", "simulated"]) == 1
    assert capsys.readouterr().out.count("MISMATCH") == 6
    monkeypatch.undo()
    assert bench.script.main(["--part", "simulated"]) == 0


@pytest.mark.parametrize(("style", "allowed"), [("gpipe", 9), ("1f1b", 9), ("interleaved", 8.5), ("zbv", 8)])
def test_what_a_schedule_allows(bench, style, allowed):
    assert bench.engines.STYLES[style].microbatches_of_time(8) == allowed


@pytest.mark.parametrize(("style", "positions"), [("1f1b", [1]), ("interleaved", [1, 3]), ("zbv", [1, 2])])
def test_parts_of_the_last_stage(bench, style, positions):
    assert bench.engines.STYLES[style].positions(1) == positions


# Targets.


def _comparison(bench, seconds):
    world, schedule = bench.pair.World(size=2), bench.pair.Schedule(steps=3)
    floor = bench.engines.ALONE
    seconds = {floor: [8.0] * 3, f"{floor} (control)": [8.0] * 3, **seconds}
    engines = [bench.pair.Engine(name=name, build=int) for name in seconds]
    samples = {name: bench.samples.Samples(seconds=list(values), losses=[1.0]) for name, values in seconds.items()}
    reports = bench.pair.report_engines(engines, [(dict.fromkeys(seconds, "measured"), samples)] * 2, {})
    return bench.pair.Comparison(title="t", world=world, schedule=schedule, engines=reports)


def test_targets_are_over_what_the_schedule_allows(bench):
    comparison = _comparison(bench, {"ours, 1f1b": [9.135] * 3, "ours, zbv": [8.8] * 3})
    pipelined, without_bubble = bench.report.pipeline_targets(comparison, ["1f1b", "zbv"], 8)
    assert pipelined.value == pytest.approx(1.015)
    assert (pipelined.high, pipelined.verdict) == (1.02, "PASS")
    assert without_bubble.value == pytest.approx(1.1)
    assert (without_bubble.high, without_bubble.verdict) == (1.05, "FAIL")


def test_what_was_not_measured_is_not_met(bench):
    comparison = _comparison(bench, {"torch, gpipe": [9.0] * 3})
    (target,) = bench.report.pipeline_targets(comparison, ["gpipe"], 8)
    assert (target.value, target.verdict) == (None, "FAIL")
    lines = bench.report.theory_table(comparison, ["gpipe"], 8).splitlines()
    assert "1.000" in lines[-1]
    assert lines[-1].split()[-1] == "-"


@pytest.mark.parametrize(("arguments", "steps"), [([], 20), (["--quick"], 3), (["--steps", "70", "--quick"], 7)])
def test_steps(bench, arguments, steps):
    assert bench.script._schedule(bench.script._parser().parse_args(arguments)).steps == steps


@pytest.mark.slow
def test_the_whole_script():
    script = str(benchmark_ranks.BENCHMARKS / "pipeline" / "run.py")
    command = [sys.executable, script, "--size", "tiny", "--steps", "3", "--memory"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (
        "simulated bubbles",
        "steps over what the schedule allows",
        "live activations",
        "ours, zbv: step over",
    ):
        assert text in done.stdout, text
