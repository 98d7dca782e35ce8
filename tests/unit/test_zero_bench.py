"""The measuring code of benchmarks/zero: its engines on a tiny model, formulas, targets, and a run of the script."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import benchmark_ranks
import pytest
from harness import run_ranks

MIB = 2**20
STEPS = 4


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules under their names."""
    return SimpleNamespace(**benchmark_ranks.import_benchmark("zero"))


# The engines.


def test_the_baseline_comes_first_and_names_are_told_apart(bench):
    for precision in ("fp32", "bf16"):
        names = [engine.name for engine in bench.engines.engines_of("tiny", precision)]
        assert names[0] == bench.engines.BASELINE
        assert len(set(names)) == len(names)
        assert {"LowLevelZero 1", "LowLevelZero 2", "DeepSpeed 1", "DeepSpeed 2", "FSDP2"} <= set(names)
        assert (bench.engines.REDUNDANCY in names) == (precision == "fp32")


def test_engines_can_be_chosen_by_parts_of_their_names(bench):
    engines = bench.engines.engines_of("tiny", "fp32")
    chosen = [engine.name for engine in bench.script._chosen(engines, ["speed", "FSDP"])]
    assert chosen == ["torch DDP", "FSDP2", "DeepSpeed 1", "DeepSpeed 2"]
    assert bench.script._chosen(engines, None) == engines


def test_torchs_engines_train_as_the_baseline_does(bench):
    names = [bench.engines.BASELINE, bench.engines.FLOOR, bench.engines.REDUNDANCY, "FSDP2"]
    for losses in run_ranks(benchmark_ranks.train, 2, "zero", STEPS, "fp32", names=names):
        baseline = losses.pop(bench.engines.BASELINE)
        floor = losses.pop(bench.engines.FLOOR)
        assert floor[0] == baseline[0]
        assert floor[-1] != baseline[-1]  # it sees half of the data
        assert list(losses) == ["FSDP2", bench.engines.REDUNDANCY]
        for ours in losses.values():
            assert ours == pytest.approx(baseline, abs=1e-5)


PRECISIONS = pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 3e-2)])


@PRECISIONS
def test_ours_train_as_the_baseline_does(bench, precision, tolerance):
    names = [bench.engines.BASELINE, *map(bench.engines.our_name, bench.engines.STAGES)]
    for losses in run_ranks(benchmark_ranks.train, 2, "zero", STEPS, precision, names=names):
        baseline = losses.pop(bench.engines.BASELINE)
        assert len(losses) == 2
        for ours in losses.values():
            assert ours == pytest.approx(baseline, abs=tolerance)


@PRECISIONS
def test_the_plugin_trains_as_fsdp_manual(bench, precision, tolerance):
    names = [engine.name for engine in bench.fsdp.engines_of("tiny", precision)]
    assert len(set(names)) == len(names) == 6
    for losses in run_ranks(benchmark_ranks.train, 2, "zero", STEPS, precision, names=names, part="fsdp"):
        assert list(losses) == names
        baseline = losses[bench.fsdp.manual_name("FULL_SHARD")]
        for others in losses.values():
            assert others == pytest.approx(baseline, abs=tolerance)


def test_only_the_wrapper_tells_the_plugin_from_its_twin(bench):
    """Both gather and reduce the same units as often through the same collectives; FSDP2 alone uses its own."""
    manual = [bench.fsdp.manual_name("FULL_SHARD", has_our_collectives=has_ours) for has_ours in (False, True)]
    names = [*manual, bench.fsdp.plugin_name("FULL_SHARD")]
    for calls in run_ranks(benchmark_ranks.count_calls, 2, names, 2):
        own, twin, plugin = (calls[name] for name in names)
        assert not own
        assert plugin["all_gather"] == twin["all_gather"] > 0
        assert plugin["reduce_scatter"] == twin["reduce_scatter"] > 0


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_the_plugin_keeps_what_fsdp_manual_keeps(strategy):
    manual = run_ranks(benchmark_ranks.gathered_after_forward, 2, strategy, False)
    assert manual == run_ranks(benchmark_ranks.gathered_after_forward, 2, strategy, True)
    for names in manual:
        assert "head.weight" in names
        assert any(name.startswith("blocks.") for name in names) == (strategy == "SHARD_GRAD_OP")


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="it is installed")
def test_deepspeed_may_be_missing(bench):
    engines = {engine.name: engine for engine in bench.engines.engines_of("tiny", "fp32")}
    step, outcome = bench.engine.build_engine(engines[bench.engines.deepspeed_name(2)])
    assert step is None
    assert not bench.pair.EngineReport(name="DeepSpeed 2", outcome=outcome).has_failed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_probe_updates_nothing(precision):
    for first, second in run_ranks(benchmark_ranks.probe_gradients, 2, precision):
        assert first == second


# Memory.


def test_formulas_per_weight(bench):
    N, P = 100 * 2**20, 2
    formula = partial(bench.memory.formula_of, N=N, P=P)

    def per_weight(name, precision):
        parts = formula(name, precision)
        return parts.weights / N, parts.gradients / N, parts.states / N

    assert per_weight("torch DDP", "fp32") == (4, 4, 8)
    assert per_weight("ZeroRedundancyOptimizer", "fp32") == (4, 4, 4)
    assert per_weight("LowLevelZero 1", "fp32") == (4, 4, 4)
    assert per_weight("LowLevelZero 2", "fp32") == (4, 2, 4)
    assert per_weight("LowLevelZero 1", "bf16") == (2, 2, 6)
    assert per_weight("LowLevelZero 2", "bf16") == (2, 2, 6)
    assert formula("LowLevelZero 1", "fp32").buffers == 12 * MIB
    assert formula("LowLevelZero 2", "fp32").buffers == 36 * MIB
    assert formula("LowLevelZero 2", "bf16").buffers == 18 * MIB
    assert formula("DeepSpeed 1", "fp32").buffers == 4 * N
    assert formula("torch DDP", "bf16") is None
    assert formula("FSDP2", "fp32") is None
    for name in ("FSDP2 FULL_SHARD", "FSDP2 FULL_SHARD, our collectives", "TorchFSDPPlugin SHARD_GRAD_OP"):
        assert per_weight(name, "fp32") == per_weight(name, "bf16") == (2, 2, 4)
    assert formula("TorchFSDPPlugin FULL_SHARD", "fp32", U=1000).buffers == 4000
    assert formula("TorchFSDPPlugin FULL_SHARD", "bf16", U=1000).buffers == 2000
    assert formula("TorchFSDPPlugin SHARD_GRAD_OP", "fp32", U=1000).buffers == 4 * N


def test_buffers_are_no_larger_than_the_model(bench):
    assert bench.memory.formula_of("LowLevelZero 2", "fp32", 1000, 2).buffers == 6000


def test_the_largest_unit_of_fsdp(bench):
    tables = 2 * 256 * 32 + 32 * 32 + 2 * 32
    assert bench.memory.largest_unit("tiny") == tables
    assert bench.memory.largest_unit("350m") == 2 * 32768 * 1024 + 1024 * 1024 + 2 * 1024
    block = 12 * 2048**2 + 13 * 2048
    assert bench.memory.largest_unit("1.3b") == max(block, 2 * 32768 * 2048 + 1024 * 2048 + 2 * 2048)


@pytest.mark.parametrize(("size", "num_parameters"), [("10m", 10.5e6), ("50m", 50e6)])
def test_the_sizes_are_what_they_are_called(bench, size, num_parameters):
    assert bench.memory.num_parameters(size) == pytest.approx(num_parameters, rel=0.01)


# Ratios and targets.


def _comparison(bench, seconds, peak=None, missing=()):
    """A comparison of two ranks; the second one is never the slower one."""
    world, schedule = bench.pair.World(size=2), bench.pair.Schedule(steps=3)
    engines = [bench.pair.Engine(name=name, build=int) for name in (*seconds, *missing)]
    samples = [
        {
            name: bench.samples.Samples(seconds=[factor * one for one in values], losses=[1.0])
            for name, values in seconds.items()
        }
        for factor in (1.0, 0.5)
    ]
    outcomes = {**dict.fromkeys(seconds, "measured"), **dict.fromkeys(missing, "it broke")}
    memory = partial(bench.pair.Memory, after_build=1, build_peak=1, after_steps=1)
    memories = {name: memory(step_peak=peak) for name in seconds} if peak else {}
    reports = bench.pair.report_engines(engines, [(outcomes, one) for one in samples], memories)
    return bench.pair.Comparison(title="t", world=world, schedule=schedule, engines=reports, step_tokens=100)


SECONDS = {
    "torch DDP": [1.0, 2.0, 4.0],
    "torch DDP (control)": [1.0, 2.0, 4.0],
    "DeepSpeed 1": [2.0, 4.0, 4.0],
    "ZeroRedundancyOptimizer": [1.0, 1.0, 1.0],
    "LowLevelZero 1": [0.5, 1.0, 3.0],
}


def test_ratios_are_paired_with_every_engine(bench):
    comparison = _comparison(bench, SECONDS)
    assert comparison.ratio("LowLevelZero 1", "torch DDP").median == 0.5
    over = comparison.ratio("LowLevelZero 1", "DeepSpeed 1")
    assert (over.low, over.median, over.high) == (0.25, 0.25, 0.75)
    assert comparison.ratio("torch DDP", "LowLevelZero 1").median == 2.0
    assert comparison.ratio("LowLevelZero 1", "FSDP2") is None
    assert comparison.ratio("FSDP2", "LowLevelZero 1") is None
    assert comparison.engine("LowLevelZero 1").figures.ratio == comparison.ratio("LowLevelZero 1", "torch DDP")


def test_tokens_per_second_are_in_the_table(bench):
    lines = _comparison(bench, SECONDS, missing=["LowLevelZero 2"]).table().splitlines()
    assert lines[1].split()[-1] == "tokens/s"
    cells = {line.rsplit(maxsplit=1)[0].partition("  ")[0]: line.split()[-1] for line in lines[2:8]}
    assert cells["torch DDP"] == "50"
    assert cells["LowLevelZero 1"] == "100"
    assert cells["LowLevelZero 2"] == "-"


def test_targets_over_the_peers_that_were_measured(bench):
    comparison = _comparison(bench, SECONDS)
    targets = {
        target.what: (target.value, target.high, target.verdict)
        for target in bench.targets.speed_targets(comparison, "10m", "fp32")
    }
    assert targets == {
        "LowLevelZero 1 over torch DDP, t": (0.5, 1.0, "PASS"),
        "LowLevelZero 1 over DeepSpeed 1, t": (0.25, 0.8, "PASS"),
        "LowLevelZero 1 over ZeroRedundancyOptimizer, t": (1.0, 0.95, "NOISY"),
    }
    assert [target.what for target in bench.targets.speed_targets(comparison, "10m", "bf16")] == [
        "LowLevelZero 1 over torch DDP, t"
    ]
    larger = [bench.targets.speed_targets(comparison, "50m", precision)[0] for precision in ("fp32", "bf16")]
    assert [target.high for target in larger] == [0.95, 0.85]


FSDP_SECONDS = {
    "FSDP2 FULL_SHARD": [1.0, 1.0, 1.0],
    "FSDP2 FULL_SHARD (control)": [1.0, 1.0, 1.0],
    "FSDP2 SHARD_GRAD_OP": [1.0, 1.0, 1.0],
    "FSDP2 FULL_SHARD, our collectives": [0.5, 0.5, 0.5],
    "TorchFSDPPlugin FULL_SHARD": [0.51, 0.51, 0.52],
    "TorchFSDPPlugin SHARD_GRAD_OP": [1.0, 1.03, 1.1],
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_targets_of_the_plugin_over_its_twins(bench, precision):
    comparison = _comparison(bench, FSDP_SECONDS)
    targets = bench.targets.wrapper_targets(comparison, "10m", precision)
    assert {target.what: (target.value, target.verdict, target.interval) for target in targets} == {
        "TorchFSDPPlugin FULL_SHARD over FSDP2 FULL_SHARD, t": (0.51, "PASS", (0.51, 0.52)),
        "TorchFSDPPlugin FULL_SHARD over FSDP2 FULL_SHARD, our collectives, t": (1.02, "PASS", (1.02, 1.04)),
        "TorchFSDPPlugin SHARD_GRAD_OP over FSDP2 SHARD_GRAD_OP, t": (1.03, "NOISY", (1.0, 1.1)),
    }
    assert {target.high for target in targets} == {1.02}
    larger = bench.targets.wrapper_targets(comparison, "50m", precision)
    assert [target.high for target in larger] == [0.75, 1.02, 0.75]


def test_a_plugin_that_could_not_be_built_misses_its_targets(bench):
    seconds = {name: values for name, values in FSDP_SECONDS.items() if not name.startswith("Torch")}
    comparison = _comparison(bench, seconds, missing=["TorchFSDPPlugin FULL_SHARD"])
    assert [target.verdict for target in bench.targets.wrapper_targets(comparison, "10m", "fp32")] == ["FAIL", "FAIL"]


def test_a_stage_that_could_not_be_built_misses_its_targets(bench):
    comparison = _comparison(bench, SECONDS, missing=["LowLevelZero 2", "DeepSpeed 2"])
    targets = [
        target for target in bench.targets.speed_targets(comparison, "10m", "fp32") if "LowLevelZero 2" in target.what
    ]
    assert [(target.what, target.verdict) for target in targets] == [
        ("LowLevelZero 2 over torch DDP, t", "FAIL"),
        ("LowLevelZero 2 over ZeroRedundancyOptimizer, t", "FAIL"),
    ]
    (target, _) = bench.targets.memory_targets(comparison, [])
    assert target.verdict == "FAIL"


def test_memory_is_compared_with_the_formula(bench):
    N, activations = bench.memory.num_parameters("tiny"), 5 * MIB
    formula = bench.memory.formula_of("LowLevelZero 1", "fp32", N, 2)
    comparison = _comparison(bench, SECONDS, peak=2 * (formula.total + activations))
    rows = bench.memory.memory_rows(comparison, "tiny", "fp32", activations)
    assert [row.name for row in rows] == [name for name in SECONDS if name != "torch DDP (control)"]
    (target,) = bench.targets.memory_targets(comparison, rows)
    assert (target.value, target.verdict) == (2.0, "FAIL")
    assert "with 5.0 of activations" in bench.memory.format_memory(rows)
    assert "2.000" in bench.memory.format_memory(rows)
    assert json.loads(json.dumps([asdict(row) for row in rows]))[0]["name"] == "torch DDP"


# The script.


def test_an_engine_that_does_not_exist_is_refused(bench, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.script.main(["--engines", "zero", "megatron"])
    assert "no engine has one of these in its name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "titles"),
    [
        ([], ["", ", FSDP2"]),
        (["--part", "fsdp"], [", FSDP2"]),
        (["--engines", "speed"], [""]),
        (["--engines", "TorchFSDP"], [", FSDP2"]),
        (["--engines", "fsdp2"], ["", ", FSDP2"]),
    ],
)
def test_parts_that_were_asked_for(bench, arguments, titles):
    options = bench.script._parser().parse_args(arguments)
    assert [part.title for part in bench.script._parts(options)] == titles


def test_an_engine_of_another_part_is_refused(bench, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.script.main(["--part", "fsdp", "--engines", "DeepSpeed"])
    assert "no engine has one of these in its name" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "steps"), [([], 30), (["--quick"], 3), (["--steps", "70", "--quick"], 7)])
def test_steps(bench, arguments, steps):
    options = bench.script._parser().parse_args(arguments)
    assert bench.script._schedule("50m", options).steps == steps


def _run_script(*arguments):
    command = [sys.executable, str(benchmark_ranks.BENCHMARKS / "zero" / "run.py"), "--size", "tiny", "--steps", "3"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_whole_script():
    output = _run_script("--memory", "--only", "fp32", "--part", "stages")
    assert "LowLevelZero 2 over ZeroRedundancyOptimizer, tiny GPT in fp32" in output
    assert "peak memory of LowLevelZero 2 over its formula" in output


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--memory"], ["--no-shared-memory"]])
def test_the_whole_script_over_fsdp(options):
    output = _run_script("--part", "fsdp", *options)
    for precision in ("fp32", "bf16"):
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            twin = f"FSDP2 {strategy}"
            for over in (twin, f"{twin}, our collectives"):
                assert f"TorchFSDPPlugin {strategy} over {over}, tiny GPT in {precision}" in output
