"""Real ranks: killed at random times in the middle of saves, and with disks that fail."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest
import torch.distributed as dist
from harness import RanksFailed
from harness.messages import pack_arguments
from harness.pool import RankPool
from harness.reference import reference_to
from save_cases import names_below, read, save

FIRST = 11
MAX_SECONDS = 0.25  # time for a few saves
TIMEOUT = 30


def save_until_killed(root, progress, case, kill, use_async):
    """Saves one version after the other, and notes the last that was done, until the kill comes."""
    if dist.get_rank() in kill["ranks"]:
        threading.Timer(kill["after"], os.kill, (os.getpid(), signal.SIGKILL)).start()
    version = FIRST
    while True:
        save(root, version, case, use_async=use_async)
        dist.barrier()
        if dist.get_rank() == 0:
            progress.write_text(f"{version:8}")  # one write of the same length: never seen in part
        version += 1


def killed_save(tmp_path, seed):
    """Returns what is wrong with what a killed job left, or None."""
    rng = random.Random(seed)
    case = rng.choice(["directory", "one shard", "file", "bin directory"])
    num_ranks = 2
    ranks = rng.choice([[0], [1], [0, 1]])
    kill = {"ranks": ranks, "after": rng.uniform(0, MAX_SECONDS)}
    root, progress = tmp_path / f"root-{seed}", tmp_path / f"progress-{seed}"
    root.mkdir()
    pool = RankPool(num_ranks, aftermath_seconds=0.1)
    arguments = pack_arguments((root, progress, case, kill, rng.random() < 0.3), {})
    with pytest.raises(RanksFailed, match="SIGKILL"):
        pool.run(reference_to(save_until_killed), arguments, TIMEOUT)
    done = int(progress.read_text()) if progress.exists() else None
    found = read(root, case)
    allowed = {"nothing", str(FIRST)} if done is None else {str(done), str(done + 1)}
    if found not in allowed:
        return f"{case}, {kill}: {found} instead of one of {allowed}"
    save(root, 1, case)
    clean = tmp_path / f"clean-{seed}"
    clean.mkdir()
    save(clean, 1, case)
    left_over = set(names_below(root)) ^ set(names_below(clean))
    if read(root, case) != "old" or left_over:
        return f"{case}, {kill}: the next save leaves {left_over} and {read(root, case)}"
    return None


@pytest.mark.parametrize("first_seed", range(0, 25, 5))
def test_ranks_killed_at_any_time(tmp_path, first_seed):
    wrong = {seed: killed_save(tmp_path, seed) for seed in range(first_seed, first_seed + 5)}
    assert not any(wrong.values()), {seed: text for seed, text in wrong.items() if text}


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(1000, 1500, 50))
def test_ranks_killed_at_any_time_500(tmp_path, first_seed):
    wrong = {seed: killed_save(tmp_path, seed) for seed in range(first_seed, first_seed + 50)}
    assert not any(wrong.values()), {seed: text for seed, text in wrong.items() if text}
