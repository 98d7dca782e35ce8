"""Everything that needs a GPU, in one command of under 8 minutes on one GPU: the tests marked gpu, the measurements.

The tests come first, side by side: each plugin on one rank over NCCL, two to four ranks that share the GPU over a
backend of the tests, some of those under torch's sanitizer, which looks for accesses on two streams without an order.

    python benchmarks/gpu_suite.py
    python benchmarks/gpu_suite.py --part large      # 1.3 billion weights: plain torch, FSDP2, ZeRO, Gemini
    python benchmarks/gpu_suite.py --part largest    # each at the largest model that it trains; both as long again

It needs no installed booster and no network, and writes benchmarks/results/gpu-<device>-<date>.json, again after each
case, so that a run that is ended keeps what it has. Without a GPU it says so and exits with 0.
`--device cpu --tiny --seconds 20` runs the same code on the CPU; such figures mean nothing.
Exit code 1: a test failed, or a case could not be measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # booster from the checkout, not installed

import torch  # noqa: E402
from _harness.environment import describe_run  # noqa: E402
from _harness.gpt import SIZES  # noqa: E402
from _harness.pair import RESULTS, RankError, World, on_ranks, write_json  # noqa: E402
from _harness.table import align  # noqa: E402
from gpu.cases import CASES, Case  # noqa: E402
from gpu.large import PARTS, PRELOAD, format_large, large_has_failed, measure_large  # noqa: E402
from gpu.measure import Device, measure_case, probe_device  # noqa: E402

_CASES = "cases"
_TEST_SHARE = 0.65  # of the whole time, at most
_LEAST_TEST_SECONDS = 60.0  # to start pytest on a busy machine, however little time there is
# For a case that overruns its share, before its process is killed; on the CPU the machine may be busy with others.
_GRACE_SECONDS = {"cuda": 20.0, "cpu": 120.0}
_CEILING_SIDE = {"cuda": 8192, "cpu": 256}
# The largest whose three copies, states and activations fit into so many bytes of free memory.
_SIZE_BY_FREE_BYTES = ((60e9, "350m"), (20e9, "125m"), (6e9, "50m"))
_HEAD = ["case", "engine", "ms", "TFLOP/s", "MFU", "device MiB", "host MiB", "ratio", "loss diff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The time of the whole run, shared out to what is still to come."""

    deadline: float

    def share(self, num_left: int, now: float) -> float:
        """Returns the seconds for the next of `num_left` parts; what one leaves over goes to the later ones."""
        return max(0.0, self.deadline - now) / num_left


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestRun:
    """A run of pytest, which fails if it is not done in time.

    Attributes:
        name: How the document calls it.
        arguments: Of pytest.
        environment: Variables beside those of this process.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


# The folder, not all tests: others may need packages that a bare GPU machine lacks.
_ON_ONE_GPU, _GEMINI = "tests/gpu/test_shared_gpu.py", "tests/gpu/test_gemini_gpu.py"
TEST_RUNS = (
    PytestRun(name="one rank", arguments=("tests/gpu", f"--ignore={_ON_ONE_GPU}", f"--ignore={_GEMINI}")),
    PytestRun(name="one rank, Gemini", arguments=(_GEMINI,)),
    PytestRun(name="ranks on one GPU", arguments=(_ON_ONE_GPU,)),
    PytestRun(
        name="ranks on one GPU, sanitized",
        arguments=(_ON_ONE_GPU, "-k", "gemini or fsdp or offloaded"),
        environment={"TORCH_CUDA_SANITIZER": "1"},
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the suite; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        print("DRY RUN on the CPU: it exercises the code; its figures say nothing about a GPU.", flush=True)
    elif not torch.cuda.is_available():
        print("no GPU: nothing to run. For a dry run on the CPU: --device cpu --tiny --seconds 20")
        return 0
    document = run(options)
    lines = format_cases(document["cases"]) if options.part == _CASES else format_large(document["large"])
    print("\n".join(lines))
    return exit_code(document)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs tests, ceiling and cases; returns the document, which is saved after each of them."""
    start = time.time()
    budget = Budget(deadline=start + options.seconds)
    is_large = options.part != _CASES
    tests = {} if options.no_tests or is_large else _run_all_tests(options)
    world = World(timeout_seconds=max(60.0, options.seconds))
    device: Device = on_ranks(probe_device, world, options.device, _CEILING_SIDE[options.device], preload=PRELOAD)[0]
    print(f"{device.name}: bf16 {device.ceiling_side}^3 matmul {device.ceiling_tflops:.3g} TFLOP/s", flush=True)
    size = options.size or choose_size(device.free_bytes, is_tiny=options.tiny)
    document: dict[str, Any] = {
        "benchmark": "gpu_suite",
        "is_dry_run": options.device == "cpu",
        **describe_run(vars(options)),
        "device": asdict(device),
        "size": {"name": size, **asdict(SIZES[size])},
        "tests": tests,
        "part": options.part,
        "cases": [],
        "large": [],
    }
    name = f"gpu-{f'{options.part}-' if is_large else ''}{_file_name(device.name)}-{_today()}"

    def save() -> Path:
        document["seconds"] = time.time() - start
        return write_json(name, document, options.output)

    print("saving", save(), flush=True)
    if is_large:
        document["large"] = measure_large(
            options.part, options.device, budget.deadline, device, is_tiny=options.tiny, names=options.engines
        )
        save()
    for case in () if is_large else _measured(options, budget, size, device):
        document["cases"].append(case)
        save()
    return document


def _run_all_tests(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    # Without a GPU every test is skipped, in each run.
    test_runs = TEST_RUNS if options.device == "cuda" else TEST_RUNS[:1]
    seconds = max(_LEAST_TEST_SECONDS, options.seconds * _TEST_SHARE)
    with ThreadPoolExecutor(len(test_runs)) as executor:
        results = executor.map(partial(run_tests, timeout_seconds=seconds), test_runs)
        return {test_run.name: result for test_run, result in zip(test_runs, results, strict=True)}


def run_tests(test_run: PytestRun, timeout_seconds: float) -> dict[str, Any]:
    """Runs tests marked gpu in processes of their own; returns exit code, last line and time."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *test_run.arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **test_run.environment, "PYTHONPATH": path, "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    start = time.time()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    exit_code: int | None
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
        exit_code, summary = process.returncode, (output.strip().splitlines() or ["no output"])[-1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks, too, which hold memory of the GPU
        output, _ = process.communicate()
        exit_code, summary = None, f"not done after {timeout_seconds:.0f} s"
    if exit_code != 0:
        print(output, flush=True)
    print(f"tests of {test_run.name}: {summary}", flush=True)
    return {"exit_code": exit_code, "summary": summary, "seconds": time.time() - start}


def choose_size(free_bytes: int, *, is_tiny: bool) -> str:
    """Returns the name of the model to train."""
    if is_tiny:
        return "tiny"
    return next((name for needed, name in _SIZE_BY_FREE_BYTES if free_bytes >= needed), "10m")


def exit_code(document: Mapping[str, Any]) -> int:
    """Returns 1 if a test failed or a case could not be measured."""
    tests_failed = any(test_run["exit_code"] != 0 for test_run in document["tests"].values())
    cases_failed = any(case_has_failed(case) for case in document["cases"])
    return int(tests_failed or cases_failed or any(large_has_failed(engine) for engine in document.get("large", ())))


def case_has_failed(case: Mapping[str, Any]) -> bool:
    """Returns True if the case, or one of its engines, gave no figures."""
    return bool(_errors(case))


def format_cases(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of the table, errors below it."""
    rows = [_HEAD, *(_row(case["name"], engine) for case in cases for engine in case.get("engines", ()))]
    return [*align(rows), *(error for case in cases for error in _errors(case))]


def _errors(case: Mapping[str, Any]) -> list[str]:
    if "error" in case:
        return [f"{case['name']} FAILED: {case['error']}"]
    failed = (engine for engine in case["engines"] if engine["has_failed"])
    return [f"{case['name']}, {engine['name']} FAILED: {engine['outcome']}" for engine in failed]


def _row(case: str, engine: Mapping[str, Any]) -> list[str]:
    if "seconds" not in engine:
        return [case, engine["name"], *["-"] * (len(_HEAD) - 2)]
    return [
        case,
        engine["name"],
        f"{engine['seconds']['median'] * 1e3:.2f}",
        f"{engine['tflops']:.3g}",
        f"{engine['mfu']:.1%}",
        _mebibytes(engine.get("peak_device_bytes")),
        _mebibytes(engine.get("peak_host_bytes")),
        f"{engine['ratio']['median']:.3f}",
        f"{engine['largest_loss_difference']:.1e}",
    ]


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.0f}"


def _measured(options: argparse.Namespace, budget: Budget, size: str, device: Device) -> Iterator[dict[str, Any]]:
    chosen = [case for case in CASES if options.case in (None, case.name)]
    for index, case in enumerate(chosen):
        seconds = budget.share(len(chosen) - index, time.time())
        if seconds > 0 or options.tiny:  # tiny: the few steps that are done in any case take no time worth saving
            result = _measure(case, options.device, seconds, size, device)
        else:
            result = {"name": case.name, "error": "no time was left: raise --seconds"}
        print(*(_errors(result) or [f"{case.name}: measured"]), sep="\n", flush=True)
        yield result


def _measure(case: Case, kind: str, seconds: float, size: str, device: Device) -> dict[str, Any]:
    backend = ("nccl" if kind == "cuda" else "gloo") if case.is_distributed else None
    # A process of its own: an error of the device would spoil all cases after it.
    world = World(backend=backend, timeout_seconds=seconds + _GRACE_SECONDS[kind])
    deadline = time.time() + seconds
    try:
        arguments = (case.name, size, kind, deadline, device.ceiling_tflops)
        result: dict[str, Any] = on_ranks(measure_case, world, *arguments, preload=PRELOAD)[0]
    except RankError as error:
        return {"name": case.name, "error": str(error)}
    return result


def _file_name(device: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in device.lower())


def _today() -> str:
    return f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run")
    parser.add_argument("--part", choices=[_CASES, *PARTS], default=_CASES, help="cases: all plugins and precisions")
    parser.add_argument("--tiny", action="store_true", help="the smallest model")
    parser.add_argument("--size", choices=sorted(SIZES), help="of the model; default: by the free memory")
    parser.add_argument("--seconds", type=float, default=440.0, help="for everything together")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this one")
    parser.add_argument("--engines", nargs="+", help="of the parts large and largest: with one of these in their names")
    parser.add_argument("--no-tests", action="store_true", help="only the measurements")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
