"""A chain of kills and resumes over changing plugins and numbers of ranks, compared with a run that was never broken.

    python tests/faults/soak.py --seconds 600 --cycles 100 --steps 1000 --seed 0
    python tests/faults/soak.py --replay tests/faults/seeds/soak-0.json

Every cycle starts ranks, which load the latest checkpoint, train, save, and are killed at a place or a moment that the
seed chose. A soak that fails writes its cycles to a file, for `--replay`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from multiprocessing import forkserver as server
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import soak_plan
from soak_plan import Cycle, Settings

FOLDER = Path(__file__).resolve().parent
# How long the ranks of a cycle may live on once one of them is gone, on a busy machine: their own limit is 20 s.
AFTERMATH_SECONDS = 45.0
CYCLE_SECONDS = 120.0
FINAL_SECONDS = 45.0  # of what comes after the last cycle: the serial run, and reading the result


class SoakFailed(AssertionError):
    """Something was lost, repeated, different, or hung."""


@dataclass(slots=True, kw_only=True)
class CycleResult:
    """What the ranks of a cycle wrote down, and how they ended."""

    diaries: list[list[dict[str, Any]]]
    codes: list[int]
    outputs: list[str]
    killed: set[int] = field(default_factory=set)

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        """Returns the events of this kind of all ranks."""
        return (event for diary in self.diaries for event in diary if event["event"] == kind)

    def steps(self, kind: str) -> set[int]:
        """Returns the steps of these events."""
        return {event["step"] for event in self.events(kind)}


class Ranks:
    """Starts ranks from a process that has imported everything, so that one is there in 0.1 s."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch", "torch._dynamo", "torch.distributed.tensor", "booster.plugins", "soak_rank", "soak_serial"]
        )
        with _environment():
            server.ensure_running()

    def start(self, function: str, *arguments: Any) -> ForkServerProcess:
        """Starts a function of `soak_rank` or `soak_serial` in a process."""
        process = self._context.Process(target=_call, args=(function, *arguments))
        process.start()
        return process


def _call(function: str, *arguments: Any) -> None:
    import importlib

    module, _, name = function.partition(".")
    getattr(importlib.import_module(module), name)(*arguments)


@contextmanager
def _environment() -> Iterator[None]:
    """What ranks find in their environment: the folder of these modules, one thread, no launcher."""
    before = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    paths = filter(None, [str(FOLDER), before.get("PYTHONPATH")])
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(paths))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Soak:
    """One chain of cycles, in a directory of its own."""

    def __init__(self, settings: Settings, cycles: list[Cycle], directory: Path, deadline: float) -> None:
        self.settings, self.cycles, self.directory, self.deadline = settings, cycles, directory, deadline
        self.ranks = Ranks()
        self.losses: list[tuple[int, int, float]] = []  # number of the cycle, step, loss
        self.samples: list[tuple[int, int, list[int]]] = []
        self.num_done = self.num_trained = self.num_killed = 0
        self.durable = 0  # the newest step of which a rank was told that it is saved
        self.possible = {0}  # what the next load may find: that step, and those whose save had begun since

    @property
    def root(self) -> Path:
        """Where the checkpoints are."""
        return self.directory / "run"

    def run(self) -> str:
        """Runs the cycles that there is time for, and compares; returns what was done, in a line.

        Raises:
            SoakFailed: With all that is known of it.
        """
        begin = time.monotonic()
        for number, cycle in enumerate(self.cycles):
            if time.monotonic() > self.deadline - FINAL_SECONDS - 5:
                break
            self._run_cycle(number, cycle)
        training_ended = time.monotonic()
        step = self._dump("final", self.root)
        _check(step in self.possible, f"the result is of step {step}, not one of {sorted(self.possible)}")
        self._check_directory(step)
        compared = self._compare_with_the_same_layout(step) if self.settings.same_layout else self._compare(step)
        return (
            f"{self.num_done} cycles ({self.num_killed} with a rank killed) to step {step}, {self.num_trained} trained"
            f" in all, {training_ended - begin:.0f} s and {time.monotonic() - training_ended:.0f} s to compare:"
            f" {compared}"
        )

    def _run_cycle(self, number: int, cycle: Cycle) -> None:
        begin = time.monotonic()
        folder = self.directory / f"cycle-{number:03d}"
        outcome = self._start(cycle, folder, self.root)
        try:
            self._judge(number, cycle, outcome)
        except SoakFailed as failure:
            texts = "".join(
                f"\n--- rank {rank}, exit code {outcome.codes[rank]}:\n{text[-6000:]}"
                for rank, text in enumerate(outcome.outputs)
            )
            raise SoakFailed(f"cycle {number} ({cycle}): {failure}{texts}") from None
        self.num_done += 1
        self.num_killed += bool(outcome.killed)
        start, trained = min(outcome.steps("start"), default="-"), outcome.steps("step")
        print(
            f"seed {self.settings.seed} cycle {number}: {cycle}: from step {start} to {max(trained, default='-')},"
            f" killed {sorted(outcome.killed) or 'none'}, {time.monotonic() - begin:.1f} s",
            flush=True,
        )
        shutil.rmtree(folder)

    def _start(self, cycle: Cycle, folder: Path, root: Path, *, dump: bool = False) -> CycleResult:
        folder.mkdir()
        port = _free_port()
        begin = time.monotonic()
        processes = [
            self.ranks.start("soak_rank.run_cycle", self.settings, cycle, root, folder, rank, port, dump)
            for rank in range(cycle.world_size)
        ]
        try:
            late = _wait(processes, cycle, begin)
        finally:
            for process in processes:
                process.kill()
                process.join()
        outputs = [_text(folder / f"rank-{rank}.txt") for rank in range(cycle.world_size)]
        codes = [process.exitcode or 0 for process in processes]
        _check(not late, f"{cycle}: ranks {late} did not end:\n" + "\n".join(outputs))
        return CycleResult(
            diaries=[_lines(folder / f"rank-{rank}.jsonl") for rank in range(cycle.world_size)],
            codes=codes,
            outputs=outputs,
            killed={rank for rank, code in enumerate(codes) if code == -signal.SIGKILL},
        )

    def _judge(self, number: int, cycle: Cycle, outcome: CycleResult) -> None:
        for rank, (code, diary) in enumerate(zip(outcome.codes, outcome.diaries, strict=True)):
            has_ended = any(event["event"] == "end" for event in diary)
            if rank not in outcome.killed:
                _check(
                    (code == 0) == has_ended, f"rank {rank} ended with {code}, and did{' not' * (not has_ended)} all"
                )
                _check(bool(outcome.killed) or code == 0, f"rank {rank} failed and no rank was killed")
        errors = list(outcome.events("error"))
        for event in errors:
            _check(event["ours"], f"a survivor raised {event['type']}: {event['text']}")
            named = any(_names(event["text"], rank) for rank in outcome.killed)
            _check(named, f"an error names none of the killed ranks {sorted(outcome.killed)}: {event['text']}")
        starts = outcome.steps("start")
        _check(len(starts) < 2, f"ranks began with different steps, {sorted(starts)}")
        _check(starts <= self.possible, f"began after step {sorted(starts)}, not one of {sorted(self.possible)}")
        for diary in outcome.diaries:
            steps = [event["step"] for event in diary if event["event"] in ("start", "step")]
            _check(steps == list(range(min(starts, default=0), max(steps, default=-1) + 1)), f"steps {steps}")
        for event in outcome.events("step"):
            self.losses.append((number, event["step"], event["loss"]))
            self.samples.append((number, event["step"], event["samples"]))
        self.num_trained += len(outcome.steps("step"))
        self._note_saves(outcome, starts)

    def _note_saves(self, outcome: CycleResult, starts: set[int]) -> None:
        self.possible = (starts or self.possible) | outcome.steps("saving")
        if starts:
            self.durable = min(starts)
        self.durable = max({self.durable} | outcome.steps("saved"))
        self.possible = {step for step in self.possible if step >= self.durable}

    def _dump(self, name: str, root: Path) -> int:
        """Loads the checkpoint on one device, which writes all tensors to a file; returns its step."""
        cycle = Cycle(layout="one device", world_size=1, num_steps=0, save_every=1, use_async=False)
        folder = self.directory / name
        outcome = self._start(cycle, folder, root, dump=True)
        _check(outcome.codes == [0], f"reading the result failed: {outcome.outputs[0]}")
        return min(outcome.steps("start"))

    def _check_directory(self, step: int) -> None:
        """After a save that went through: the two latest steps, the pointer, and nothing that a kill left."""
        if step == 0 or step != self.durable:
            return
        names = sorted(path.name for path in self.root.iterdir())
        expected_latest = f"step-{step:08d}"
        is_whole_end = self.num_done == len(self.cycles) and self.cycles[-1].ends == "done"
        if is_whole_end:
            _check((self.root / "latest").read_text() == f"{expected_latest}\n", "`latest` names another step")
            _check(
                "latest" in names and expected_latest in names and len(names) <= 3,
                f"the directory holds {names}, where the two latest steps and `latest` are expected",
            )

    def _compare(self, step: int) -> str:
        """Compares with plain torch in one process; see Note [Tolerance of a soak]."""
        last = max([step, *(number for _, number, _ in self.losses)])
        if step == 0:
            return "nothing was saved"
        self._run_serial(step, "serial")
        serial = json.loads((self.directory / "serial" / "serial.json").read_text())
        if last > step:
            self._run_serial(last, "further")
            further = json.loads((self.directory / "further" / "serial.json").read_text())
            serial |= {name: further[name] for name in ("losses", "loss_tolerances", "samples")}
        for number, at, samples in self.samples:
            _check(samples == serial["samples"][at - 1], f"cycle {number} saw samples {samples} in step {at}")
        worst = 0.0
        for number, at, loss in self.losses:
            difference, tolerance = abs(loss - serial["losses"][at - 1]), serial["loss_tolerances"][at - 1]
            _check(difference <= tolerance, f"cycle {number}: the loss of step {at} differs by {difference}")
            worst = max(worst, difference / tolerance)
        largest = self._differences("serial/serial.pt", serial["tolerances"])
        _check(
            serial["resolution"] > 100,
            f"a lost step would change tensors by {serial['resolution']:.3g} of their tolerances, and not be seen: it"
            " is this check that is wrong",
        )
        return (
            f"{len(self.losses)} losses within {worst:.0%} and all tensors within {largest:.0%} of what rounding"
            f" explains; a lost step would be {serial['resolution']:.0f} times as much"
        )

    def _run_serial(self, num_steps: int, name: str) -> None:
        (self.directory / name).mkdir()
        process = self.ranks.start("soak_serial.write_reference", self.settings, num_steps, self.directory / name)
        process.join(CYCLE_SECONDS)
        is_late = process.exitcode is None
        process.kill()
        process.join()
        _check(not is_late and process.exitcode == 0, f"the serial run failed with {process.exitcode}")

    def _compare_with_the_same_layout(self, step: int) -> str:
        """Compares bit for bit with ranks of the same layout that are not killed."""
        last = max([step, *(number for _, number, _ in self.losses)])
        if step == 0:
            return "nothing was saved"
        losses: dict[int, float] = {}
        # To the step of the result, where it is saved, and then on to the last one that was ever trained.
        for number, stop in enumerate(sorted({step, last})):
            cycle = replace(self.cycles[-1], num_steps=stop, save_every=stop, ends="done")
            folder = self.directory / f"unbroken-{number}"
            outcome = self._start(cycle, folder, self.directory / f"unbroken-run-{number}")
            _check(set(outcome.codes) == {0}, f"the unbroken run failed: {outcome.outputs}")
            losses |= {event["step"]: event["loss"] for event in outcome.events("step")}
            if stop == step:
                self._dump("unbroken", self.directory / "unbroken-run-0")
        for number, at, loss in self.losses:
            _check(loss == losses[at], f"cycle {number}: the loss of step {at} is {loss}, unbroken {losses[at]}")
        self._differences("unbroken/final.pt", {})
        return f"{len(self.losses)} losses and all tensors are the same bit for bit"

    def _differences(self, expected_file: str, tolerances: dict[str, float]) -> float:
        """Returns the largest difference of the result, in tolerances; without them it must be 0."""
        import torch

        found = torch.load(self.directory / "final" / "final.pt", weights_only=True)
        expected = torch.load(self.directory / expected_file, weights_only=True)
        _check(found.keys() == expected.keys(), f"tensors {sorted(found.keys() ^ expected.keys())} are on one side")
        largest = 0.0
        for name, tensor in expected.items():
            difference = (found[name].double() - tensor.double()).abs().max().item()
            tolerance = tolerances.get(name, 0.0)
            _check(difference <= tolerance, f"{name} differs by {difference}, and {tolerance} is allowed")
            largest = max(largest, difference / tolerance if tolerance else 0.0)
        return largest


def _wait(processes: list[ForkServerProcess], cycle: Cycle, begin: float) -> list[int]:
    """Kills whom the cycle kills at a moment, waits for the others; returns those that had to be ended."""
    victims = {"moment": [cycle.rank], "power": list(range(cycle.world_size))}.get(cycle.ends, [])
    deadline, aftermath = begin + CYCLE_SECONDS, None
    waiting = {process.sentinel: rank for rank, process in enumerate(processes)}
    while waiting:
        now = time.monotonic()
        if victims and now >= begin + cycle.seconds:
            for rank in victims:
                processes[rank].kill()
            victims = []
        if now >= deadline:
            break
        limit = begin + cycle.seconds if victims else deadline
        for sentinel in connection.wait(list(waiting), max(0.0, limit - now)):
            waiting.pop(sentinel)  # type: ignore[call-overload]
            if aftermath is None:
                aftermath = time.monotonic() + AFTERMATH_SECONDS
                deadline = min(deadline, aftermath)
    for rank in waiting.values():
        os.kill(processes[rank].pid or 0, signal.SIGABRT)  # writes the stacks of all threads
        processes[rank].join(5)
    return sorted(waiting.values())


def _names(text: str, rank: int) -> bool:
    return re.search(rf"\brank(s|\(s\))? \[?[\d, and]*\b{rank}\b", text) is not None


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _text(path).splitlines(keepends=True) if line.endswith("\n")]


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise SoakFailed(text)


def soak(settings: Settings, cycles: list[Cycle], seconds: float, failed: Callable[[], Path]) -> int:
    """Runs a soak; returns the exit code.

    Args:
        settings: What holds for all of it.
        cycles: What to do.
        seconds: When no further cycle begins, so that all is over by then.
        failed: Gives the file to write a failing one to.
    """
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    run = Soak(settings, cycles, directory, time.monotonic() + seconds)
    try:
        print(f"seed {settings.seed}: {run.run()}", flush=True)
    except SoakFailed as failure:
        path = failed()
        soak_plan.write(path, settings, cycles, str(failure).splitlines()[0])
        print(f"seed {settings.seed} FAILED: {failure}\nagain: {sys.argv[0]} --replay {path}", flush=True)
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


def main() -> int:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="bound of it all (600)")
    parser.add_argument("--cycles", type=int, default=100, help="starts of ranks (100)")
    parser.add_argument("--steps", type=int, default=1000, help="batches to train on in all (1000)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (0)")
    parser.add_argument("--accumulation", type=int, help="batches per step (1 or 2, by the seed)")
    parser.add_argument("--same-layout", action="store_true", help="keep one layout: the same bit for bit")
    parser.add_argument("--seeds", type=Path, default=FOLDER / "seeds", help="folder for those that fail")
    parser.add_argument("--replay", type=Path, help="file of one that failed")
    arguments = parser.parse_args()
    if arguments.replay:
        settings, cycles = soak_plan.read(arguments.replay)
        return soak(settings, cycles, arguments.seconds, lambda: arguments.replay.with_suffix(".again.json"))
    settings = Settings(
        seed=arguments.seed,
        num_cycles=arguments.cycles,
        num_steps=arguments.steps,
        accumulation=arguments.accumulation or 1 + arguments.seed % 2,
        same_layout=arguments.same_layout,
    )
    name = f"soak-{settings.seed}{'-same-layout' * settings.same_layout}.json"
    return soak(settings, soak_plan.draw(settings), arguments.seconds, lambda: arguments.seeds / name)


if __name__ == "__main__":
    sys.exit(main())
