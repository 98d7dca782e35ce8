"""The command line in one process: arguments, and the report on failed ranks."""

from __future__ import annotations

import os
import re

import pytest
import torch
import torch.distributed.launcher.api as launcher

import booster
from booster.cli import main
from booster.cli.run import exit_report, node_config


def failed(exitcode, message="<NONE>"):
    data = {"message": message}
    return exit_report.RankFailure(host="", local_rank=0, pid=99, exitcode=exitcode, error_file_data=data)


def told(stack, time_ns, exitcode=1):
    return failed(exitcode, {"message": "", "extraInfo": {"py_callstack": stack, "time_ns": time_ns}})


MINE = "Traceback\nValueError: mine\n"
PEER = "Traceback\nRuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1\n"


def test_the_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"torch-booster {booster.__version__}, torch {torch.__version__}\n"


def test_the_first_error_is_the_cause_and_comes_last():
    failures = {0: told(MINE.replace("mine", "later"), 5), 1: told(MINE, 4, exitcode=7)}
    text = exit_report.report(failures, 2)
    assert text.splitlines()[0] == "booster run: rank 0 of 2 (local rank 0, pid 99) failed with exit code 1"
    assert text.endswith("failed with exit code 7, first of all:\nTraceback\nValueError: mine")
    assert exit_report.exit_code_of(failures) == 7


@pytest.mark.parametrize(
    ("failures", "cause", "code"),
    [
        ({0: told(PEER, 1), 1: told(MINE, 2)}, 1, 1),
        ({0: told(PEER, 1), 1: failed(-9)}, 1, 137),
        ({0: failed(-15), 1: failed(7)}, 1, 7),
        ({0: failed(-15), 1: told(PEER, 1, exitcode=3)}, 1, 3),
        ({0: failed(-6), 1: told(MINE, 1)}, 1, 1),
        ({2: failed(-15)}, 2, 143),
    ],
)
def test_what_is_only_a_consequence_is_not_the_cause(failures, cause, code):
    assert exit_report.exit_code_of(failures) == code
    assert f"rank {cause} of 4" in re.findall("booster run: .*", exit_report.report(failures, 4))[-1]


def test_a_killed_rank_is_explained():
    assert exit_report.report({0: failed(-9)}, 1).endswith("killed by SIGKILL, as the system does when memory runs out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "no file 'nowhere.py'"),
        (["--nproc-per-node", "0", "-m", "x"], "--nproc-per-node=0"),
        (["--nproc_per_node", "many", "-m", "x"], "--nproc-per-node=many"),
        (["--node-rank", "1", "-m", "x"], "--node-rank=1 is out of range for --nnodes=1"),
        (["--nnodes", "2", "-m", "x"], "--nnodes=2 without --master-addr"),
        (["--max-restarts", "-1", "-m", "x"], "--max-restarts=-1"),
    ],
)
def test_arguments_that_cannot_work(arguments, message, capsys):
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def started(monkeypatch):
    """What would have been started, in place of starting it."""
    calls = []

    class Recorder:
        def __init__(self, config, entrypoint):
            self.config, self.entrypoint = config, entrypoint

        def __call__(self, *arguments):
            calls.append((self.config, arguments, os.environ["OMP_NUM_THREADS"]))

    monkeypatch.setattr(launcher, "elastic_launch", Recorder)
    return calls


@pytest.mark.parametrize("spelling", ["--nproc-per-node", "--nproc_per_node"])
def test_run_hands_over_ranks_and_arguments(started, spelling, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    assert main(["run", spelling, "3", "--max-restarts", "2", str(script), "--nproc-per-node", "${local_rank} $$"]) == 0
    config, arguments, _ = started[0]
    assert (config.nproc_per_node, config.max_restarts, config.min_nodes, config.max_nodes) == (3, 2, 1, 1)
    assert arguments[1:] == (str(script), "--nproc-per-node", "$${local_rank} $$$$")
    assert config.rdzv_endpoint == "localhost:0"


def test_run_of_a_module_on_several_machines(started):
    place = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "head", "--master-port", "77"]
    main(["run", *place, "-m", "package.train", "-x"])
    config, arguments, _ = started[0]
    assert arguments[1:] == ("-m", "package.train", "-x")
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("static", "head:77")
    assert config.rdzv_configs["rank"] == 1


def test_cores_are_shared_out_unless_the_user_did(started, monkeypatch):
    monkeypatch.setattr(node_config, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    main(["run", "--nproc-per-node", "3", "-m", "x"])
    assert "OMP_NUM_THREADS" not in os.environ
    main(["run", "--nproc-per-node", "9", "-m", "x"])
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    main(["run", "--nproc-per-node", "3", "-m", "x"])
    assert [threads for _, _, threads in started] == ["2", "1", "5"]


def test_auto_takes_every_core_or_device(started, monkeypatch):
    monkeypatch.setattr("booster.device.device_type", lambda: "cpu")
    monkeypatch.setattr(node_config, "num_cores", lambda: 6)
    main(["run", "--nproc-per-node", "auto", "-m", "x"])
    monkeypatch.setattr("booster.device.device_type", lambda: "cuda")
    monkeypatch.setattr("booster.device.num_devices", lambda: 4)
    main(["run", "--nproc-per-node", "auto", "-m", "x"])
    assert [config.nproc_per_node for config, _, _ in started] == [6, 4]
