"""Two jobs that save to one name at once, and loads beside saves: always one job's checkpoint, whole."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from harness.messages import pack_arguments
from harness.pool import RankPool
from harness.reference import reference_to
from save_cases import names_below, read, save

from booster.errors import BoosterError

TIMEOUT = 120


@contextmanager
def two_jobs():
    """Gives a function that runs one function on two groups of two ranks at once, and returns what both return."""
    pools = [RankPool(2), RankPool(2)]
    results = [None, None]

    def run(function, *arguments):
        def run_one(job):
            packed = pack_arguments((job, *arguments), {})
            try:
                results[job] = pools[job].run(reference_to(function), packed, TIMEOUT)
                assert pools[job].is_settled()
            except BaseException as error:
                results[job] = error

        threads = [threading.Thread(target=run_one, args=(job,)) for job in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    try:
        yield run
    finally:
        for pool in pools:
            pool.close()


def meet_other_job(place, job, name):
    """Waits until both jobs are here."""
    if dist.get_rank() == 0:
        (place / f"{name}-{job}").touch()
        while not (place / f"{name}-{1 - job}").exists():
            time.sleep(0.0005)
    dist.barrier()


def race(job, place, case, num_rounds, seed, has_old):
    """Saves in each round at the same time as the other job; returns for each what happened and what is there then."""
    rng, found = random.Random(seed + job), []
    solo = dist.new_group([0])
    for number in range(num_rounds):
        root = place / f"root-{number}"
        if job == 0 and dist.get_rank() == 0:
            root.mkdir()
        meet_other_job(place, job, f"begin-{number}")
        if has_old:
            if job == 0:
                save(root, 1, case)
            meet_other_job(place, job, f"old-{number}")
        time.sleep(rng.uniform(0, 0.01))
        try:
            save(root, 20 + job, case)
            error = None
        except BoosterError as caught:
            error = f"{type(caught).__name__}: {caught}"
        meet_other_job(place, job, f"saved-{number}")
        there = read(root, case, solo) if dist.get_rank() == 0 else None
        meet_other_job(place, job, f"read-{number}")
        if job == 0:
            save(root, 30, case)
        found.append((error, there, read(root, case, solo) if dist.get_rank() == 0 else None, names_below(root)))
    return found


def _check_races(tmp_path, case, num_rounds, seed, has_old):
    with two_jobs() as run:
        results = run(race, tmp_path, case, num_rounds, seed, has_old)
    num_lost = 0
    for number in range(num_rounds):
        errors = [[rank[number][0] for rank in job] for job in results]
        there = {job[0][number][1] for job in results}
        won = {str(20 + job) for job in range(2) if errors[job][0] is None}
        assert len(there) == 1
        assert there <= won, f"round {number}: {there} is there, and {won} were told that they saved; {errors}"
        for of_job in errors:
            assert (of_job[0] is None) is (of_job[1] is None), f"round {number}: the ranks of a job disagree: {of_job}"
            if of_job[0] is not None:
                num_lost += 1
                assert "another process" in of_job[0], of_job[0]
                assert "another process" in of_job[1]
        assert results[0][0][number][2] == "30"
        assert not [name for name in results[0][0][number][3] if ".tmp-" in name or "commit" in name]
    return num_lost


@pytest.mark.parametrize(("case", "has_old"), [("directory", False), ("directory", True), ("file", False)])
def test_two_jobs_save_to_one_name(tmp_path, case, has_old):
    num_lost = _check_races(tmp_path, case, 4, 0, has_old)
    print(num_lost, "lost")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "has_old"), [("directory", False), ("directory", True), ("file", True)])
def test_two_jobs_save_to_one_name_100(tmp_path, case, has_old):
    _check_races(tmp_path, case, 34, 1, has_old)
