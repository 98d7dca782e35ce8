"""A chain of kills and resumes ends where an unbroken run ends: a short one by default, and long ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_cases import plain_environment

FOLDER = Path(__file__).parent
FAILED_BEFORE = sorted((FOLDER / "seeds").glob("soak-*.json"))


def run_soak(seeds: Path, *arguments: object, seconds: int) -> str:
    """Returns what a soak printed; fails unless it ended well."""
    command = [sys.executable, str(FOLDER / "soak.py"), "--seconds", str(seconds), "--seeds", str(seeds)]
    ended = subprocess.run(
        [*command, *map(str, arguments)],
        env=plain_environment(),
        text=True,
        capture_output=True,
        timeout=seconds + 240,  # of the last cycle, on a busy machine
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_a_short_chain_over_changing_layouts_loses_nothing(tmp_path):
    printed = run_soak(tmp_path, "--cycles", 4, "--steps", 20, "--seed", 5, seconds=240)
    assert "4 cycles" in printed
    assert "to step 20," in printed


@pytest.mark.slow
def test_a_short_chain_of_one_layout_is_the_same_bit_for_bit(tmp_path):
    printed = run_soak(tmp_path, "--same-layout", "--cycles", 3, "--steps", 12, "--seed", 1, seconds=240)
    assert "the same bit for bit" in printed


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("--same-layout",)], ids=["changing", "one layout"])
@pytest.mark.parametrize("seed", [10, 11, 12])
def test_a_long_chain_loses_nothing(tmp_path, seed, layout):
    printed = run_soak(tmp_path, "--cycles", 25, "--steps", 250, "--seed", seed, *layout, seconds=600)
    assert "25 cycles" in printed


@pytest.mark.slow
@pytest.mark.parametrize("path", FAILED_BEFORE, ids=lambda path: path.stem)
def test_what_failed_once_does_not_fail_again(tmp_path, path):
    num_cycles = len(json.loads(path.read_text())["cycles"])
    assert f": {num_cycles} cycles (" in run_soak(tmp_path, "--replay", path, seconds=600)


# What a soak must notice, each in a run that goes wrong on purpose.
CYCLE = {"layout": "ddp", "world_size": 2, "num_steps": 4, "save_every": 2, "use_async": False}
SETTINGS = {"seed": 0, "num_cycles": 2, "num_steps": 8, "accumulation": 1, "same_layout": False}
MISTAKES = {
    "a step is lost": (
        "self.booster.load(path, *self.parts, missing_ok=True)",
        "(self.booster.load(path, *self.parts, missing_ok=True), None if not (self.root / 'latest').exists()"
        " else next(iter(self.loader)))[0]",
        "saw samples",
    ),
    "the optimizer's state is lost": (
        "return self.model, self.optimizer, self.scheduler, self.loader",
        "return self.model, None, self.scheduler, self.loader",
        "differs by",
    ),
    "a save is lost": (
        'return 0 if extra is None else extra["step"]',
        'return 0 if extra is None else extra["step"] - 1',
        "began after step",
    ),
    "ranks that are left say nothing of use": (
        "except BaseException as error:",
        "except BaseException as error:\n            error = OSError('something went wrong')",
        "raised OSError",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_soak_notices(tmp_path, mistake):
    before, after, complaint = MISTAKES[mistake]
    for name in ("soak.py", "soak_plan.py", "soak_rank.py", "soak_serial.py"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    source = (tmp_path / "soak_rank.py").read_text()
    assert source.count(before) == 1
    (tmp_path / "soak_rank.py").write_text(source.replace(before, after))
    first = CYCLE | {"ends": "kill", "rank": 1, "at": "backward", "call": 4}
    chain = {"format": "soak 1", "failure": mistake, "settings": SETTINGS, "cycles": [first, CYCLE | {"num_steps": 8}]}
    (tmp_path / "chain.json").write_text(json.dumps(chain))
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "soak.py"), "--replay", str(tmp_path / "chain.json")],
        env=plain_environment(),
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert complaint in ended.stdout
    assert json.loads((tmp_path / "chain.again.json").read_text())["cycles"]
