"""`booster profile-mesh`: what the ranks measure, and its file."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import distributed
from machine_profiles import short_measurement

from booster.cli import main
from booster.comm import all_gather_bytes
from booster.estimate import machine_speed
from booster.estimate.machine_profile import BYTE_KINDS, FLOP_KINDS, load_profile


@distributed(world_size=2)
def test_all_ranks_measure_one_profile():
    with short_measurement():
        profile = machine_speed.measure_machine()
    assert len(all_gather_bytes(repr(profile).encode())[0]) == 1  # the slowest rank's times, on all of them
    assert set(profile.operators) == {*FLOP_KINDS, *BYTE_KINDS}
    assert set(profile.operators["matmul"]) == {"float32", "bfloat16"}
    for curves in profile.operators.values():
        for curve in curves.values():
            assert all(seconds > 0 for _, seconds in curve.points)
    assert [amount for amount, _ in profile.curve("matmul", "float32").points] == [2 * 32**3, 2 * 64**3]
    assert {one.operation for one in profile.collectives} == set(machine_speed._COLLECTIVES)
    for one in profile.collectives:
        assert (one.num_ranks, one.num_hosts, one.transport) == (2, 1, "shared memory")
        assert one.latency + one.seconds_per_byte > 0
        assert 0 <= one.overlap <= 1
    assert profile.call_seconds > 0
    assert profile.step_call_seconds > 0
    assert profile.wait_seconds >= 0
    assert profile.ranks_per_core == 1


@pytest.mark.slow
def test_the_command_writes_a_profile(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("BOOSTER_PROFILE_CACHE", str(tmp_path))
    assert main(["profile-mesh", "--nproc", "1"]) == 0
    text = capsys.readouterr().out
    path = Path(text.rpartition("written to ")[2].strip())
    assert path.parent == tmp_path
    profile = load_profile(path)
    assert (profile.num_ranks, list(profile.collectives)) == (1, [])
    assert "matmul" in text
    assert "GFLOP/s in float32" in text


@pytest.mark.slow
def test_a_rank_that_fails_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("BOOSTER_SHARED_MEMORY", "sometimes")  # a rank refuses it
    assert main(["profile-mesh", "--nproc", "2", "--output", str(tmp_path / "profile.json")]) == 1
    error = capsys.readouterr().err
    assert "measuring 2 rank(s) failed with exit code" in error
    assert "BOOSTER_SHARED_MEMORY" in error


def test_mistakes_are_refused_before_anything_is_measured(tmp_path, capsys):
    assert main(["profile-mesh", "--nproc", "0"]) == 2
    assert "--nproc 0 is not positive" in capsys.readouterr().err
    target = tmp_path / "file"
    target.write_text("")
    assert main(["profile-mesh", "--nproc", "1", "--output", str(target / "profile.json")]) == 2
    assert "can't be written" in capsys.readouterr().err
