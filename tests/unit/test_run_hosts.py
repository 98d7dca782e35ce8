"""What `booster run` makes of hosts and options before anything is started, and of what hosts told in the end."""

from __future__ import annotations

import json
import shlex
import signal
import sys

import pytest

from booster.cli import main
from booster.cli.run.exit_report import HostExit, RankFailure, summarize
from booster.cli.run.hosts import Host, choose_hosts, exported_variables, first_hosts
from booster.cli.run.launcher_protocol import read_failures, read_message, send_error, send_failures
from booster.cli.run.log_prefix import LineBuffer
from booster.cli.run.node_config import parse_extra_arguments, parse_num_nodes
from booster.errors import ConfigError

HOSTFILE = "# the cluster\nnode-1 slots=4\n\n  node-2   # one rank\nfe80::1 slots=2\n"


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text(HOSTFILE)
    return str(path)


def names(hosts):
    return [host.name for host in hosts]


def test_a_host_file_says_names_and_slots(hostfile):
    hosts = choose_hosts(hostfile=hostfile)
    assert hosts == [Host(name="node-1", slots=4), Host(name="node-2"), Host(name="fe80::1", slots=2)]


def test_some_hosts_are_chosen_in_the_order_of_the_file(hostfile):
    assert names(choose_hosts(hostfile=hostfile, include="node-2,node-1")) == ["node-1", "node-2"]
    assert names(choose_hosts(hostfile=hostfile, exclude="node-1")) == ["node-2", "fe80::1"]
    assert names(choose_hosts(listed="b, a,", exclude="b")) == ["a"]
    assert names(first_hosts(choose_hosts(hostfile=hostfile), 2)) == ["node-1", "node-2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"listed": "a,b,a"}, "lists a twice"),
        ({"listed": ","}, "lists no host"),
        ({"listed": "-oProxyCommand=x"}, "is not a valid host name"),
        ({"listed": "me@a"}, "--ssh-user"),
        ({"listed": "a:22"}, "--ssh-port"),
        ({"listed": "a b"}, "'a b' is not a valid host name"),
        ({"listed": "a,b", "include": "c"}, "--include=c: c is not a host of --host=a,b: choose from a, b"),
        ({"listed": "a,b", "exclude": "c"}, "--exclude=c: c is not a host"),
        ({"listed": "a,b", "exclude": "a,b"}, "leaves none"),
        ({"listed": "a,b", "include": "a", "exclude": "b"}, "can't be combined"),
        ({"listed": "a", "hostfile": "x"}, "give one of them"),
        ({"hostfile": "/nowhere/hosts"}, "can't be read"),
    ],
)
def test_hosts_that_cannot_be_chosen(settings, message):
    with pytest.raises(ConfigError, match=message):
        choose_hosts(**settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb\na slots=2\n", "line 3: a is listed twice"),
        ("a slots=0\n", "line 1: 'slots=0' after the name can't be parsed"),
        ("a 4\n", "line 1: '4' after"),
        ("a slots=2 gpu\n", "'slots=2 gpu'"),
        ("# none\n\n", "lists no host"),
    ],
)
def test_host_files_with_mistakes(text, message, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        choose_hosts(hostfile=str(path))


def test_a_host_that_is_each_hosts_own_is_refused_beside_others():
    local = [Host(name="localhost"), Host(name="127.0.0.2")]
    assert first_hosts(local, 2) == local
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 is a loopback name, which other hosts can't reach"):
        first_hosts([Host(name="a"), Host(name="127.0.0.1")], 2)
    with pytest.raises(ConfigError, match="--nnodes=3 is more than the 2 host"):
        first_hosts(local, 3)


def test_numbers_of_machines():
    assert [(one.min_nodes, one.max_nodes, one.is_elastic) for one in map(parse_num_nodes, ("3", "2:4"))] == [
        (3, 3, False),
        (2, 4, True),
    ]
    for text in ("0", "4:2", "a", ":3", "2:", "1:2:3", "-1"):
        with pytest.raises(ConfigError, match="--nnodes="):
            parse_num_nodes(text)


def test_extra_arguments_go_where_torch_wants_them():
    extra = parse_extra_arguments("--monitor-interval=2 rdzv_id='my job' last_call_timeout=3 is_host=false")
    assert extra.launch == {"monitor_interval": 2.0, "run_id": "my job"}
    assert extra.rendezvous == {"last_call_timeout": 3, "is_host": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("color=red", "'color=red' is not a setting.*close_timeout.*virtual_local_rank"),
        ("monitor_interval", "'monitor_interval' is not a setting"),
        ("timeout=soon", "give an integer"),
        ("is_host=perhaps", "give 0 or 1"),
        ("role=a role=b", "repeats a setting"),
        ("role='a", "can't be parsed"),
    ],
)
def test_extra_arguments_with_mistakes(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_extra_arguments(text)


def test_variables_that_matter_are_handed_on():
    here = {
        "PATH": "/bin",
        "PYTHONPATH": "x y",
        "NCCL_DEBUG": "INFO",
        "TORCH_CPP_LOG_LEVEL": "INFO",
        "TORCHELASTIC_RUN_ID": "outer",
        "CUDA_VISIBLE_DEVICES": "0",
        "HOME": "/root",
        "BASH_FUNC_x%%": "()",
        "MINE": "1",
    }
    given = exported_variables(here, ["MINE,HOME", "NEW=a=b,c"])
    assert given.keys() == here.keys() - {"TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES", "BASH_FUNC_x%%"} | {"NEW"}
    assert given["NEW"] == "a=b,c"
    with pytest.raises(ConfigError, match="ABSENT is not set here"):
        exported_variables(here, ["ABSENT"])
    with pytest.raises(ConfigError, match="is not a variable name"):
        exported_variables(here, ["a b=1"])


def dry_run(capsys, *arguments):
    assert main(["run", "--dry-run", *arguments]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_a_dry_run_shows_a_command_for_each_host(capsys, hostfile, monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_DEBUG", "a 'b'")
    monkeypatch.chdir(tmp_path)
    ssh = ["--ssh_port", "77", "--ssh-user", "me", "--ssh-options", "-i 'my key'", "--exclude", "fe80::1"]
    commands = dry_run(capsys, "--hostfile", hostfile, *ssh, "--max_restarts", "2", "train.py", "--lr", "$x y")
    assert [command[-2] for command in commands] == ["node-1", "node-2"]
    for node_rank, (command, slots) in enumerate(zip(commands, ("4", "1"), strict=True)):
        assert command[:3] == ["ssh", "-i", "my key"]
        assert " ".join(command[3:-2]).endswith("-p 77 -l me")
        assert "BatchMode=yes" in command
        there = shlex.split(command[-1])
        assert there[:5] == ["cd", str(tmp_path), "&&", "exec", "env"]
        assert "NCCL_DEBUG=a 'b'" in there
        run = there[there.index(sys.executable) :]
        assert run[1:4] == ["-m", "booster", "run"]
        told = dict(zip(run[4:-3:2], run[5:-3:2], strict=True))
        assert told.pop("--extra-launch-args").startswith("rdzv_id=booster-")
        assert told == {
            "--as-host": f"node-{node_rank + 1}",
            "--node-rank": str(node_rank),
            "--nproc-per-node": slots,
            "--nnodes": "2",
            "--master-addr": "node-1",
            "--master-port": "29500",
            "--max-restarts": "2",
        }
        assert run[-3:] == ["train.py", "--lr", "$x y"]


def test_options_overrule_what_hosts_say(capsys, hostfile):
    options = ["--nnodes", "1:2", "--nproc-per-node", "auto", "--master-addr", "10.0.0.1", "--master-port", "7"]
    commands = dry_run(capsys, "--hostfile", hostfile, *options, "--extra-launch-args", "rdzv_id=mine", "-m", "a.b")
    assert [command[-2] for command in commands] == ["node-1", "node-2"]
    for command in commands:
        run = " ".join(shlex.split(command[-1]))
        assert "--nproc-per-node auto --nnodes 1:2 --master-addr 10.0.0.1 --master-port 7 " in run
        assert run.endswith("--extra-launch-args rdzv_id=mine -m a.b")


def test_a_dry_run_on_this_machine_is_a_line_of_torchrun(capsys, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    for options in (["--nproc-per-node", "3"], ["--nproc", "3"], ["--host", "localhost", "--nproc-per-node", "3"]):
        [command] = dry_run(capsys, *options, str(script), "$x")
        assert command[2:5] == [sys.executable, "-m", "torch.distributed.run"]
        assert {"--nnodes=1", "--nproc-per-node=3", "--rdzv-backend=c10d"} <= set(command)
        assert command[-2:] == [str(script), "$$x"]  # torch's launcher makes one of two
    several = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "head"]
    [command] = dry_run(capsys, *several, "-m", "train")
    assert {"--rdzv-backend=static", "--node-rank=1", "--master-addr=head", "--master-port=29500"} <= set(command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "a,b", "--node-rank", "1", "-m", "x"], "--node-rank=1 can't be combined with hosts"),
        (["--host", "a,b", "--nnodes", "3", "-m", "x"], "--nnodes=3 is more than the 2 host(s) a, b"),
        (["--host", "a,b", "--nnodes", "3:4", "-m", "x"], "--nnodes=3 is more"),
        (["--host", "a,b", "--nproc-per-node", "0", "-m", "x"], "--nproc-per-node=0"),
        (["--host", "a,b", "--ssh-options", "'", "-m", "x"], "--ssh-options"),
        (["--host", "a,b", "--ssh-port", "99999", "-m", "x"], "--ssh-port=99999 is not a port"),
        (["--host", "a,b", "--extra-launch-args", "x=1", "-m", "x"], "--extra-launch-args: 'x=1'"),
        (["--include", "a", "--ssh-user", "me", "-m", "x"], "--include, --ssh-user without hosts"),
        (["--export", "A=1", "-m", "x"], "--export without hosts"),
        (["--nnodes", "1:2", "-m", "x"], "--nnodes=1:2 without --master-addr"),
        (["--nnodes", "two", "-m", "x"], "--nnodes=two is not a number of machines"),
    ],
)
def test_options_that_cannot_work(arguments, message, capsys):
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_the_same_however_they_arrive(size):
    text = b"one\n\nthree\r\n 10%\r 20%\r\r 30%\nlast"
    splitter = LineBuffer()
    fragments = [text[start : start + size] for start in range(0, len(text), size)]
    lines = [line for fragment in fragments for line in splitter.add(fragment)] + splitter.flush()
    shown = [line.strip(b"\r\n") for line in lines]
    assert [line for line in shown if line] == [b"one", b"three", b" 10%", b" 20%", b" 30%", b"last"]
    assert lines[-1] == b"last\n"
    assert lines[1] == b"\n"


def test_a_line_without_an_end_is_not_kept_for_ever():
    assert len(LineBuffer().add(b"x" * 100_000)[0]) == 100_001


def failed(stack="", time_ns=0, exitcode=1, host="a"):
    extra = {"py_callstack": stack, "time_ns": time_ns}
    data = {"message": {"message": "", "extraInfo": extra}} if stack else {"message": "<NONE>"}
    return RankFailure(host=host, local_rank=0, pid=9, exitcode=exitcode, error_file_data=data)


def test_what_a_host_tells_is_read_with_its_clock_set_right(capfdbinary, monkeypatch):
    monkeypatch.setattr("time.time_ns", lambda: 1_000)
    send_failures({3: failed("Traceback\nValueError: mine", 990)}, 4)
    send_error("no\nfile")
    first, second = capfdbinary.readouterr().err.splitlines()
    monkeypatch.setattr("time.time_ns", lambda: 5_000)
    message = read_message(first)
    failures = read_failures(message, "b")
    assert (failures[3].host, message["world_size"]) == ("b", 4)
    assert failures[3].error_file_data["message"]["extraInfo"]["time_ns"] == 4_990
    assert read_message(second) == {"event": "refused", "text": "no\nfile", "is_consequence": False}
    assert read_message(b"[b:3] \x1e" + json.dumps({"event": "refused"}).encode()) is None  # a rank's own line
    assert read_message(first[:-5]) is None


ENDED = HostExit(host="a", code=143, has_started=True, was_terminated=True)
MINE, PEER = "Traceback\nValueError: mine", "Traceback\nRuntimeError: Connection closed by peer"


def test_the_first_cause_on_any_host_comes_last():
    verdict = summarize(
        [
            HostExit(host="a", code=1, has_started=True, failures={0: failed(PEER, 1)}, world_size=2),
            HostExit(host="b", code=7, has_started=True, failures={1: failed(MINE, 2, 7, "b")}, world_size=2),
        ],
        [],
    )
    assert verdict.code == 7
    assert verdict.text.endswith(
        "rank 1 of 2 on b (local rank 0, pid 9) failed with exit code 7, first of all:\n" + MINE + "\n"
    )


def test_ranks_that_lost_their_peers_are_not_the_cause():
    verdict = summarize(
        [
            HostExit(host="a", code=1, has_started=True, failures={0: failed(PEER, 1)}, world_size=2),
            HostExit(host="b", code=255, has_started=True, output_tail=["Connection to b closed."]),
        ],
        [],
    )
    assert verdict.code == 255
    assert "the connection to b was lost (Connection to b closed.)" in verdict.text.splitlines()[-1]


@pytest.mark.parametrize(
    ("ends", "told", "code", "last"),
    [
        ([HostExit(host="a", code=0, has_started=True)], [], 0, ""),
        (
            [HostExit(host="a", code=143, has_started=True, was_terminated=True)],
            [signal.SIGTERM],
            143,
            "terminated by SIGTERM",
        ),
        ([HostExit(host="a", code=127, output_tail=["no python"])], [], 127, "exited with code 127 (no python)"),
        ([HostExit(host="a", code=1, has_started=True, output_tail=["E"])], [], 1, "the launcher on a exited with"),
        ([HostExit(host="a", code=255, output_tail=["Permission denied (publickey)."])], [], 2, "none of the offered"),
        ([HostExit(host="a", code=255, output_tail=["strange"])], [], 2, "ssh failed (strange): try `ssh a true`"),
        (
            [HostExit(host="a", code=255, output_tail=["command-line: line 0: Bad configuration option: x"])],
            [],
            2,
            "options",
        ),
        ([HostExit(host="a", code=-9, has_started=True)], [], 255, "connection to a was lost"),
        # A run that may go on with fewer did so, and one whose others were ended did not.
        ([HostExit(host="a", code=0, has_started=True), HostExit(host="b", code=255)], [], 0, "can't start on b"),
        ([ENDED, HostExit(host="b", code=255)], [], 2, "can't start on b"),
        (
            [
                HostExit(host="a", code=2, error={"text": "cause", "is_consequence": False}),
                HostExit(host="b", code=2, error={"text": "closed", "is_consequence": True}),
            ],
            [],
            2,
            "booster run: a: cause",
        ),
    ],
)
def test_verdicts(ends, told, code, last):
    verdict = summarize(ends, told)
    assert verdict.code == code
    assert last in (verdict.text.splitlines() or [""])[-1]
