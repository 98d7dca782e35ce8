"""The coordinator in a world of one, and where a launch was forgotten. Several ranks: tests/multi."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from booster.errors import ConfigError
from booster.launch.coordinator import DistCoordinator
from booster.launch.launch import destroy_world, launch_from_torch


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    destroy_world()


@pytest.fixture(params=[False, True], ids=["unlaunched", "launched"])
def coordinator(request):
    if request.param:
        launch_from_torch(verbose=False)
    return DistCoordinator()


def test_world_of_one(coordinator):
    assert (coordinator.rank, coordinator.world_size, coordinator.local_rank) == (0, 1, 0)
    assert coordinator.is_master()
    assert coordinator.is_node_master()
    assert coordinator.is_last_process()


def test_printing(coordinator, capsys):
    coordinator.print_on_master("one")
    coordinator.print_on_node_master("two")
    assert capsys.readouterr().out == "one\ntwo\n"


def test_priority_execution_runs_and_raises_what_the_block_raises(coordinator):
    ran = []
    with coordinator.priority_execution():
        ran.append(1)
    with pytest.raises(KeyError, match="mine"), coordinator.priority_execution():
        raise KeyError("mine")
    with pytest.raises(ConfigError, match="executor_rank=1"), coordinator.priority_execution(executor_rank=1):
        ran.append(2)
    assert ran == [1]


def test_on_master_only_keeps_name_and_result(coordinator):
    @coordinator.on_master_only()
    def double(number):
        return 2 * number

    assert double(4) == 8
    assert double.__name__ == "double"


def test_block_all_and_destroy(coordinator):
    coordinator.block_all()
    coordinator.destroy()
    assert not dist.is_initialized()
    coordinator.destroy()


def test_other_ranks_of_a_larger_world():
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    coordinator = DistCoordinator()
    ran = coordinator.on_master_only()(lambda: "ran")
    assert not coordinator.is_master()
    assert coordinator.is_last_process()
    assert ran() is None


def test_groups(capsys):
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    mine, other = dist.new_group([2, 3]), dist.new_group([0, 1])
    coordinator = DistCoordinator()
    assert coordinator.is_master(mine)
    assert not coordinator.is_last_process(mine)
    assert not coordinator.is_master(other)
    assert not coordinator.is_last_process(other)
    coordinator.print_on_master("mine", mine)
    coordinator.print_on_master("other", other)
    assert capsys.readouterr().out == "mine\n"


def test_a_forgotten_launch_is_said(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"call booster\.launch_from_torch\(\) first"):
        DistCoordinator()


def test_a_launcher_of_one_rank_needs_no_launch(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert DistCoordinator().world_size == 1
