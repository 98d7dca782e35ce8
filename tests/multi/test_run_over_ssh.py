"""`booster run` over two hosts by ssh: network namespaces with an sshd each, and all that goes wrong between hosts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from network_hosts import CannotMakeHostsError, two_hosts

BOOSTER = [sys.executable, "-m", "booster", "run"]
LIMIT = 150  # seconds; everything here takes a few


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    try:
        with two_hosts(tmp_path_factory.mktemp("network")) as network:
            yield network
    except CannotMakeHostsError as error:
        pytest.skip(f"no two hosts can be made here: {error}")


@pytest.fixture
def start(network, tmp_path, monkeypatch):
    """Returns a function that starts `booster run` on the first host, and checks that it left nothing anywhere."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    started = []

    def start(source, *options, ssh_options=None, hosts="node-a,node-b", arguments=("script.py",), booster=BOOSTER):
        (tmp_path / "script.py").write_text(source)
        ssh = ["--ssh-options", ssh_options or network.ssh_options()]
        exported = ["--export", "TMPDIR"]
        command = network.hosts[0].command(*booster, *ssh, *exported, "--host", hosts, *options, *arguments)
        process = subprocess.Popen(
            command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=1
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    assert network.left_over() == []
    assert list((tmp_path / "temporary").glob("booster_run_*")) == []


TRAINING = """\
import json, os, socket, sys
import torch, torch.distributed as dist
from booster.launch import launch_from_torch

launch_from_torch(verbose=False)
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(3, 4, 8, 4, generator=torch.Generator().manual_seed(1))
for step in range(3):
    optimizer.zero_grad()
    mine = inputs[step, rank]
    (model(mine) - mine.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
print("\\r 50%\\r100%", file=sys.stderr)
print(json.dumps({
    "weight": model.module.weight.tolist(), "host": socket.gethostname(), "local": os.environ["LOCAL_RANK"],
    "chosen": os.environ["CHOSEN"], "folder": os.getcwd(), "arguments": sys.argv[1:],
    "quiet": os.environ.get("TORCH_CPP_LOG_LEVEL"),
}))
"""


@pytest.mark.slow
def test_a_job_over_two_hosts(start, tmp_path):
    arguments = ["script.py", "a b", "$HOME", "it's"]
    process = start(TRAINING, "--nproc-per-node", "2", "--export", "CHOSEN=x y", arguments=arguments)
    stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, stderr

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.randn(3, 4, 8, 4, generator=torch.Generator().manual_seed(1)).flatten(1, 2):
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    told = dict(re.findall(r"^\[(node-[ab]:\d)\] (\{.*\})$", stdout, re.M))
    assert sorted(told) == ["node-a:0", "node-a:1", "node-b:2", "node-b:3"]
    for label, text in told.items():
        seen = json.loads(text)
        # Sums of the four ranks' gradients in another order: a few units in the last place of float32.
        torch.testing.assert_close(torch.tensor(seen.pop("weight")), model.weight.data, rtol=0, atol=1e-6)
        host, rank = label.split(":")
        assert seen == {
            "host": host,
            "local": str(int(rank) % 2),
            "chosen": "x y",
            "folder": str(tmp_path),
            "arguments": arguments[1:],
            "quiet": os.environ.get("TORCH_CPP_LOG_LEVEL"),
        }
        assert f"[{label}]  50%" in stderr  # each state of a progress bar has its label
        assert f"[{label}] 100%" in stderr


RAISING = """\
import os, signal, sys
if os.environ["RANK"] == "3":
    print("last words", end="", flush=True)
    {ending}
signal.pause()
"""


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        (
            "raise ValueError('mine')",
            1,
            r"booster run: rank 3 of 4 on node-b \(local rank 1, pid \d+\) failed with exit code 1, first of all:\n"
            r"Traceback .*\nValueError: mine\n$",
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            r"\nbooster run: rank 3 of 4 on node-b \(local rank 1, pid \d+\) was killed by SIGKILL.*memory runs out\n$",
        ),
        pytest.param(
            "os.kill(os.getppid(), signal.SIGKILL)",
            255,
            r"^booster run: the connection to node-b was lost \(.*\), and its ranks with it: .*\n$",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["raises", "killed", "launcher killed"],
)
def test_a_rank_that_fails_ends_all_and_comes_last(start, ending, code, last, tmp_path):
    process = start(RAISING.format(ending=ending), "--nproc_per_node", "2")
    stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == code, stderr
    assert re.search(last, stderr, re.S), stderr
    if code != 255:
        assert "[node-b:3] last words\n" in stdout
        return
    for left in (tmp_path / "temporary").glob("booster_run_*"):  # left by the killed run
        shutil.rmtree(left)


UNUSED = "print('started')\n"
# As on a machine whose Python lies where the hosts have none.
MAIN = "import sys; sys.executable = '/nowhere/python'; from booster.cli import main; sys.exit(main())"
ELSEWHERE = [sys.executable, "-c", MAIN, "run"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hosts": "node-c,node-a"}, "can't start on node-c: it can't be reached"),
        pytest.param(
            {"hosts": "node-a,nowhere"}, "can't start on nowhere: the name can't be resolved", marks=pytest.mark.slow
        ),
        ({"key": "wrong_key"}, "can't start on node-a: it accepts none of the offered keys"),
        pytest.param(
            {"known_hosts": "no_known_hosts"},
            "can't start on node-b: its host key does not match the known one",
            marks=pytest.mark.slow,
        ),
        pytest.param({"arguments": ["nowhere.py"]}, "node-b: there is no file 'nowhere.py'", marks=pytest.mark.slow),
        pytest.param(
            {"booster": ELSEWHERE},
            "can't start on node-b: the command exited with code 127 (env: '/nowhere/py",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["unreachable", "unknown name", "wrong key", "unknown host key", "no script", "no Python"],
)
@pytest.mark.slow
def test_hosts_that_cannot_start(start, network, settings, reason):
    files = {name: settings[name] for name in ("key", "known_hosts") if name in settings}
    others = {name: settings[name] for name in settings.keys() - files.keys()}
    process = start(UNUSED, ssh_options=network.ssh_options(**files), **others)
    stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode in (2, 127), stderr
    assert "started" not in stdout
    assert f"booster run: {reason}" in stderr


WAITING = "import signal\nprint('ready', flush=True)\nsignal.pause()\n"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_what_ends_the_launcher_ends_all_hosts(start, network, number):
    process = start(WAITING, "--nproc-per-node", "2")
    labels = {process.stdout.readline() for _ in range(4)}
    assert labels == {f"[{label}] ready\n" for label in ("node-a:0", "node-a:1", "node-b:2", "node-b:3")}
    there = [psutil.Process(pid) for host in network.hosts for pid in host.processes()]
    ranks = [one for one in there if any(part.endswith("worker.py") for part in one.cmdline())]
    assert len(ranks) == 4
    process.send_signal(number)
    _, stderr = process.communicate(timeout=LIMIT)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert stderr.endswith("booster run: terminated by SIGINT, with all ranks on all hosts\n")
    assert psutil.wait_procs(ranks, timeout=60)[1] == []


RESTARTED = """\
import os, sys
from booster.launch.coordinator import DistCoordinator
from booster.launch import launch_from_torch

launch_from_torch(verbose=False)
coordinator = DistCoordinator()
coordinator.block_all()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0" and coordinator.rank == 1:
    os._exit(9)
coordinator.block_all()
print("attempt", attempt, "of", coordinator.world_size)
"""


@pytest.mark.slow
def test_a_module_is_started_anew_on_all_hosts_in_their_order(start):
    options = ["--max-restarts", "1", "--nnodes", "2:2"]
    process = start(RESTARTED, *options, hosts="node-b,node-a", arguments=["-m", "script"])
    stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, stderr
    assert {"[node-b:0] attempt 1 of 2", "[node-a:1] attempt 1 of 2"} <= set(stdout.splitlines())


@pytest.mark.slow
def test_what_a_dry_run_prints_starts_a_host_when_pasted(start, network, tmp_path):
    process = start("import os\nprint(os.environ['RANK'], 'pasted')\n", "--dry-run", hosts="node-b")
    line, stderr = process.communicate(timeout=LIMIT)
    assert (process.returncode, stderr, line.count("\n")) == (0, "", 1)
    # As at a terminal: its stdin stays open.
    pasted = subprocess.Popen(
        network.hosts[0].command("sh", "-c", line), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert pasted.stdout.readline() == "[node-b:0] 0 pasted\n"
        assert pasted.wait(timeout=LIMIT) == 0
    finally:
        pasted.kill()
        pasted.communicate()


LOSING = """\
import os, psutil, signal
from booster.launch.coordinator import DistCoordinator
from booster.launch import launch_from_torch

launch_from_torch(verbose=False)
coordinator = DistCoordinator()
coordinator.block_all()
if coordinator.rank == 1:  # as a host that goes away: its connection ends, and all of its processes
    [connection] = [one for one in psutil.Process().parents() if "@notty" in " ".join(one.cmdline())]
    connection.kill()
    signal.pause()
coordinator.block_all()
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "of", coordinator.world_size)
"""


@pytest.mark.slow
def test_a_run_continues_without_a_lost_host_where_it_may(start):
    options = ["--nnodes", "1:2", "--max-restarts", "1", "--extra-launch-args", "last_call_timeout=1"]
    process = start(LOSING, *options)
    stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, stderr
    assert "[node-a:0] attempt 1 of 1" in stdout.splitlines()
    assert stderr.splitlines()[-1].startswith("booster run: the connection to node-b was lost (")
