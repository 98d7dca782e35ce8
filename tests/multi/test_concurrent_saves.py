"""Two jobs that save to one name at once, and loads beside saves: always one job's checkpoint, whole."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from fault_cases import quick_groups
from harness import distributed
from harness.messages import pack_arguments
from harness.pool import RankPool
from harness.reference import reference_to
from oracles.faulting_storage import HidingStorage, UnsyncedStorage
from save_cases import NAMES, NEW, OLD, names_below, read, save
from training_saves import read_state, save_state

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
    rng = random.Random(seed + job)
    with quick_groups() as (group, solo):
        return [_race_once(job, place, f"{number}", case, rng, has_old, group, solo) for number in range(num_rounds)]


def _race_once(job, place, name, case, rng, has_old, group, solo):
    root = place / f"root-{name}"
    if job == 0 and dist.get_rank() == 0:
        root.mkdir()
    if has_old and job == 0:
        dist.barrier(group)
        save(root, 1, case, group=group)
    meet_other_job(place, job, f"begin-{name}")
    time.sleep(rng.uniform(0, 0.005))
    error = None
    try:
        save(root, 20 + job, case, group=group)
    except BoosterError as caught:
        error = f"{type(caught).__name__}: {caught}"
    meet_other_job(place, job, f"saved-{name}")
    found = [read(root, case, solo)] if dist.get_rank() == 0 else []
    meet_other_job(place, job, f"read-{name}")
    if job == 0:
        save(root, 30, case, group=group)
        found += [read(root, case, solo)] if dist.get_rank() == 0 else []
    return error, found, names_below(root)


def check_races(tmp_path, case, num_rounds, seed, has_old):
    with two_jobs() as run:
        results = run(race, tmp_path, case, num_rounds, seed, has_old)
    num_lost = 0
    for number in range(num_rounds):
        errors = [[of_rank[number][0] for of_rank in of_job] for of_job in results]
        (found, after), (found_by_other,) = results[0][0][number][1], results[1][0][number][1]
        won = {str(20 + job) for job in range(2) if errors[job][0] is None}
        assert found == found_by_other
        assert found in won, f"round {number}: {found} is there, and {won} were told that they saved; {errors}"
        for of_job in errors:
            assert (of_job[0] is None) is (of_job[1] is None), f"round {number}: the ranks of a job differ: {of_job}"
            if of_job[0] is not None:
                num_lost += 1
                assert all("another process" in error for error in of_job), of_job
        assert after == "30"
        assert not [name for name in results[0][0][number][2] if "tmp-" in name or "commit" in name]
    print(num_lost, "lost of", num_rounds)


RACES = [("directory", False), ("directory", True), ("file", True)]


@pytest.mark.parametrize(("case", "has_old"), RACES)
def test_two_jobs_save_to_one_name(tmp_path, case, has_old):
    """pytorch 196591: fixed names of temporaries, which the other job's save removes or fills."""
    check_races(tmp_path, case, 4, 0, has_old)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "has_old"), RACES)
def test_two_jobs_save_to_one_name_50(tmp_path, case, has_old):
    check_races(tmp_path, case, 17, 1, has_old)


def save_or_load(job, root, num_saves, is_rotating):
    """Job 0 saves one version after the other; job 1 loads until that is done, and returns what it found."""
    done, found = root.parent / "done", []
    with quick_groups() as (group, solo):
        save_one = _save_step if is_rotating else save
        if job == 0:
            save_one(root, 11, group=group)
        meet_other_job(root.parent, job, "begin")
        if job == 0:
            for version in range(12, 12 + num_saves):
                save_one(root, version, group=group)
            if dist.get_rank() == 0:
                done.touch()
        elif dist.get_rank() == 0:
            while not done.exists():
                found.append(read_state(root, group=solo) if is_rotating else read(root, group=solo))
            found.append(read_state(root, group=solo) if is_rotating else read(root, group=solo))
        dist.barrier(group)
    return found


def _save_step(root, version, group):
    save_state(root, version, step=version, keep_last=2, group=group)


def check_loads(tmp_path, num_saves, is_rotating):
    root = tmp_path / "root"
    root.mkdir()
    with two_jobs() as run:
        found = run(save_or_load, root, num_saves, is_rotating)[1][0]
    versions = [int(text) for text in found if text.isdecimal()]
    print(len(found), "loads of", len(set(versions)), "versions")
    assert len(versions) == len(found), [text for text in found if not text.isdecimal()]
    assert versions == sorted(versions)
    assert versions[-1] == 11 + num_saves


@pytest.mark.slow
@pytest.mark.parametrize("is_rotating", [False, True])
def test_loads_beside_saves(tmp_path, is_rotating):
    check_loads(tmp_path, 20, is_rotating)


@pytest.mark.slow
@pytest.mark.parametrize("is_rotating", [False, True])
def test_loads_beside_many_saves(tmp_path, is_rotating):
    check_loads(tmp_path, 500, is_rotating)


class _Replaced(UnsyncedStorage):
    """Storage in which a newer step replaces all others just before the read of a number, and again with each load."""

    def __init__(self, root, at):
        self.root, self.at, self.num_reads, self.version = root, at, 0, 12

    def open_regular(self, path, *, inside=None):
        self.num_reads += 1
        if self.num_reads == self.at and self.version < 15:
            save_state(self.root, self.version, step=self.version, keep_last=1)
            self.version, self.num_reads = self.version + 1, 0
        return super().open_regular(path, inside=inside)


@pytest.mark.parametrize("at", [pytest.param(at, marks=() if at == 12 else pytest.mark.slow) for at in range(1, 24)])
def test_a_load_begins_again_where_what_it_reads_was_removed(tmp_path, at):
    save_state(tmp_path, 11, step=11, keep_last=1)
    storage = _Replaced(tmp_path, at)
    assert read_state(tmp_path, storage=storage).isdecimal()
    assert storage.version > 12 or storage.num_reads < at


@distributed(world_size=2)
@pytest.mark.parametrize("seconds", [0.4, pytest.param(2.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["directory", "file"])
def test_kempnerforge_49_names_that_one_rank_does_not_see_yet(tmp_path, case, seconds):
    """Another host's network file system shows late what rank 0 made: no rank may go by its own look."""
    rank = dist.get_rank()
    for version in (OLD, NEW):
        storage = HidingStorage(seconds) if rank == 1 else UnsyncedStorage()
        save(tmp_path, version, case, storage=storage, host=f"host {rank}")
        assert read(tmp_path, case, storage=storage) == NAMES[version]
        assert rank == 0 or storage.num_hidden > 0
