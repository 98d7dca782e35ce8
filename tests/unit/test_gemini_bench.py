"""The measuring code of benchmarks/gemini: engines, formulas, targets, limits of memory, and the search under them."""

from __future__ import annotations

import json
import random
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
SCRIPT = benchmark_ranks.BENCHMARKS / "gemini" / "run.py"


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules under their names."""
    return SimpleNamespace(**benchmark_ranks.import_benchmark("gemini"))


# The engines.


def test_the_baseline_comes_first_and_all_peers_are_there(bench, tmp_path):
    for precision in ("fp32", "bf16"):
        names = [engine.name for engine in bench.engines.engines_of("tiny", precision, 1, tmp_path)]
        assert names[:3] == ["torch DDP", "no communication", "FSDP2"]
        assert names[3] == "DeepSpeed 3"
        assert names[4:] == list(bench.engines.GEMINI)


def test_engines_can_be_chosen_by_parts_of_their_names(bench, tmp_path):
    engines = bench.engines.engines_of("tiny", "fp32", 1, tmp_path)
    chosen = [engine.name for engine in bench.script._chosen(engines, ["kept", "FSDP"])]
    assert chosen == ["torch DDP", "FSDP2", "Gemini kept gathered"]
    assert bench.script._chosen(engines, None) == engines


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="it is installed")
def test_deepspeed_may_be_missing(bench, tmp_path):
    engines = {engine.name: engine for engine in bench.engines.engines_of("tiny", "fp32", 1, tmp_path)}
    step, outcome = bench.engine.build_engine(engines[bench.engines.DEEPSPEED])
    assert step is None
    assert not bench.pair.EngineReport(name="DeepSpeed 3", outcome=outcome).has_failed


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-5), pytest.param("bf16", 3e-2, marks=pytest.mark.slow)]
)
def test_every_placement_trains_as_the_baseline_does(bench, precision, tolerance):
    names = [bench.engines.BASELINE, bench.engines.FSDP, *bench.engines.GEMINI]
    for losses in run_ranks(benchmark_ranks.train_gemini, 2, precision, names, STEPS, timeout=180):
        baseline = losses.pop(bench.engines.BASELINE)
        assert set(losses) == set(names[1:])
        for ours in losses.values():
            assert ours == pytest.approx(baseline, abs=tolerance)


# Memory.


def test_formulas_per_weight(bench):
    N, P, payload = 100 * MIB, 2, MIB
    formula = partial(bench.memory.formula_of, N=N, P=P, payload=payload)

    def per_weight(name, precision):
        parts = formula(name, precision)
        return parts.weights / N, parts.gradients / N, parts.states / N

    assert per_weight("torch DDP", "fp32") == (4, 4, 8)
    assert per_weight("Gemini static", "fp32") == (2, 2, 4)
    assert per_weight("Gemini static", "bf16") == (1, 1, 6)
    assert per_weight("Gemini kept gathered", "fp32") == (4, 2, 4)
    assert formula("Gemini static", "fp32").buffers == 2 * 4 * payload
    assert formula("Gemini prefetch 1", "fp32").buffers == 3 * 4 * payload
    assert formula("Gemini kept gathered", "fp32").buffers == 4 * payload
    for name in (bench.engines.ALL_ON_DISK, bench.engines.STATES_ON_DISK, "FSDP2", "DeepSpeed 3"):
        assert formula(name, "fp32") is None


def test_a_payload_holds_the_largest_parameter(bench):
    assert bench.memory.payload_elements("50m", 2) == 8192 * 640
    assert bench.memory.payload_elements("50m", 8) == 8 * MIB


# Targets.


def _comparison(bench, seconds, peaks=None, missing=()):
    world, schedule = bench.pair.World(size=2), bench.pair.Schedule(steps=3)
    engines = [bench.pair.Engine(name=name, build=int) for name in (*seconds, *missing)]
    samples = {name: bench.samples.Samples(seconds=values, losses=[1.0]) for name, values in seconds.items()}
    outcomes = {**dict.fromkeys(seconds, "measured"), **dict.fromkeys(missing, "it broke")}
    memory = partial(bench.pair.Memory, after_build=1, build_peak=1, after_steps=1)
    memories = {name: memory(step_peak=peak) for name, peak in (peaks or {}).items()}
    reports = bench.pair.report_engines(engines, [(outcomes, samples)] * 2, memories)
    return bench.pair.Comparison(title="t", world=world, schedule=schedule, engines=reports)


SECONDS = {
    "torch DDP": [1.0, 2.0, 4.0],
    "torch DDP (control)": [1.0, 2.0, 4.0],
    "FSDP2": [2.0, 2.0, 4.0],
    "Gemini static": [1.1, 2.2, 4.4],
    "Gemini kept gathered": [1.2, 2.4, 4.8],
}


def test_targets_over_the_peers_that_were_measured(bench):
    targets = bench.targets.speed_targets(_comparison(bench, SECONDS), "fp32")
    assert {target.what: (target.high, target.verdict) for target in targets} == {
        "Gemini static over torch DDP, t": (0.97, "FAIL"),
        "Gemini static over FSDP2, t": (0.85, "NOISY"),
        "Gemini kept gathered over torch DDP, t": (1.02, "FAIL"),
    }
    assert bench.targets.speed_targets(_comparison(bench, SECONDS), "bf16") == []


def test_a_placement_that_could_not_be_built_misses_its_targets(bench):
    comparison = _comparison(bench, SECONDS, missing=[bench.engines.STATES_ON_DISK, "DeepSpeed 3"])
    targets = {target.what: target.verdict for target in bench.targets.speed_targets(comparison, "fp32")}
    assert targets[f"{bench.engines.STATES_ON_DISK} over torch DDP, t"] == "FAIL"
    assert not any("DeepSpeed" in what for what in targets)


def test_memory_is_compared_with_formula_and_fsdp(bench):
    formula = bench.memory.formula_of("Gemini static", "fp32", 42720, 2, 42720)
    expected = formula.total + 5 * MIB
    comparison = _comparison(bench, SECONDS, peaks={"Gemini static": 2 * expected, "FSDP2": 4 * expected})
    rows = bench.memory.memory_rows(comparison, "tiny", "fp32", 5 * MIB, 2)
    assert [row.name for row in rows] == ["Gemini static"]
    over_formula, over_fsdp = bench.targets.memory_targets(comparison, rows)
    assert (over_formula.value, over_formula.verdict) == (pytest.approx(2.0, rel=0.01), "FAIL")
    assert (over_fsdp.value, over_fsdp.verdict) == (0.5, "PASS")
    assert [target.verdict for target in bench.targets.memory_targets(_comparison(bench, SECONDS), [])] == [
        "FAIL",
        "FAIL",
    ]


def test_the_target_of_the_largest_model(bench):
    target = partial(bench.targets.largest_target, limit_bytes=700 * MIB)
    assert target(800, 100).verdict == "PASS"
    assert target(799, 100).verdict == "FAIL"
    assert target(None, 100).verdict == "FAIL"
    assert "700 MiB a process" in target(800, 100).what


# The search.


def test_the_search_finds_the_threshold():
    search_largest = benchmark_ranks.import_benchmark("gemini")["search"].search_largest
    generator = random.Random(7)
    for _ in range(400):
        threshold, most = generator.randrange(0, 500), generator.randrange(1, 500)
        tolerance, growth = generator.choice([0.0, 0.08, 0.5]), generator.choice([1.01, 1.5, 2.0])
        tried: list[int] = []

        def works(number, threshold=threshold, tried=tried):
            tried.append(number)
            return number <= threshold

        found = search_largest(
            works,
            first=generator.randrange(1, 600),
            most=most,
            growth=growth,
            tolerance=tolerance,
            may_go_on=lambda: True,
        )
        assert found.is_narrowed
        assert len(set(tried)) == len(tried)
        assert all(1 <= number <= most for number in tried)
        assert found.largest <= threshold
        if found.too_large is None:
            assert found.largest == most
        else:
            assert threshold < found.too_large <= max(found.largest + 1, found.largest * (1 + tolerance))


def test_a_search_ends_when_it_may_not_go_on(bench):
    answers = iter([True, True, False])
    arguments = {"first": 4, "most": 100, "growth": 2.0, "tolerance": 0.0, "may_go_on": lambda: next(answers)}
    found = bench.search.search_largest(lambda number: number < 6, **arguments)
    assert (found.largest, found.too_large, found.is_narrowed) == (4, 8, False)


# The limit.


@pytest.mark.slow
def test_a_confined_process_gets_no_more_and_can_say_so(bench):
    sys.path.insert(0, str(benchmark_ranks.BENCHMARKS))
    try:
        arguments = (benchmark_ranks.allocate_confined, bench.pair.World(), 600 * MIB, 700 * MIB)
        ((said, num_bytes, peak),) = bench.pair.on_ranks(*arguments)
    finally:
        sys.path.remove(str(benchmark_ranks.BENCHMARKS))
    assert bench.limit.lacked_memory(said)
    assert num_bytes == 700 * MIB
    assert peak > 700 * MIB


@pytest.mark.parametrize(
    ("message", "lacked"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes", True),
        ("rank 1 ended with exit code -9 before it had a result", True),
        ("torch.OutOfMemoryError: CUDA out of memory", True),
        ("terminate called after throwing an instance of 'std::bad_alloc'", True),
        ("ImportError: cannot import name 'GeminiPlugin'", False),
        ("the loss of step 1 is nan", False),
        ("rank 1 ended with exit code 1 before it had a result", False),
    ],
)
def test_too_little_memory_is_told_from_other_errors(bench, message, lacked):
    assert bench.limit.lacked_memory(message) == lacked


@pytest.mark.parametrize(("limit", "swap"), [("memory.max", "memory.swap.max"), ("memory.limit_in_bytes", None)])
def test_groups_of_both_versions(bench, tmp_path, limit, swap):
    assert not bench.limit.is_memory_group(tmp_path)
    for name in filter(None, (limit, swap, "cgroup.procs")):
        (tmp_path / name).write_text("max")
    assert bench.limit.is_memory_group(tmp_path)
    bench.limit._limit(tmp_path, 5 * MIB)
    assert (tmp_path / limit).read_text() == str(5 * MIB)
    assert swap is None or (tmp_path / swap).read_text() == "0"


def test_groups_are_removed(bench, tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(bench.limit, "_limit", lambda group, limit_bytes: limits.append((group.is_dir(), limit_bytes)))
    with bench.limit.memory_groups(tmp_path, 2, MIB) as groups:
        assert sorted(groups) == sorted(tmp_path.iterdir())
    assert limits == [(True, MIB)] * 2
    assert not list(tmp_path.iterdir())
    with bench.limit.memory_groups(None, 3, MIB) as groups:
        assert groups == [None] * 3


# The largest model.


def test_weights_are_counted_by_layer(bench):
    shape = bench.systems.shape_of(64, 5)
    assert shape.heads == 1
    weights = sum(parameter.numel() for parameter in bench.gpt.make_gpt(shape).parameters())
    assert bench.systems.num_parameters(shape) == weights
    assert bench.largest._layers_of(weights, 64) == 5
    assert bench.largest._layers_of(weights - 1, 64) == 4
    assert bench.largest._layers_of(0, 64) == 1


@pytest.mark.slow
def test_systems_train(bench):
    names = [system.name for system in bench.systems.SYSTEMS]
    assert names == ["torch DDP", "FSDP2", bench.systems.OURS]
    for losses in run_ranks(benchmark_ranks.train_systems, 2, names, 2, timeout=120):
        assert list(losses) == names
        for loss in losses.values():  # about that of a guess among all tokens, ln 8192
            assert loss == pytest.approx(9.01, abs=0.5)


def _conditions(bench, tmp_path, seconds=1000.0):
    arguments = {"limit_bytes": 2048 * MIB, "width": 64, "directory": tmp_path, "cgroup": None, "seconds": seconds}
    return bench.largest.Conditions(world=bench.pair.World(size=2, timeout_seconds=100.0), **arguments)


def _pretend(bench, monkeypatch, capacities, message="out of memory"):
    """Lets systems train as many layers as their capacity says; returns the layers that were tried with a limit."""
    tried = []

    def train(system, conditions, layers, limit_bytes, seconds):
        if limit_bytes is not None:
            tried.append((system.name, layers))
            if layers > capacities[system.name]:
                raise bench.pair.RankError(message)
        peak = layers * MIB
        return [bench.systems.Trained(peak_bytes=peak, build_seconds=1.0, step_seconds=2.0, loss=9.0)] * 2

    monkeypatch.setattr(bench.largest, "_train", train)
    return tried


def test_the_largest_models_are_found(bench, tmp_path, monkeypatch):
    capacities = {"torch DDP": 100, "FSDP2": 1, bench.systems.OURS: 1500}
    tried = _pretend(bench, monkeypatch, capacities)
    conditions = _conditions(bench, tmp_path)
    records = list(bench.largest.measure_largest(conditions))
    for record in records:
        capacity = capacities[record.name]
        assert record.found.is_narrowed
        assert capacity / 1.08 - 1 <= record.found.largest <= capacity
        assert record.largest.layers == record.found.largest
    largest = dict(zip(capacities, map(bench.largest.weights_of, records), strict=True))
    first = next(layers for name, layers in tried if name == bench.systems.OURS)
    reached = bench.systems.num_parameters(bench.systems.shape_of(64, first))
    assert 8 * largest["torch DDP"] < reached < 8.1 * largest["torch DDP"]  # ours begins at the target
    table = bench.largest.format_records(records, conditions)
    assert "by RLIMIT_DATA, and private and shared memory" in table
    assert "does not fit" in table
    assert json.loads(json.dumps([asdict(record) for record in records]))[0]["name"] == "torch DDP"


def test_an_error_that_memory_does_not_explain_is_reported(bench, tmp_path, monkeypatch):
    _pretend(bench, monkeypatch, {"torch DDP": 0, "FSDP2": 0, bench.systems.OURS: 0}, "the loss of step 0 is nan")
    conditions = _conditions(bench, tmp_path)
    records = list(bench.largest.measure_largest(conditions))
    assert [record.error for record in records] == ["the loss of step 0 is nan"] * 3
    assert [bench.largest.weights_of(record) for record in records] == [None] * 3
    assert "FSDP2 FAILED: the loss of step 0 is nan" in bench.largest.format_records(records, conditions)


def test_a_model_that_is_too_slow_is_told_from_one_that_is_too_large(bench, tmp_path, monkeypatch):
    message = "ranks [0] of 2 gave no result within 100 s"
    _pretend(bench, monkeypatch, {"torch DDP": 50, "FSDP2": 50, bench.systems.OURS: 50}, message)
    conditions = _conditions(bench, tmp_path)
    records = list(bench.largest.measure_largest(conditions))
    assert {one.outcome for record in records for one in record.tries} == {"fits", "not done in time"}
    assert ": not done in time" in bench.largest.format_records(records, conditions).splitlines()[-1]


def test_a_search_without_time_says_so(bench, tmp_path, monkeypatch):
    _pretend(bench, monkeypatch, {"torch DDP": 50, "FSDP2": 50, bench.systems.OURS: 50})
    conditions = _conditions(bench, tmp_path, seconds=0.0)
    records = list(bench.largest.measure_largest(conditions))
    assert all(record.largest is None and not record.tries for record in records)
    assert "torch DDP: nothing was trained" in bench.largest.format_records(records, conditions)


# The script.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engines", "gemini", "megatron"], "no engine has one of these in its name"),
        (["--largest", "--engines", "DeepSpeed"], "no engine has one of these in its name"),
        (["--cgroup", "/"], "not a memory cgroup"),
        (["--directory", "/dev/shm"], "lies in memory"),
        (["--directory", "/nowhere"], "is not a directory"),
        (["--limit-mib", "0"], "0 is not positive"),
    ],
)
def test_options_that_cannot_work_are_refused(bench, capsys, arguments, said):
    with pytest.raises(SystemExit, match="2"):
        bench.script.main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "steps"), [([], 20), (["--quick"], 3), (["--steps", "70", "--quick"], 7)])
def test_steps(bench, arguments, steps):
    options = bench.script._parser().parse_args(arguments)
    assert bench.script._schedule(options).steps == steps


def _run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.slow
def test_the_whole_script(tmp_path):
    done = _run("--size", "tiny", "--steps", "3", "--memory", "--directory", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Gemini static over FSDP2, tiny GPT in fp32" in done.stdout
    assert "peak memory of Gemini static over its formula" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_largest_model_under_a_small_limit(tmp_path):
    arguments = ("--limit-mib", "700", "--width", "256", "--seconds", "240", "--directory", str(tmp_path))
    done = _run("--largest", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest GPT with Gemini over torch DDP's, 700 MiB a process" in done.stdout
    assert "does not fit" in done.stdout
    assert not list(tmp_path.iterdir())
