"""The GPU suite's parts that need no GPU; the whole of it on the CPU, as a dry run, is marked slow."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_suite.py"


@pytest.fixture(scope="module")
def suite():
    """The benchmark modules under their names; both folders are on the path while a test of this file runs."""
    before = list(sys.path)
    sys.path.insert(0, str(SCRIPT.parent))
    harness = ("_harness.gpt", "_harness.pair", "_harness.samples")
    names = ("gpu_suite", "gpu.cases", "gpu.large", "gpu.large_engines", "gpu.measure", *harness)
    yield SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(name) for name in names})
    sys.path[:] = before


def run_script(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)


def test_the_time_is_shared_by_what_is_left(suite):
    budget = suite.gpu_suite.Budget(deadline=100.0)
    assert budget.share(4, now=60.0) == 10.0
    assert budget.share(1, now=60.0) == 40.0
    assert budget.share(3, now=101.0) == 0.0


def test_the_model_fits_the_memory(suite):
    choose = suite.gpu_suite.choose_size
    assert choose(140 * 2**30, is_tiny=False) == "350m"
    assert choose(24 * 2**30, is_tiny=False) == "125m"
    assert choose(8 * 2**30, is_tiny=False) == "50m"
    assert choose(2**30, is_tiny=False) == "10m"
    assert choose(140 * 2**30, is_tiny=True) == "tiny"


def test_every_required_case_is_there_once(suite):
    names = [case.name for case in suite.cases.CASES]
    assert len(names) == len(set(names))
    required = {"fp32", "bf16", "fp16", "fp16_naive", "fp16_apex O1", "fp16_apex O2", "fp8", "torch_ddp bf16"}
    required |= {"low_level_zero 1 fp32", "low_level_zero 1 bf16", "low_level_zero 2 bf16", "low_level_zero 2 fp16"}
    required |= {"torch_fsdp FULL_SHARD fp32", "torch_fsdp FULL_SHARD bf16", "torch_fsdp SHARD_GRAD_OP bf16"}
    required |= {"gemini static fp32", "gemini static bf16", "gemini auto bf16", "gemini cpu bf16"}
    assert required <= set(names)
    assert suite.cases.case_named("fp8").name == "fp8"


def test_figures_of_an_engine(suite):
    size = suite.gpt.SIZES["tiny"]
    samples = suite.samples.Samples(seconds=[1.0, 1.0, 1.0], losses=[2.0, 2.0, 2.0])
    engine = suite.pair.Engine(name="plain", build=int)
    (report,) = suite.pair.report_engines([engine], [({"plain": "measured"}, {"plain": samples})], {})
    figures = suite.measure.engine_figures(report, size, ceiling_tflops=1e-3)
    tflops = suite.gpt.step_flops(size) / 1e12
    assert figures["tflops"] == pytest.approx(tflops)
    assert figures["mfu"] == pytest.approx(tflops / 1e-3)
    assert figures["last_loss"] == 2.0


def test_failures_reach_table_and_exit_code(suite):
    broken = {"name": "booster", "outcome": "it broke", "has_failed": True}
    cases = [{"name": "fp32", "engines": [broken]}, {"name": "bf16", "error": "rank 0 failed"}]
    lines = suite.gpu_suite.format_cases(cases)
    assert "fp32, booster FAILED: it broke" in lines
    assert "bf16 FAILED: rank 0 failed" in lines
    assert suite.gpu_suite.exit_code({"tests": {}, "cases": cases}) == 1
    assert suite.gpu_suite.exit_code({"tests": {"a": {"exit_code": 0}, "b": {"exit_code": 1}}, "cases": []}) == 1
    assert suite.gpu_suite.exit_code({"tests": {"a": {"exit_code": None}}, "cases": []}) == 1
    assert suite.gpu_suite.exit_code({"tests": {"a": {"exit_code": 0}}, "cases": []}) == 0


def test_every_file_of_gpu_tests_is_run_once_and_some_under_the_sanitizer(suite):
    *plain, sanitized = suite.gpu_suite.TEST_RUNS
    assert sanitized.environment == {"TORCH_CUDA_SANITIZER": "1"}
    collected = []
    for test_run in plain:
        ignored = [one.removeprefix("--ignore=") for one in test_run.arguments if one.startswith("--ignore=")]
        paths = [ROOT / one for one in test_run.arguments if not one.startswith("-")]
        files = [file for path in paths for file in (path.glob("test_*.py") if path.is_dir() else [path])]
        collected += [file for file in files if file.relative_to(ROOT).as_posix() not in ignored]
    assert sorted(collected) == sorted((ROOT / "tests" / "gpu").glob("test_*.py"))


@pytest.mark.slow
def test_a_run_of_tests_that_takes_too_long_is_ended_with_its_processes(suite, monkeypatch, tmp_path, capsys):
    (tmp_path / "test_slow.py").write_text(
        "import pathlib, pytest, subprocess, sys, time\n"
        "@pytest.mark.gpu\n"
        "def test_slow():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    pathlib.Path(__file__).with_name('pid').write_text(str(child.pid))\n"
        "    time.sleep(600)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
    monkeypatch.setattr(suite.gpu_suite, "ROOT", tmp_path)
    slow = suite.gpu_suite.PytestRun(name="slow", arguments=["test_slow.py"])
    result = suite.gpu_suite.run_tests(slow, 10.0)
    assert result["exit_code"] is None
    assert capsys.readouterr().out.endswith("tests of slow: not done after 10 s\n")
    deadline = time.monotonic() + 30
    child = Path("/proc") / (tmp_path / "pid").read_text()
    while child.exists() and "zombie" not in (child / "status").read_text():
        assert time.monotonic() < deadline


# Large models.


def test_every_way_to_train_a_large_model_is_there_once(suite):
    names = [engine.name for engine in suite.large_engines.LARGE]
    assert names[:3] == ["plain torch", "FSDP2", "FSDP2, CPU offload"]
    assert {
        "LowLevelZero 2",
        "TorchFSDPPlugin",
        "TorchFSDPPlugin, CPU offload",
        "Gemini static",
        "Gemini auto",
        "Gemini cpu",
    } <= set(names)
    assert len(set(names)) == len(names)
    assert suite.large_engines.large_engine("Gemini cpu").name == "Gemini cpu"
    fractions = [
        engine.build.keywords["arguments"].get("offload_optim_frac", 0.0)
        for engine in suite.large_engines.LARGE
        if engine.name.startswith("Gemini static")
    ]
    assert set(fractions) == {0.0, 0.5, 1.0}


def test_the_ladder_climbs(suite):
    weights = [suite.large.num_parameters(size) for size in suite.large_engines.LADDER]
    assert weights == sorted(weights)
    assert weights[0] == pytest.approx(1.3e9, rel=0.1)
    assert weights[-1] > 20e9
    assert all(size.width % size.heads == 0 for size in suite.large_engines.LADDER)


def test_the_physical_limit_of_the_memory(suite):
    engines = {engine.name: engine for engine in suite.large_engines.LARGE}
    assert engines["FSDP2"].limit(160.0, 1.0) == 10.0
    assert engines["FSDP2, CPU offload"].limit(1.0, 160.0) == 10.0
    assert engines["Gemini static, all states"].limit(40.0, 60.0) == 5.0
    assert engines["Gemini static, all states"].host_needed(5, 40.0) == 60.0
    auto = engines["Gemini auto"]
    assert auto.limit(80.0, 80.0) == 10.0
    assert (auto.host_needed(10, 80.0), auto.host_needed(1, 80.0)) == (80.0, 0.0)


def _large_models(suite, monkeypatch, capacity, part, message="out of memory", seconds=1000.0, names=None):
    """Measures a part in a world in which models of up to so many layers can be trained."""
    tried = []

    def on_ranks(function, world, name, size, kind, preload):
        tried.append((name, size.layers))
        if size.layers > capacity:
            raise suite.pair.RankError(message)
        memory = {"build_device_bytes": 2**20, "peak_device_bytes": 2**20, "peak_host_bytes": None}
        return [suite.large.Run(seconds=[1.0, 2.0], loss=9.0, **memory)]

    monkeypatch.setattr(suite.large, "on_ranks", on_ranks)
    device = suite.measure.Device(name="d", free_bytes=2**40, ceiling_tflops=1.0, ceiling_side=8)
    deadline = time.time() + seconds
    return suite.large.measure_large(part, "cpu", deadline, device, is_tiny=True, names=names), tried


def test_large_models_are_measured_in_two_interleaved_rounds(suite, monkeypatch):
    engines, tried = _large_models(suite, monkeypatch, 4, "large")
    names = [engine.name for engine in suite.large_engines.LARGE]
    assert [name for name, _ in tried] == [*names, *names[::-1]]
    assert [engine["name"] for engine in engines] == names
    assert all(len(engine["runs"]) == 2 and engine["seconds"]["median"] == 1.5 for engine in engines)
    assert json.loads(json.dumps(engines)) == engines
    assert not any(map(suite.large.large_has_failed, engines))


def test_large_models_can_be_chosen_by_parts_of_their_names(suite, monkeypatch):
    engines, _ = _large_models(suite, monkeypatch, 4, "large", names=["plain", "AUTO"])
    assert [engine["name"] for engine in engines] == ["plain torch", "Gemini auto"]


def test_the_largest_model_of_the_ladder_is_found(suite, monkeypatch):
    engines, tried = _large_models(suite, monkeypatch, 3, "largest")
    climbers = [engine.name for engine in suite.large_engines.LARGE if engine.climbs]
    assert [engine["name"] for engine in engines] == climbers
    assert [layers for name, layers in tried if name == climbers[0]] == [4, 2]  # the limit says that both would fit
    for engine in engines:
        assert engine["size"]["layers"] == 2
        assert [one["outcome"] for one in engine["tried"]] == ["does not fit", "fits"]
    lines = suite.large.format_large(engines)
    assert any(line.startswith(climbers[0]) and line.endswith("does not fit") for line in lines)


def test_errors_of_large_models_fail_the_suite(suite, monkeypatch):
    for part in suite.large.PARTS:
        engines, _ = _large_models(suite, monkeypatch, 0, part, "it broke")
        assert all(map(suite.large.large_has_failed, engines))
        assert suite.gpu_suite.exit_code({"tests": {}, "cases": [], "large": engines}) == 1
        too_large, _ = _large_models(suite, monkeypatch, 0, part)
        assert suite.gpu_suite.exit_code({"tests": {}, "cases": [], "large": too_large}) == 0


def test_large_models_without_time_are_told_so(suite, monkeypatch):
    for part in suite.large.PARTS:
        engines, tried = _large_models(suite, monkeypatch, 4, part, seconds=-1.0)
        assert not tried
        assert all(engine["outcome"] == "no time was left" for engine in engines)


@pytest.mark.parametrize("name", ["fp32", "fp16_naive"])
def test_plain_torch_and_the_booster_train_alike(suite, name):
    engines = suite.cases.case_named(name).engines(suite.gpt.SIZES["tiny"], torch.device("cpu"))
    plain, boosted = ([float(step(index)) for index in range(3)] for step in (engine.build() for engine in engines))
    assert plain[0] > plain[2] > 0
    # The same arithmetic in the same formats; fp16 rounds at 1e-3.
    assert boosted == pytest.approx(plain, rel=1e-6 if name == "fp32" else 2e-3)


def test_without_a_gpu_it_says_so_and_succeeds():
    done = run_script()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no GPU: nothing to run")


def test_gpu_tests_live_where_the_suite_looks_for_them():
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()}
    strays = {path for path in marked if path.parent.name != "gpu" and path != Path(__file__)}
    assert marked - {Path(__file__)}
    assert not strays


@pytest.mark.slow
def test_dry_run_on_the_cpu(suite, tmp_path):
    done = run_script("--device", "cpu", "--tiny", "--seconds", "20", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DRY RUN on the CPU" in done.stdout
    (path,) = tmp_path.glob("gpu-cpu-*.json")
    document = json.loads(path.read_text())
    assert document["is_dry_run"]
    assert [one["exit_code"] for one in document["tests"].values()] == [0]
    assert document["versions"]["torch"] == torch.__version__
    assert [case["name"] for case in document["cases"]] == [case.name for case in suite.cases.CASES]
    for case in document["cases"]:
        names = [engine["name"] for engine in case["engines"]]
        assert names == ["plain torch", "plain torch (control)", "booster"]
        assert all(engine["num_steps"] >= 3 for engine in case["engines"])
        assert case["engines"][1]["largest_loss_difference"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("part", ["large", "largest"])
def test_dry_run_of_large_models_on_the_cpu(suite, tmp_path, part):
    done = run_script("--device", "cpu", "--tiny", "--part", part, "--seconds", "280", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob(f"gpu-{part}-cpu-*.json")
    engines = json.loads(path.read_text())["large"]
    assert all(engine["outcome"] == "fits" for engine in engines)
    assert all(engine["seconds"]["median"] > 0 for engine in engines)


def test_arguments(suite):
    options = suite.gpu_suite._parser().parse_args(["--device", "cpu", "--tiny", "--case", "fp8"])
    assert isinstance(options, argparse.Namespace)
    assert (options.device, options.tiny, options.case, options.seconds) == ("cpu", True, "fp8", 440.0)
