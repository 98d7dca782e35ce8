"""Where ranks under srun and mpirun meet, and what is said where that can't be told."""

from __future__ import annotations

import ipaddress
import os

import pytest
import torch.distributed as dist
from launcher_cases import FOREIGN, FOREIGN_BEGINNINGS

from booster.errors import ConfigError
from booster.launch import network
from booster.launch.environments import RankEnvironment, first_host, read_openmpi, read_slurm
from booster.launch.launch import destroy_world, launch_from_torch

TASK = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
STEP = TASK | {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "9",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_JOB_NODELIST": "node[01-04]",
    "SLURMD_NODENAME": "node03",
}
HERE = "1.0;tcp://192.0.2.2,198.51.100.7:35345;tcp6://[2001:db8::2]:39859"
PROCESS = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": HERE,
    "OMPI_MCA_orte_local_daemon_uri": "1.1;tcp://192.0.2.3:57681",
    "PMIX_NAMESPACE": "1002045441",
}


@pytest.fixture
def environment(monkeypatch):
    """Returns a function that sets variables (None: removes one), in an environment without any launcher's."""
    for name in list(os.environ):
        if name in FOREIGN or name.startswith(FOREIGN_BEGINNINGS):
            monkeypatch.delenv(name)

    def set_variables(variables, **changes):
        for name, value in (variables | changes).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    yield set_variables
    destroy_world()


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node", "node"),
        ("node,other", "node"),
        ("node[001-004,7],other", "node001"),
        ("node[7,1-3]", "node7"),
        ("rack[1-2]node[03-04]-ib,x", "rack1node03-ib"),
        ("login-1,node[1-2]", "login-1"),
        (" node[12] ", "node12"),
        ("10.0.0.[5-6]", "10.0.0.5"),
        ("", ""),
        (",node", ""),
    ],
)
def test_the_first_of_a_node_list(node_list, host):
    assert first_host(node_list) == host


def test_the_steps_variables_count_before_the_jobs(environment):
    environment(STEP)
    place = read_slurm()
    assert (place.rank, place.world_size, place.local_rank, place.host) == (1, 4, 1, "node03")


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"])
def test_any_number_of_tasks_will_do(environment, name):
    environment(TASK, **{name: "4"})
    assert read_slurm("node", 7) == RankEnvironment(rank=1, world_size=4, local_rank=1, host="node", port=7)


def test_a_step_on_one_node_needs_no_name(environment):
    environment(STEP, SLURM_STEP_NODELIST="node03")
    assert read_slurm().host == "localhost"


def test_a_world_of_one_needs_no_place(environment):
    environment({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert read_slurm() == RankEnvironment(rank=0, world_size=1, local_rank=0)
    environment(PROCESS, OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0", OMPI_MCA_orte_hnp_uri=None)
    assert read_openmpi() == RankEnvironment(rank=0, world_size=1, local_rank=1)


@pytest.mark.parametrize(("read", "variables"), [(read_slurm, STEP), (read_openmpi, PROCESS)])
def test_an_argument_counts_before_the_job_scripts_variables_and_those_before_the_launchers(
    environment, read, variables
):
    environment(variables, MASTER_ADDR="mine", MASTER_PORT="77")
    assert (read().host, read().port) == ("mine", 77)
    assert (read("given", 78).host, read("given", 78).port) == ("given", 78)
    environment(variables, MASTER_PORT="seven")
    with pytest.raises(ConfigError, match="MASTER_PORT='seven'"):
        read()


@pytest.mark.parametrize(
    ("read", "variables", "names"),
    [(read_slurm, STEP, ("SLURM_JOB_ID", "SLURM_STEP_ID")), (read_openmpi, PROCESS, ("PMIX_NAMESPACE",))],
)
def test_the_port_follows_from_the_job(environment, read, variables, names):
    ports = []
    for number in range(30):
        environment(variables, **{names[-1]: str(number)})
        ports.append(read().port)
        assert read().port == ports[-1]
    assert len(set(ports)) == 30
    assert all(15000 <= port < 30000 for port in ports)
    environment(variables, **dict.fromkeys(names))
    with pytest.raises(ConfigError, match=rf"{names[0]}.*give port="):
        read()


def test_a_batch_script_without_srun(environment):
    environment(STEP, SLURM_STEP_NUM_TASKS=None, SLURM_STEP_ID=None, SLURM_PROCID="0")
    with pytest.raises(ConfigError, match=r"SLURM_NTASKS=8, but srun did not start.*`srun python train.py`"):
        read_slurm("node", 7)


@pytest.mark.parametrize("node_list", [None, ",node"])
def test_no_node_is_named(environment, node_list):
    environment(STEP, SLURM_STEP_NODELIST=node_list, SLURM_JOB_NODELIST=None)
    with pytest.raises(ConfigError, match=r"names no node: give host="):
        read_slurm()


def test_rank_0_says_that_it_is_not_on_the_first_node(environment):
    environment(STEP, SLURM_PROCID="0", SLURMD_NODENAME="node04")
    with pytest.raises(ConfigError, match=r"rank 0 is on node04 in place of node03.*give host='node04'"):
        read_slurm()
    environment(STEP, SLURMD_NODENAME="node04")
    assert read_slurm().host == "node03"


def test_ranks_of_mpirun_on_its_own_machine(environment):
    environment(PROCESS, OMPI_COMM_WORLD_LOCAL_SIZE="4", OMPI_MCA_orte_hnp_uri=None)
    assert read_openmpi().host == "localhost"
    environment(PROCESS, OMPI_MCA_orte_local_daemon_uri=HERE)
    assert read_openmpi().host == "localhost"


@pytest.mark.parametrize(
    ("networks", "host"),
    [
        ({"eth0": "192.0.2.9/24"}, "192.0.2.2"),
        ({"eth0": "203.0.113.9/24", "eth1": "198.51.100.1/24"}, "198.51.100.7"),
        ({"eth0": "203.0.113.9/24"}, "192.0.2.2"),
        ({"docker0": "192.0.2.2/24", "eth1": "198.51.100.1/24"}, "198.51.100.7"),
        ({"eth0": "2001:db8::9/64"}, "2001:db8::2"),
    ],
)
def test_of_mpiruns_addresses_the_nearest(environment, monkeypatch, networks, host):
    monkeypatch.setattr(network, "_own_networks", lambda: [ipaddress.ip_interface(text) for text in networks.values()])
    environment(PROCESS)
    assert read_openmpi().host == host


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"OMPI_MCA_orte_hnp_uri": None},
            r"4 ranks on several hosts this OpenMPI reports no address of rank 0.*give host=",
        ),
        ({"OMPI_MCA_orte_hnp_uri": "odd"}, r"OMPI_MCA_orte_hnp_uri='odd'"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, r"mpirun runs on another host than rank 0.*give host="),
    ],
)
def test_mpirun_whose_ranks_cannot_find_each_other(environment, changes, message):
    environment(PROCESS, **changes)
    with pytest.raises(ConfigError, match=message):
        read_openmpi()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (STEP, r"srun started 4 processes.*call booster.launch_from_slurm\(\)"),
        (STEP | {"MASTER_ADDR": "node03"}, "srun started 4 processes"),
        (PROCESS, r"mpirun started 4 processes.*call booster.launch_from_openmpi\(\)"),
        ({"MASTER_ADDR": "node03"}, "missing: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_PORT"),
    ],
)
def test_no_rank_trains_alone_by_mistake(environment, variables, message):
    environment(variables)
    with pytest.raises(ConfigError, match=message):
        launch_from_torch(verbose=False)


def test_a_batch_script_may_train_alone_and_srun_may_start_one(environment):
    environment(STEP, SLURM_STEP_NUM_TASKS=None, SLURM_STEP_ID=None)
    launch_from_torch(verbose=False)
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    destroy_world()
    environment(STEP, SLURM_STEP_NUM_TASKS="1")
    launch_from_torch(verbose=False)
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
