"""Launching in one process: what the environment says, what is refused, and what a second call does."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from booster.errors import ConfigError
from booster.launch.coordinator import DistCoordinator
from booster.launch.environments import read_openmpi, read_slurm, read_torch
from booster.launch.launch import (
    destroy_world,
    get_config,
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)

TORCH = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in (*TORCH, *SLURM, *OPENMPI, "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    yield
    destroy_world()


def set_environment(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_without_a_launcher_it_is_a_world_of_one_and_says_so(capsys):
    launch_from_torch()
    assert dist.get_world_size() == 1
    assert dist.get_rank() == 0
    launch_from_torch()
    assert capsys.readouterr().err.count("a world of one") == 1


def test_world_of_one_runs_collectives():
    launch_from_torch(verbose=False)
    numbers = torch.arange(3.0)
    dist.all_reduce(numbers)
    assert torch.equal(numbers, torch.arange(3.0))


def test_all_generators_are_seeded():
    drawn = []
    for _ in range(2):
        launch_from_torch(seed=7, verbose=False)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        destroy_world()
    assert drawn[0] == drawn[1]


def test_verbose_false_is_silent_about_the_launch(capsys):
    launch(0, 1, "", 0, verbose=False)
    assert capsys.readouterr().err == ""


def test_second_call_with_the_same_settings_changes_nothing():
    launch_from_torch(seed=5, verbose=False)
    group = dist.group.WORLD
    state = torch.get_rng_state()
    torch.rand(3)
    launch_from_torch(seed=5, verbose=False)
    assert dist.group.WORLD is group
    assert not torch.equal(torch.get_rng_state(), state), "the second call seeded again"


def test_second_call_with_other_settings_names_both():
    launch_from_torch(seed=5, verbose=False)
    with pytest.raises(ConfigError, match=r"before with seed=5 and now with seed=6.*destroy"):
        launch_from_torch(seed=6, verbose=False)


def test_second_call_with_another_config_is_refused():
    launch_from_torch(verbose=False, config={"lr": 1})
    launch_from_torch(verbose=False, config={"lr": 1})
    launch_from_torch(verbose=False)
    with pytest.raises(ConfigError, match=r"'lr': 1.*'lr': 2"):
        launch_from_torch(verbose=False, config={"lr": 2})


def test_after_destroy_another_launch_is_possible():
    launch_from_torch(seed=5, verbose=False)
    DistCoordinator().destroy()
    assert not dist.is_initialized()
    launch_from_torch(seed=6, verbose=False)
    assert dist.is_initialized()


def test_a_group_that_the_user_destroyed_is_launched_anew():
    launch_from_torch(seed=5, verbose=False)
    dist.destroy_process_group()
    launch_from_torch(seed=6, verbose=False)
    assert dist.is_initialized()


def test_the_users_own_group_is_adopted_and_left_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    launch_from_torch(verbose=False, config={"lr": 1})
    assert dist.group.WORLD is group
    assert get_config().lr == 1


def test_the_users_own_group_of_another_size_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"rank=0, world_size=1, .* the launch has rank=1, world_size=2"):
        launch(1, 2, "localhost", 29500)


def test_the_users_own_group_of_another_backend_is_refused():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"backend='fake' and .* backend='gloo'"):
        launch(0, 1, "", 0, backend="gloo")


@pytest.mark.parametrize(
    ("read", "variables", "host"),
    [
        (read_torch, TORCH, "localhost"),
        (lambda: read_slurm("node", 7), SLURM, "node"),
        (lambda: read_openmpi("node", 7), OPENMPI, "node"),
    ],
)
def test_places_are_read(monkeypatch, read, variables, host):
    set_environment(monkeypatch, variables)
    place = read()
    assert (place.rank, place.world_size) == tuple(int(value) for value in list(variables.values())[:2])
    assert (place.local_rank, place.host) == (1, host)


@pytest.mark.parametrize("name", TORCH)
def test_a_missing_torch_variable_is_named(monkeypatch, name):
    set_environment(monkeypatch, {key: value for key, value in TORCH.items() if key != name})
    with pytest.raises(ConfigError, match=f"missing: {name};"):
        launch_from_torch()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["two", "-1", "1.5"])
def test_a_torch_variable_that_is_no_number_is_named(monkeypatch, name, value):
    set_environment(monkeypatch, TORCH | {name: value})
    with pytest.raises(ConfigError, match=f"are not numbers: {name}='{value}'"):
        launch_from_torch()


@pytest.mark.parametrize("variables", [SLURM, OPENMPI])
def test_slurm_and_openmpi_variables_are_checked(monkeypatch, variables):
    function = launch_from_slurm if variables is SLURM else launch_from_openmpi
    with pytest.raises(ConfigError, match=", ".join(variables)):
        function("localhost", 29500)
    rank_name = next(iter(variables))
    set_environment(monkeypatch, variables | {rank_name: "x"})
    with pytest.raises(ConfigError, match=f"{rank_name}='x'"):
        function("localhost", 29500)


def test_slurm_world_of_one(monkeypatch):
    set_environment(monkeypatch, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"})
    launch_from_slurm("localhost", 29500, verbose=False)
    assert dist.get_world_size() == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 2}, "rank=2 with world_size=2 is outside"),
        ({"world_size": 0}, "world_size=0"),
        ({"local_rank": 5}, "local_rank=5"),
        ({"port": 0}, "port=0"),
        ({"port": 70000}, "port=70000"),
        ({"host": ""}, "host=''"),
        ({"backend": "carrier_pigeon"}, r"'carrier_pigeon'.*gloo"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed=4294967296"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
        ({"config": "nowhere.py"}, "nowhere.py"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_starts(changes, message):
    arguments = {"rank": 0, "world_size": 2, "host": "localhost", "port": 29500} | changes
    with pytest.raises(ConfigError, match=message):
        launch(**arguments)
    assert not dist.is_initialized()


def test_get_config_without_a_launch_or_a_config():
    with pytest.raises(ConfigError, match="before a launch"):
        get_config()
    launch_from_torch(verbose=False)
    with pytest.raises(ConfigError, match="got no config"):
        get_config()


def test_config_file_is_read_at_launch(tmp_path):
    path = tmp_path / "settings.py"
    path.write_text("lr = 0.1\nmodel = {'dim': 8}\n")
    launch_from_torch(verbose=False, config=path)
    assert get_config().model.dim == 8


def test_default_parser():
    given = {"config": "c.py", "host": "h", "port": 1, "world_size": 2, "rank": 1, "local_rank": 0, "backend": "gloo"}
    arguments = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    assert vars(get_default_parser().parse_args(arguments)) == given
