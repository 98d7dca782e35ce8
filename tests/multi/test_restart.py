"""Ranks that are killed, and that `booster run --max-restarts` starts anew, end where an unbroken run ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import restart_cases
import torch
from harness import distributed, run_ranks
from launcher_cases import plain_environment
from restart_cases import NUM_STEPS, SAVE_EVERY
from torch import nn

from booster import Booster
from booster.errors import CheckpointError, DesyncError
from booster.rng_state import preserved_rng

pytestmark = pytest.mark.on_device

BOOSTER = [sys.executable, "-c", "import sys; from booster.cli import main; sys.exit(main())", "run"]


@pytest.fixture(autouse=True)
def _random_state():
    with preserved_rng():
        yield


def kill(rank: int, at: str, call: int = 1) -> dict:
    return {"rank": rank, "at": at, "call": call}


def unbroken(directory: Path, plugin: str) -> dict:
    return restart_cases.train(directory / "run", plugin)


# One kill for each attempt but the last, and the batch that the next one begins after, or a later one: where a rank is
# killed at a commit, another may have done it. A step has two batches.
CASES = [
    ("zero 2", [kill(1, "commit", 2), kill(0, "backward", 2)], [2, 2]),
    ("tensor parallel", [kill(0, "step", 1), kill(1, "save write", 2)], [0, 2]),
    ("ddp", [kill(0, "forward", 4), kill(0, "commit", 1)], [2, 2]),
    ("ddp", [kill(1, "load"), kill(1, "boost")], [0, 0]),
    ("zero 1", [kill(0, "save plan", 2), kill(1, "clip", 4)], [2, 4]),
    ("gemini", [kill(1, "step", 3), kill(0, "save", 2)], [2, 4]),
    ("gemini on the host", [kill(0, "backward", 6), kill(1, "commit", 1)], [4, 4]),
    ("fsdp", [kill(1, "save write", 3), kill(0, "data", 2)], [4, 4]),
    ("fsdp", [kill(0, "commit", 4), kill(0, "load")], [6, 6]),
    ("pipeline", [kill(1, "backward", 3), kill(0, "commit", 2)], [0, 2]),
]


@pytest.mark.parametrize(
    ("plugin", "kills", "starts"),
    [
        pytest.param(
            *case,
            marks=() if number == 0 else pytest.mark.slow,
            id=f"{case[0]}: " + ", ".join(f"{one['at']} on rank {one['rank']}" for one in case[1]),
        )
        for number, case in enumerate(CASES)
    ],
)
@pytest.mark.slow
def test_ranks_that_are_killed_and_started_anew_lose_nothing(tmp_path, plugin, kills, starts):
    (tmp_path / "broken").mkdir()
    (tmp_path / "whole").mkdir()
    command = [*BOOSTER, "--nproc-per-node", "2", "--max-restarts", str(len(kills)), restart_cases.__file__]
    faults = [*([one] for one in kills), []]
    ended = subprocess.run(
        [*command, str(tmp_path / "broken" / "run"), plugin, json.dumps(faults)],
        env=plain_environment(PYTHONPATH=os.pathsep.join(map(str, Path(restart_cases.__file__).parents[:2]))),
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    expected = run_ranks(unbroken, 2, tmp_path / "whole", plugin, device="cpu")  # as those that were started
    for rank in range(2):
        found = torch.load(tmp_path / "broken" / f"result-{rank}.pt", weights_only=True)
        # What is saved as extra, and loaded by all, is rank 0's.
        first = 0 if rank == 0 else began_after(tmp_path / "broken", rank)[-1]
        assert found["losses"][first:] == expected[rank]["losses"][first:]
        assert len(found["losses"]) == NUM_STEPS
        assert found["scheduler"] == expected[rank]["scheduler"]
        assert found["tensors"].keys() == expected[rank]["tensors"].keys()
        for name, tensor in expected[rank]["tensors"].items():
            assert torch.equal(found["tensors"][name], tensor), name
    assert_files(tmp_path / "broken")
    is_late = not {"load", "boost"} & {one["at"] for one in kills}
    for rank in range(2):
        began = began_after(tmp_path / "broken", rank)
        assert began[-1] >= starts[-1]
        if is_late:  # every attempt came so far
            assert began[0] == 0
            assert all(found >= least for found, least in zip(began[1:], starts, strict=True)), began


def began_after(directory: Path, rank: int) -> list[int]:
    """Returns how many batches each attempt found done that came so far."""
    return [int(line) for line in (directory / f"starts-{rank}").read_text().split()]


def assert_files(directory: Path) -> None:
    """The two latest steps are there and nothing else."""
    steps = [f"step-{step:08d}" for step in (NUM_STEPS - SAVE_EVERY, NUM_STEPS)]
    assert sorted(os.listdir(directory / "run")) == ["latest", *steps]
    assert (directory / "run" / "latest").read_text() == f"{steps[-1]}\n"


def one_device():
    booster = Booster(device="cpu")
    model, *_ = booster.boost(nn.Linear(2, 1))
    return booster, model


def fill(model, value: float) -> None:
    with torch.no_grad():
        model.module.weight.fill_(value)


class TestLatest:
    def test_the_pointer_stands_for_the_directory_that_it_is_in(self, tmp_path, monkeypatch):
        booster, model = one_device()
        for step in (1, 2):
            fill(model, step)
            booster.save(tmp_path / "runs", model, extra=step, step=step)
        fill(model, 0)
        assert booster.load(tmp_path / "runs" / "latest", model) == 2
        assert model.module.weight[0, 0] == 2
        monkeypatch.chdir(tmp_path / "runs")
        assert booster.load("latest", model) == 2

    def test_a_step_that_was_committed_counts_though_the_pointer_was_not_moved(self, tmp_path):
        booster, model = one_device()
        for step in (1, 2):
            booster.save(tmp_path, model, extra=step, step=step)
        (tmp_path / "latest").write_text("step-00000001\n")
        assert booster.load(tmp_path / "latest", model) == 2
        (tmp_path / "latest").unlink()
        assert booster.load(tmp_path / "latest", model, missing_ok=True) == 2

    def test_a_directory_of_that_name_is_itself(self, tmp_path):
        booster, model = one_device()
        booster.save(tmp_path / "latest", model, extra="itself")
        booster.save(tmp_path / "other", model, extra="beside it")
        assert booster.load(tmp_path / "latest", model) == "itself"

    def test_a_link_of_that_name_is_the_step_it_leads_to(self, tmp_path):
        booster, model = one_device()
        for step in (1, 2):
            booster.save(tmp_path, model, extra=step, step=step)
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").symlink_to("step-00000001")
        assert booster.load(tmp_path / "latest", model) == 1

    @pytest.mark.parametrize("place", [".", "latest", "never/made", "never/made/latest"])
    def test_where_there_is_none_it_says_so_or_returns_none(self, tmp_path, place):
        booster, model = one_device()
        fill(model, 3)
        with pytest.raises(CheckpointError, match=r"holds no training state.*missing_ok=True") as caught:
            booster.load(tmp_path / place, model)
        assert (f"{tmp_path / 'never'}/made does not exist" in str(caught.value)) == place.startswith("never")
        assert booster.load(tmp_path / place, model, missing_ok=True) is None
        assert model.module.weight[0, 0] == 3

    def test_what_is_damaged_is_not_missing(self, tmp_path):
        booster, model = one_device()
        booster.save(tmp_path, model, extra=1, step=1)
        for path in (tmp_path / "step-00000001").glob("*manifest.json"):
            path.write_text("{")
        with pytest.raises(CheckpointError):
            booster.load(tmp_path, model, missing_ok=True)


@distributed(world_size=2)
def test_all_ranks_begin_anew_where_nothing_was_saved(tmp_path):
    booster = Booster(plugin="torch_ddp")
    model, *_ = booster.boost(nn.Linear(2, 1))
    assert booster.load(tmp_path / "latest", model, missing_ok=True) is None
    booster.save(tmp_path, model, extra=5, step=5)
    assert booster.load(tmp_path / "latest", model, missing_ok=True) == 5


@distributed(world_size=2, fresh=True)
def test_ranks_that_disagree_whether_it_may_be_missing(tmp_path):
    booster = Booster(plugin="torch_ddp")
    model, *_ = booster.boost(nn.Linear(2, 1))
    with pytest.raises(DesyncError, match="missing_ok"):
        booster.load(tmp_path, model, missing_ok=torch.distributed.get_rank() == 1)
