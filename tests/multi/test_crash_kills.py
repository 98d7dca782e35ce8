"""Real ranks: killed at random times in the middle of saves, and with disks that fail."""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import dataclass

import pytest
import torch.distributed as dist
from fault_cases import all_wrong_with, faults_at_every_operation, operations_of, quick_groups, saves_with_faults
from harness import RanksFailed, run_ranks
from harness.messages import pack_arguments
from harness.pool import RankPool
from harness.reference import reference_to
from save_cases import read, save, usual_names_below

FIRST = 11  # the version that is saved first
MAX_SECONDS = 0.3  # time for some saves
TIMEOUT = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Which ranks of how many are killed, how long after how many saves, and in which kind of save."""

    ranks: tuple[int, ...]
    num_ranks: int
    num_saves: int
    after_seconds: float
    case: str
    use_async: bool


def random_kill(seed):
    """Returns a kill by its seed."""
    rng = random.Random(seed)
    num_ranks = rng.choice([2, 2, 2, 4])
    return Kill(
        ranks=rng.choice([(0,), (1,), tuple(range(num_ranks))]),
        num_ranks=num_ranks,
        num_saves=rng.choice([0, 1]),
        after_seconds=rng.uniform(0, MAX_SECONDS),
        case=rng.choice(["directory", "one shard", "file", "bin directory"]),
        use_async=rng.random() < 0.3,
    )


def save_until_killed(root, progress, kill):
    """Saves one version after the other, and notes the last that was done, until the kill comes."""
    notes = os.open(progress, os.O_WRONLY)
    with quick_groups() as (group, _):
        save(root / "warm", 1, kill.case, group=group)
        dist.barrier(group)
        version = FIRST
        while True:
            if version == FIRST + kill.num_saves and dist.get_rank() in kill.ranks:
                threading.Timer(kill.after_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            save(root, version, kill.case, use_async=kill.use_async, group=group)
            dist.barrier(group)
            if dist.get_rank() == 0:
                os.pwrite(notes, f"{version:8}".encode(), 0)  # always as long: never seen in part
            version += 1


def what_a_kill_leaves(tmp_path, seed):
    """Kills a job while it saves; returns what is wrong with what it left, or None."""
    kill = random_kill(seed)
    root, progress = tmp_path / f"root-{seed}", tmp_path / f"progress-{seed}"
    (root / "warm").mkdir(parents=True)
    progress.write_text(f"{FIRST - 1:8}")
    pool = RankPool(kill.num_ranks, aftermath_seconds=0.1)
    with pytest.raises(RanksFailed, match="SIGKILL"):
        pool.run(reference_to(save_until_killed), pack_arguments((root, progress, kill), {}), TIMEOUT)
    done = int(progress.read_text())
    found = read(root, kill.case)
    allowed = {str(done) if done >= FIRST else "nothing", str(done + 1)}
    if found not in allowed:
        return f"{kill}: {found} instead of one of {allowed}"
    save(root, 1, kill.case)
    save(root / "clean", 1, kill.case)
    names = usual_names_below(root)
    clean = {name for name in names if name.startswith("clean")}
    expected = {name.removeprefix("clean/") for name in clean} | {"clean", "warm"}
    left_over = [name for name in names if name not in clean | expected and not name.startswith("warm/")]
    found = read(root, kill.case)
    return f"{kill}: the next save leaves {left_over} and {found}" if left_over or found != "old" else None


def check_kills(tmp_path, seeds):
    """Checks what each kill leaves."""
    wrong = {seed: what_a_kill_leaves(tmp_path, seed) for seed in seeds}
    assert not any(wrong.values()), {seed: text for seed, text in wrong.items() if text}


@pytest.mark.slow
def test_ranks_killed_at_any_time(tmp_path):
    check_kills(tmp_path, range(10))


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(1000, 1500, 50))
def test_ranks_killed_at_any_time_500(tmp_path, first_seed):
    check_kills(tmp_path, range(first_seed, first_seed + 50))


# Disks that fail under four ranks, every byte of whose saves is waited for.


def check_faults(tmp_path, case, use_async, num_faults, seed):
    """Checks a number of random faults."""
    operations = run_ranks(operations_of, 4, tmp_path, case, use_async)
    faults = random.Random(seed).sample(faults_at_every_operation(operations), num_faults)
    by_rank = run_ranks(saves_with_faults, 4, tmp_path / "saves", case, faults, use_async, syncs=True, timeout=300)
    wrong = all_wrong_with(faults, operations, by_rank)
    assert not wrong, f"{len(wrong)} in {num_faults} faults, seed {seed}:\n" + "\n".join(wrong[:20])


@pytest.mark.slow
@pytest.mark.parametrize(("case", "use_async"), [("directory", False), ("file", True)])
def test_random_faults_of_disks_under_four_ranks(tmp_path, case, use_async):
    check_faults(tmp_path, case, use_async, 25, 0)


@pytest.mark.slow
@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("case", ["directory", "bin directory"])
def test_200_random_faults_of_disks_under_four_ranks(tmp_path, case, use_async):
    check_faults(tmp_path, case, use_async, 50, 1)
