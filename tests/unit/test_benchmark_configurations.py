"""Which configurations a number of ranks allows, and what is said of the others."""

from __future__ import annotations

import math

import pytest

from booster.cli.benchmark.config import MODES, BenchmarkSettings, Configuration, find_configurations, modes_from_text
from booster.errors import ConfigError


def names(num_ranks, modes=MODES, **sizes):
    settings = BenchmarkSettings(**({"num_ranks": num_ranks, "modes": modes, "batch": 720, "hidden": 720} | sizes))
    found, left_out = find_configurations(settings)
    return [one.name for one in found], {one.name: one.reason for one in left_out}


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, []),
        (2, ["1d tp=2 dp=1"]),
        (3, ["1d tp=3 dp=1"]),
        (4, ["1d tp=4 dp=1", "1d tp=2 dp=2", "2d q=2"]),
        (6, ["1d tp=6 dp=1", "1d tp=3 dp=2", "1d tp=2 dp=3"]),
        (8, ["1d tp=8 dp=1", "1d tp=4 dp=2", "1d tp=2 dp=4", "2.5d depth=2 q=2", "3d q=2"]),
        (9, ["1d tp=9 dp=1", "1d tp=3 dp=3", "2d q=3"]),
        (12, [*(f"1d tp={tp} dp={12 // tp}" for tp in (12, 6, 4, 3, 2)), "2.5d depth=3 q=2"]),
        (16, [*(f"1d tp={tp} dp={16 // tp}" for tp in (16, 8, 4, 2)), "2d q=4", "2.5d depth=4 q=2"]),
        (27, ["1d tp=27 dp=1", "1d tp=9 dp=3", "1d tp=3 dp=9", "2.5d depth=3 q=3", "3d q=3"]),
    ],
)
def test_every_configuration_of_a_number_of_ranks(num_ranks, expected):
    found, _ = names(num_ranks, batch=432 * num_ranks, hidden=432 * num_ranks)
    ranks = f"dp={num_ranks}"
    assert found == [*expected, ranks, f"zero1 {ranks}", f"zero2 {ranks}", f"gemini {ranks}"]


@pytest.mark.parametrize("num_ranks", range(1, 65))
def test_the_sizes_of_every_configuration_make_up_all_ranks(num_ranks):
    found, left_out = find_configurations(BenchmarkSettings(num_ranks=num_ranks, batch=num_ranks, hidden=num_ranks**2))
    for one in found:
        sizes = one.sizes
        power = {"2d": 2, "2.5d": 2, "3d": 3}.get(one.mode, 1)
        assert math.prod(size**power if axis == "q" else size for axis, size in sizes.items()) == num_ranks
    named = {one.mode for one in found} | {one.name.split()[0] for one in left_out}
    assert named | {"dp"} == set(MODES)  # dp calls itself by its size
    assert len({one.name for one in found}) == len(found)


def test_a_single_square_is_measured_once():
    found, left_out = names(4)
    assert "2d q=2" in found
    assert left_out["2.5d depth=1 q=2"] == "the same as 2d q=2"
    assert names(4, modes=("2.5d",)) == (["2.5d depth=1 q=2"], {})


@pytest.mark.parametrize(
    ("num_ranks", "mode", "possible"),
    [
        (1, "1d", "2, 3, 4, 5"),
        (3, "2d", "4, 9, 16, 25"),
        (5, "2d", "4, 9, 16, 25"),
        (7, "2.5d", "4, 8, 9, 12"),
        (10, "2.5d", "9, 12, 16, 18"),
        (9, "3d", "8, 27, 64, 125"),
    ],
)
def test_a_mode_without_a_configuration_says_what_would_do(num_ranks, mode, possible):
    _, left_out = names(num_ranks, modes=(mode, "dp"), batch=num_ranks)
    assert left_out[mode].startswith(f"not possible with -g {num_ranks}: it needs ")
    assert left_out[mode].endswith(f", so -g {possible}, ...")


@pytest.mark.parametrize(
    ("num_ranks", "mode", "sizes", "message"),
    [
        (4, "2d", {"hidden": 7}, r"2d q=2: the hidden size \(-d\) is 7, .* use 6 or 8"),
        (8, "2.5d", {"hidden": 3}, r"hidden .* is 3, which is not divisible by 2 ranks: use 2 or 4"),
        (8, "3d", {"hidden": 2}, r"hidden .* is 2, which is not divisible by 4 ranks: use 4"),
        (4, "zero2", {"batch": 2}, r"zero2 dp=4: the batch \(-b\) is 2, which is not divisible by 4 ranks: use 4"),
        (3, "2d", {}, r"not possible with -g 3"),
    ],
)
def test_nothing_to_measure_is_an_error_with_all_reasons(num_ranks, mode, sizes, message):
    with pytest.raises(ConfigError, match=message):
        names(num_ranks, modes=(mode,), **sizes)


def test_sizes_that_some_configurations_do_not_allow_are_named():
    found, left_out = names(4, batch=6, sequence=2)
    assert found == ["1d tp=4 dp=1", "1d tp=2 dp=2", "2d q=2"]
    assert set(left_out) == {"2.5d depth=1 q=2", "3d", "dp=4", "zero1 dp=4", "zero2 dp=4", "gemini dp=4"}
    assert "is 6, which is not divisible by 4 ranks: use 4 or 8" in left_out["dp=4"]


def test_modes_are_read_in_any_order_and_once():
    assert modes_from_text(" zero1,1D, 2.5d,1d") == ("1d", "2.5d", "zero1")
    assert modes_from_text("all") == MODES
    for text in ("", "1d,,2d", "4d", "all,1d"):
        with pytest.raises(ConfigError, match=r"is not a mode: choose from 1d,2d,.*, or give all"):
            modes_from_text(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 0}, "-g/--nproc=0"),
        ({"batch": 0}, "-b/--batch-size=0"),
        ({"sequence": -1}, "-s/--sequence-length=-1"),
        ({"hidden": 0}, "-d/--hidden=0"),
        ({"layers": 0}, "-l/--layers=0"),
        ({"warmup_steps": -1}, "-w/--warmup-steps=-1 .* from 0"),
        ({"profile_steps": 0}, "-p/--profile-steps=0 .* from 1"),
        ({"timeout_seconds": 0.0}, "--timeout=0"),
        ({"timeout_seconds": float("nan")}, "--timeout=nan"),
    ],
)
def test_numbers_that_cannot_work(arguments, message):
    with pytest.raises(ConfigError, match=message):
        BenchmarkSettings(**arguments)


def test_names():
    assert Configuration("serial").name == "serial"
    assert Configuration("dp", {"dp": 2}).name == "dp=2"
    assert Configuration("gemini", {"dp": 2}).name == "gemini dp=2"
