"""The code of benchmarks/checkpoint: disk and cache, figures and targets, and a run on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import benchmark_ranks
import pytest
import torch
from harness import RanksFailed, run_ranks

MIB = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the disk's figures need Linux")


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules under their names."""
    return SimpleNamespace(**benchmark_ranks.import_benchmark("checkpoint"))


@pytest.fixture
def disk(bench, tmp_path):
    """A folder on a file system that can forget what it holds in memory, and can write past it."""
    if bench.disk.file_system(tmp_path) in ("tmpfs", "ramfs", "overlay"):
        pytest.skip("the temporary folder lies in memory")
    return tmp_path


# The state.


@pytest.mark.parametrize("mebibytes", [1, 64, 128, 1024])
def test_the_state_is_as_large_as_asked_for(bench, mebibytes):
    size = bench.state.size_of(mebibytes * MIB)
    with torch.device("meta"):
        model = bench.gpt.GPT(size)
    num_bytes = sum(parameter.numel() for parameter in model.parameters()) * bench.state.BYTES_PER_PARAMETER
    assert num_bytes == pytest.approx(mebibytes * MIB, rel=0.1)
    assert size.width % size.heads == 0


# The disk.


def test_file_systems_have_names(bench, tmp_path):
    assert str(bench.disk.file_system(bench.disk.Path("/proc/self"))) == "proc"
    assert bench.disk.file_system(tmp_path) != "unknown"


@pytest.mark.parametrize("num_bytes", [1, 4096, 16 * MIB, 16 * MIB + 5])
@pytest.mark.parametrize("is_direct", [True, False])
def test_raw_writes_are_as_long_as_asked_for(bench, disk, num_bytes, is_direct):
    path = disk / "raw"
    bench.disk.write_raw(path, num_bytes, is_direct=is_direct)
    assert path.stat().st_size == num_bytes
    assert num_bytes < 4096 or len(set(path.read_bytes()[:4096])) > 200  # nothing that a disk could save time on
    if is_direct:
        bench.disk.read_raw(path)
    with pytest.raises(FileExistsError):
        bench.disk.write_raw(path, 1, is_direct=is_direct)


def test_what_lies_in_the_page_cache_is_seen_and_dropped(bench, disk):
    (disk / "inner").mkdir()
    (disk / "a").write_bytes(bytes(MIB))
    (disk / "inner" / "b").write_bytes(bytes(3 * MIB))
    (disk / "empty").touch()
    bench.disk.sync_files(disk)
    assert bench.disk.cached_share(disk) == 1.0
    # Only this one file: drop_cached may ask for all of the machine where that does not help.
    descriptor = os.open(disk / "inner" / "b", os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    assert bench.disk.cached_share(disk) == pytest.approx(0.25)
    assert bench.disk.drop_cached(disk) == 0.0
    assert (disk / "a").read_bytes() == bytes(MIB)
    assert bench.disk.cached_share(disk) == pytest.approx(0.25)
    bench.disk.read_cached(disk)
    assert bench.disk.cached_share(disk) == 1.0


# The figures.


def _measured(bench, saves, loads=(), settles=(), warm_loads=(), num_bytes=1000):
    times = {"saves": saves, "loads": loads, "settles": settles, "warm_loads": warm_loads}
    return bench.measure.Measured(num_bytes=num_bytes, **{name: list(seconds) for name, seconds in times.items()})


def _ranks(bench):
    """Two ranks whose every second counts: in each round another one is the slowest."""
    variants = bench.variants
    first = {
        variants.BASELINE: _measured(bench, [1.0, 2.0, 1.0], [1.0, 1.0, 1.0]),
        variants.CONTROL: _measured(bench, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        variants.OURS: _measured(bench, [1.0, 1.0, 1.0], [0.5, 0.5, 0.5], warm_loads=[0.2, 0.2, 0.2]),
        variants.SAFETENSORS: _measured(bench, [3.0, 3.0, 3.0], [1.0, 1.0, 1.0], num_bytes=500),
        variants.ASYNC_BASELINE: _measured(bench, [0.1, 0.1, 0.1], warm_loads=[0.1, 0.15, 0.2]),
        variants.OURS_ASYNC: _measured(bench, [0.11, 0.11, 0.11], settles=[1.0, 1.0, 1.0]),
    }
    second = {name: one for name, one in first.items() if name != variants.OURS}
    second[variants.OURS] = _measured(bench, [0.5, 4.0, 0.5], [0.5, 0.5, 0.25], warm_loads=[0.1, 0.1, 0.1])
    return [first, second]


def test_rows_pair_every_round_with_the_baseline_on_the_slowest_rank(bench):
    ranks = _ranks(bench)
    peaks = [{name: bench.measure.Peaks(save=rank * 100, load=None) for name in ranks[0]} for rank in range(2)]
    rows = {row.name: row for row in bench.report.rows_of(bench.variants.WAYS, ranks, peaks)}
    ours = rows[bench.variants.OURS]
    assert ours.save.seconds.median == 1.0
    assert (ours.save.share.low, ours.save.share.median, ours.save.share.high) == (0.5, 1.0, 1.0)
    assert ours.save.bytes_per_second == 1000
    assert (ours.save.peak_bytes, ours.load.peak_bytes) == (100, None)
    assert ours.load.share.median == 2.0
    assert ours.warm_load.share.median == pytest.approx(0.75)
    # Half as many bytes in three times the time.
    assert rows[bench.variants.SAFETENSORS].save.share.low == pytest.approx(1 / 6)
    assert rows[bench.variants.OURS_ASYNC].durable.median == pytest.approx(1.11)
    assert rows[bench.variants.OURS_ASYNC].save.share.median == pytest.approx(0.1 / 0.11)
    assert rows[bench.variants.DCP].save is None
    text = "\n\n".join(bench.report.format_rows(list(rows.values())))
    assert "not installed" in text
    assert "NOT COLD" not in text


def test_a_load_from_memory_is_told(bench):
    ranks = _ranks(bench)
    ranks[1][bench.variants.OURS].cached = 0.5
    rows = bench.report.rows_of(bench.variants.WAYS, ranks, [])
    assert "booster.save: 50% of the files were in memory" in "\n".join(bench.report.format_rows(rows))


def test_targets_compare_with_what_was_measured(bench):
    ranks = _ranks(bench)
    peaks = [{name: bench.measure.Peaks(save=81 * MIB, load=80 * MIB) for name in ranks[0]}]
    targets = bench.report.targets_of(ranks, bench.report.rows_of(bench.variants.WAYS, ranks, peaks))
    verdicts = {target.what: (round(target.value, 3), target.verdict) for target in targets}
    assert verdicts == {
        "durable save: share of raw O_DIRECT": (1.0, "PASS"),
        "durable save: times as fast as save_file and fsync": (3.0, "PASS"),
        "cold load: share of raw O_DIRECT": (2.0, "PASS"),
        "cold load: times as fast as safetensors.load_file": (2.0, "PASS"),
        "warm load: share of a copy in memory": (0.75, "PASS"),
        "asynchronous save: blocks, over a copy into persistent buffers": (1.1, "PASS"),
        "extra memory per rank while saving": (81.0, "FAIL"),
        "extra memory per rank while loading": (80.0, "PASS"),
    }


# A run.


@pytest.mark.slow
def test_the_limits_and_the_peers_save_and_load(bench, disk):
    names = [
        bench.variants.BASELINE,
        bench.variants.SAFETENSORS,
        "torch.save, fsync",
        bench.variants.DCP,
        bench.variants.ASYNC_BASELINE,
    ]
    for times, peaks in run_ranks(benchmark_ranks.measure_checkpoints, 2, str(disk), MIB, names, fresh=True):
        assert list(times) == names
        assert list(peaks) == names
        assert all(len(one["saves"]) == 2 for one in times.values())
        assert [len(one["loads"]) for one in times.values()] == [2, 2, 2, 2, 0]
        assert [len(one["warm_loads"]) for one in times.values()] == [0, 2, 2, 2, 2]
        assert all(one["cached"] <= bench.disk.COLD_SHARE for one in times.values())
        assert peaks[bench.variants.SAFETENSORS]["load"] > 0
    assert not os.listdir(disk)


@pytest.mark.slow
def test_ours_saves_and_loads(bench, disk):
    names = [bench.variants.OURS, bench.variants.OURS_ASYNC]
    ((times, _), _) = run_ranks(benchmark_ranks.measure_checkpoints, 2, str(disk), MIB, names, fresh=True)
    assert list(times) == names
    assert len(times[bench.variants.OURS]["loads"]) == len(times[bench.variants.OURS_ASYNC]["settles"]) == 2
    assert not os.listdir(disk)


@pytest.mark.slow
def test_a_load_that_brings_back_less_fails_the_run(tmp_path):
    with pytest.raises(RanksFailed, match="'forgetful' failed: the load did not bring back what was saved"):
        run_ranks(benchmark_ranks.measure_forgetful, 2, str(tmp_path), MIB, fresh=True)


@pytest.mark.slow
def test_the_whole_script(disk):
    script = benchmark_ranks.BENCHMARKS / "checkpoint" / "run.py"
    arguments = ["--size-mib", "1", "--repeats", "1", "--directory", str(disk)]
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "durable save: share of raw O_DIRECT" in done.stdout
    assert not os.listdir(disk)


def test_a_directory_in_memory_is_refused(bench, capsys):
    if not os.path.isdir("/dev/shm"):
        pytest.skip("there is no /dev/shm")
    with pytest.raises(SystemExit, match="2"):
        bench.script.main(["--directory", "/dev/shm"])
    assert "lies in memory (tmpfs)" in capsys.readouterr().err


def test_rows_are_ready_for_json(bench):
    rows = bench.report.rows_of(bench.variants.WAYS, _ranks(bench), [])
    assert json.loads(json.dumps([asdict(row) for row in rows]))[0]["name"] == bench.variants.BASELINE
