"""The measuring code of benchmarks/disk/run.py: figures and targets, what its variants move, and a short run."""

import importlib
import os
import sys
from types import SimpleNamespace

import benchmark_ranks
import pytest
from disk_cases import MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the disk's figures need Linux")


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules under their names."""
    before = list(sys.path)
    sys.path.insert(0, str(benchmark_ranks.BENCHMARKS))
    try:
        parts = {name: importlib.import_module(f"disk.{name}") for name in ("raw", "report", "variants")}
        others = {"samples": importlib.import_module("_harness.samples")}
        others["checkpoint_disk"] = importlib.import_module("checkpoint.disk")
        return SimpleNamespace(**parts, **others, script=importlib.import_module("disk.run"))
    finally:
        sys.path[:] = before


@pytest.fixture
def disk(bench, tmp_path):
    if bench.checkpoint_disk.file_system(tmp_path) in ("tmpfs", "ramfs", "overlay"):
        pytest.skip("the temporary folder lies in memory")
    return tmp_path


def _samples(bench, loop, queue, step, memory):
    seconds = {
        "raw: plain loop": loop,
        "raw: queue": queue,
        bench.variants.ON_DISK: step,
        bench.variants.IN_MEMORY: memory,
    }
    return {name: bench.samples.Samples(seconds=one, losses=[]) for name, one in seconds.items()}


def test_shares_are_of_the_fastest_raw_variant_of_the_round(bench):
    samples = _samples(bench, [2.0, 4.0, 2.0], [4.0, 2.0, 2.0], [4.0, 4.0, 4.0], [1.0, 1.0, 1.0])
    counts = {name: bench.report.ByteCounts(read=100, written=60) for name in samples}
    rows = bench.report.rows_of(samples, counts)
    assert [row.share.median for row in rows] == [1.0, 1.0, 0.5, 2.0]
    assert rows[2].bytes_per_second == 40.0
    assert "0.500" in bench.report.format_rows(rows)
    share, times = bench.report.targets_of(samples)
    assert (share.value, share.verdict) == (0.5, "FAIL")
    assert (times.value, times.verdict) == (2.0, "FAIL")


def test_the_limit_is_the_larger_of_disk_and_arithmetic(bench):
    samples = _samples(bench, [2.0] * 3, [3.0] * 3, [4.0] * 3, [4.0] * 3)
    share, times = bench.report.targets_of(samples)
    assert share.value == 0.5
    assert (times.value, times.verdict) == (1.0, "PASS")


def test_variants_move_the_same_bytes_and_leave_the_states_valid(bench, disk):
    variants = bench.variants.Variants(disk, 1)
    steps = variants.steps()
    assert variants.num_bytes == 16 * MIB == 8 * variants.num_parameters
    assert list(steps) == ["raw: plain loop", "raw: queue", bench.variants.ON_DISK, bench.variants.IN_MEMORY]
    for index in range(3):
        for name in [*steps][index:] + [*steps][:index]:
            counts = bench.report.ByteCounts()
            bench.report.counting(steps[name], counts)(index)
            expected = variants.num_bytes if variants.is_direct and name != bench.variants.IN_MEMORY else 0
            if variants.is_direct:
                assert expected <= counts.read <= expected + MIB
                assert expected <= counts.written <= expected + MIB
    assert variants.has_same_weights()
    variants.close()


def test_wrong_states_are_noticed(bench, disk):
    variants = bench.variants.Variants(disk, 1)
    variants.steps()[bench.variants.ON_DISK](0)
    assert not variants.has_same_weights()
    variants.close()


@pytest.mark.slow
def test_a_short_run(bench, disk, capsys):
    assert bench.script.main(["--directory", str(disk), "--parameters", "1", "--rounds", "3"]) == 0
    printed = capsys.readouterr().out
    assert "2.1M parameters, 3 paired rounds" in printed
    assert bench.variants.ON_DISK in printed
    assert "share of the raw read and write bandwidth" in printed
    assert os.listdir(disk) == []


def test_memory_is_no_disk(bench, capsys):
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    with pytest.raises(SystemExit):
        bench.script.main(["--directory", "/dev/shm"])
    assert "lies in memory" in capsys.readouterr().err
