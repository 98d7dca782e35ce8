"""Whatever happens to one rank, wherever it is: the others end by themselves, in time, and say which rank and where."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from faults.loss_program import EXPERT_PARALLEL, Case, make_model
from faults.lost_ranks import (
    BUSY_SECONDS,
    END_SECONDS,
    RankEnd,
    Running,
    delay_beyond_the_limit,
    end,
    expected_code,
    finish,
    limit_at,
    start,
)
from harness import preload
from simulated_cuda import device as simulated_device

from booster import Booster
from booster.comm import Fault

preload("booster", "booster.plugins", "faults.loss_program")

ACTIONS = ("kill", "stop", "throw", "leave", "delay")
PHASES = ("boost", "forward", "backward", "clip", "step", "save plan", "save write", "commit", "load")
PLUGINS = ("torch_ddp", "low_level_zero", "gemini", "torch_fsdp", "hybrid_parallel")
NUM_AHEAD = 2  # cases that run beside the one whose end is awaited: most of their time is waiting

_PLACES = re.compile(r"\bin (boost|data|forward|backward|clip|step|save|load|communication)\b|outside of all phases")


def the_case(action: str, phase: str, plugin: str) -> Case:
    """Returns the case of a cell of the matrix; which rank and how many is spread over them."""
    number = PHASES.index(phase) + 2 * ACTIONS.index(action) + 3 * PLUGINS.index(plugin)
    seconds = {"seconds": delay_beyond_the_limit(phase)} if action == "delay" else {}
    # Of what happens in each step the second, so that there is an old checkpoint, and connections are open.
    call = 1 if phase in ("boost", "load") else 2
    world_size = 2 if plugin == "hybrid_parallel" else 2 + number % 2
    rank = (1, 1, 0)[number % 3]
    return Case(
        plugin=plugin,
        world_size=world_size,
        fault=Fault(rank=rank, at=phase, call=call, action=action, **seconds),
    )


def the_quick_cells() -> list[tuple[str, str, str]]:
    """Returns 15 cells: each action and each plugin three times, each phase at least once."""
    return [(ACTIONS[n % 5], PHASES[n % 9], PLUGINS[(n + n // 5) % 5]) for n in range(15)]


ALL_CELLS = [(action, phase, plugin) for action in ACTIONS for phase in PHASES for plugin in PLUGINS]
QUICK_CELLS = the_quick_cells()


def as_parameters(cells: list[tuple[str, str, str]]) -> Iterator[object]:
    """Yields the cases of the cells, as pytest wants them."""
    for cell in cells:
        marks = () if cell in QUICK_CELLS else (pytest.mark.slow,)
        case = the_case(*cell)
        yield pytest.param(case, id=str(case), marks=marks)


class Runner:
    """Runs the cases of a session one after the other, the next ones already beside the one that is asked for."""

    def __init__(self, directory: Path, cases: list[Case]) -> None:
        self._directory = directory
        self._cases = cases
        self._running: dict[int, Running] = {}

    def ends_of(self, case: Case) -> tuple[Running, list[RankEnd], list[str]]:
        """Returns the case as it was run, how its ranks ended, and the processes that they left."""
        number = self._cases.index(case)
        for other in range(number, min(number + 1 + NUM_AHEAD, len(self._cases))):
            if other not in self._running:
                self._running[other] = start(self._cases[other], self._directory / f"case-{other}")
        running = self._running[number]
        beside = [self._running[other] for other in self._running if other > number]
        return running, *finish(running, beside)

    def close(self) -> None:
        """Ends what runs still."""
        for running in self._running.values():
            end(running)


@pytest.fixture(scope="module")
def runner(request, tmp_path_factory):
    cases = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.module is request.module and "case" in getattr(getattr(item, "callspec", None), "params", {})
    ]
    found = Runner(tmp_path_factory.mktemp("ranks"), cases)
    yield found
    found.close()


def stored_step(path: Path, plugin: str) -> int | None:
    """Returns which step's checkpoint is there, once all of it was read and checked; None: there is none."""
    if not path.exists():
        return None
    model, optimizer = make_model(plugin)
    strategy = Booster(device="cpu")
    model, optimizer, *_ = strategy.boost(model, optimizer)
    extra = strategy.load(path, model, optimizer)
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
    return extra["step"]


def possible_steps(case: Case, ends: list[RankEnd]) -> list[int | None]:
    """Returns which checkpoints may be there at the end: of the last save that began, or of the one before."""
    begun = max((int(mark.split()[1]) for one in ends for mark in one.marks if mark.startswith("save")), default=0)
    if begun == 0:
        return [None]
    if any(one.marks[-1] != f"save {begun}" and f"save {begun}" in one.marks for one in ends):  # one came out of it
        return [begun]
    before = begun - 1 or None
    is_early = case.fault.at in ("save plan", "save write") and case.fault.action != "delay"
    return [before] if is_early else [before, begun]


def what_is_wrong(case: Case, ends: list[RankEnd]) -> Iterator[str]:
    """Yields what is wrong with how the ranks ended."""
    fault = case.fault
    for rank, one in enumerate(ends):
        text = one.error[1]
        if rank == fault.rank:
            if fault.action != "stop" and one.code != expected_code(case):
                yield f"the faulty rank {rank} ended with code {one.code}"
            continue
        if one.code is None:
            yield f"rank {rank} is still there"
        elif one.code != 1:
            yield f"rank {rank} ended with code {one.code}"
        if not re.search(rf"\branks? ([0-9, ]+, )?{fault.rank}\b", text):
            yield f"rank {rank} does not name rank {fault.rank}"
        if not _PLACES.search(text):
            yield f"rank {rank} does not say in which phase"
        if one.seconds > fault.seconds + limit_at(fault.at) + END_SECONDS + BUSY_SECONDS:
            yield f"rank {rank} ended {one.seconds:.1f} s after the fault"


def debris_in(directory: Path) -> list[str]:
    """Returns what a save has left that was given up."""
    names = [
        path.name for folder in (directory, directory / "checkpoint") if folder.exists() for path in folder.iterdir()
    ]
    return [name for name in names if name.startswith(".")]


def check(case: Case, runner: Runner) -> bool:
    """Runs a case and fails unless it ends as it must; returns whether the fault struck."""
    running, ends, leftovers = runner.ends_of(case)
    print("\n".join(f"rank {rank}: {one}" for rank, one in enumerate(ends)))
    if all(one.marks[-1:] == ["end"] for one in ends):  # the fault comes later than the end of the program
        assert [one.code for one in ends] == [0] * case.world_size
        return False
    wrong = [*what_is_wrong(case, ends), *leftovers]
    assert not wrong, f"{case}: {'; '.join(wrong)}\n" + "\n".join(": ".join(one.error) for one in ends)
    assert stored_step(running.directory / "checkpoint", case.plugin) in possible_steps(case, ends)
    if case.fault.rank != 0:  # which clears what it has begun
        assert debris_in(running.directory) == []
    return True


@pytest.mark.parametrize("case", list(as_parameters(ALL_CELLS)))
@pytest.mark.slow
def test_the_others_end_and_say_why(case, runner):
    assert check(case, runner), "the fault did not strike"


# Ranks that share experts are lost where tokens travel: in the second step's forward, in its backward, or elsewhere.
# A step has three all-to-alls each way: tokens, weights and outputs.

EXPERT_PLACES = {"all_to_all": (7, 9, 11, 12), "backward": (2,), "clip": (2,), "save write": (2,), "load": (1,)}


def expert_parameters() -> Iterator[object]:
    """Yields the cases of ranks that share experts, as pytest wants them."""
    for number, action in enumerate(ACTIONS):
        for place, calls in EXPERT_PLACES.items():
            for call in calls:
                seconds = {"seconds": delay_beyond_the_limit(place)} if action == "delay" else {}
                world_size = (2, 4)[(number + call) % 2]
                case = Case(
                    plugin=EXPERT_PARALLEL,
                    world_size=world_size,
                    fault=Fault(rank=call % world_size, at=place, call=call, action=action, **seconds),
                )
                is_quick = (action, place, call) in (("kill", "all_to_all", 7), ("throw", "all_to_all", 11))
                yield pytest.param(case, id=str(case), marks=() if is_quick else (pytest.mark.slow,))


@pytest.mark.slow
@pytest.mark.parametrize("case", list(expert_parameters()))
def test_ranks_that_share_experts_end_and_say_why(case, runner):
    assert check(case, runner), "the fault did not strike"


# Random cases: a fault at any communication. One that fails becomes a file in the folder `seeds`, and is run for ever.

SEEDS = sorted((Path(__file__).parent / "seeds").glob("rank-loss-*.json"))
NUM_QUICK_SEEDS, NUM_SEEDS = 3, 60


def random_parameters() -> Iterator[object]:
    """Yields the cases of the seeds, as pytest wants them."""
    for seed in range(NUM_SEEDS):
        case = Case.random(seed)
        marks = () if seed < NUM_QUICK_SEEDS else (pytest.mark.slow,)
        yield pytest.param(case, id=f"seed {seed}: {case}", marks=marks)


@pytest.mark.parametrize("case", list(random_parameters()))
def test_a_fault_anywhere(case, runner):
    check(case, runner)


@pytest.mark.parametrize("path", SEEDS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_what_failed_once(path, tmp_path):
    case = Case.from_json(json.loads(path.read_text())["case"])
    check(case, Runner(tmp_path, [case]))


# On an accelerator, heartbeats end a process that waits for a lost rank. The backend's watchdog does so later, and its
# error names no rank. Whether a rank is stopped shows late: when its heartbeats have ceased.

NAMED = {
    "kill": r"rank 1's process \d+ has ended without a report|rank 1 is missing",
    "throw": r"rank 1's program failed: InjectedFault|rank 1 had failed: InjectedFault",
    "leave": r"rank 1's program ended",
    "stop": r"rank 1 on host \S+ has sent no heartbeat for|rank 1 is missing",
}


@pytest.mark.parametrize("action", list(NAMED))
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.slow
def test_on_a_device_the_error_about_a_lost_rank_comes_before_the_watchdogs(tmp_path, plugin, action):
    if (reason := simulated_device.problem()) is not None:
        pytest.skip(reason)
    case = Case(plugin=plugin, world_size=2, fault=Fault(rank=1, at="backward", call=2, action=action))
    ends, leftovers = finish(start(case, tmp_path / "case", "simulated_cuda"), [])
    assert not leftovers
    assert action == "stop" or ends[1].code == expected_code(case)
    assert ends[0].code == 1, ends[0]
    assert "Watchdog caught" not in ends[0].output
    assert re.search(rf"RankFailedError: rank 0 .*({NAMED[action]})", ends[0].output), ends[0]
    assert re.search(r'File ".*loss_program.py", line \d+, in step', ends[0].output), "the place of the wait"


def test_the_quick_cells_cover_the_matrix():
    assert len(ALL_CELLS) == len(set(ALL_CELLS)) == 225
    assert len(QUICK_CELLS) == len(set(QUICK_CELLS)) == 15
    actions, phases, plugins = (Counter(column) for column in zip(*QUICK_CELLS, strict=True))
    assert set(phases) == set(PHASES)
    assert set(actions.values()) == {3}
    assert {plugin: plugins[plugin] for plugin in PLUGINS} == dict.fromkeys(PLUGINS, 3)
    assert len({(action, plugin) for action, _, plugin in QUICK_CELLS}) == 15
    cases = [the_case(*cell) for cell in QUICK_CELLS]
    assert {case.fault.rank for case in cases} == {0, 1}
    assert {case.world_size for case in cases} == {2, 3}
