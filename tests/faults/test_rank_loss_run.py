"""A rank is lost under `booster run`: the launcher ends too, with the cause in its last lines, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from faults.loss_program import Case
from launcher_cases import plain_environment

from booster.comm import Fault

TESTS = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 240.0  # for imports on a busy machine, and the end of a rank that does not answer
SCRIPT = """\
import json, os, sys
from pathlib import Path
from faults.loss_program import Case, train

train(Case.from_json(json.loads(sys.argv[1])), int(os.environ["RANK"]), None, Path(sys.argv[2]))
"""

# Not by SIGKILL, after 30 s.
STOPPED = r"rank 0 of 2 .* was stopped, and was terminated by the launcher\nbooster run: rank 1 of 2 .*, first of all:"
KILLED = (
    r"rank 1 .* was killed by SIGKILL.*\n(.*\n)*.*last heartbeats of the ranks "
    r".*rank 1, .* before the end: after \d+ steps, "
)

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(Fault.stop(rank=0, at="backward", call=2), STOPPED, id="stop"),
        pytest.param(Fault.kill(rank=1, at="commit", call=2), KILLED, id="kill", marks=slow),
        pytest.param(Fault.throw(rank=1, at="step", call=2), "InjectedFault: throw on rank 1", id="throw", marks=slow),
        pytest.param(Fault.leave(rank=1, at="clip", call=2), "rank 1's program ended", id="leave", marks=slow),
    ],
)
@pytest.mark.slow
def test_the_launcher_ends_and_says_why(tmp_path, fault, words):
    (tmp_path / "script.py").write_text(SCRIPT)
    case = Case(plugin="torch_ddp", world_size=2, fault=fault)
    name = uuid4().hex
    command = [sys.executable, "-m", "booster", "run", "--nproc-per-node", "2", "script.py"]
    process = subprocess.Popen(
        [*command, json.dumps(case.to_json()), str(tmp_path)],
        cwd=tmp_path,
        env=plain_environment(PYTHONPATH=str(TESTS), NAME_OF_THIS_TEST=name),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
        left = processes_of(name)
    finally:
        process.kill()
        process.communicate()
        for other in processes_of(name):
            other.kill()
    print(output)
    assert process.returncode not in (0, None)
    assert re.search(words, output)
    assert left == []


def processes_of(name: str) -> list[psutil.Process]:
    """Returns the processes that a test of that name has started, also those whose parents are gone."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("NAME_OF_THIS_TEST") == name and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
