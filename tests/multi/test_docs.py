"""What README and documentation show runs as it is shown."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
from documentation import PAGES, read_page
from harness import run_ranks

pytestmark = pytest.mark.on_device

READ = {page.name: page for page in map(read_page, PAGES)}
TIMEOUT_SECONDS = 300


def execute(source, name, folder):
    os.chdir(folder)
    exec(compile(source, name, "exec", dont_inherit=True), {"__name__": "page"})


def check_command(line, folder):
    command, _, comment = line.partition(" #")
    program, *arguments = shlex.split(command)
    programs = {"booster": [sys.executable, "-m", "booster"], "python": [sys.executable]}
    expected = re.search(r"exit code (\d)", comment)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [*programs[program], *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == int(expected[1] if expected else 0), f"{line}\n{done.stdout}{done.stderr}"


def check_page(page, folder):
    """Fails where a Python block raises, or a command ends with another exit code than it says."""
    for file, text in page.files.items():
        (folder / file).write_text(text)
    if page.num_ranks == 0:
        (folder / "page.py").write_text(page.source)
        check_command("python page.py", folder)
    elif page.python:
        run_ranks(execute, page.num_ranks, page.source, page.name, folder)
    for line in page.commands:
        check_command(line, folder)


def test_the_readme(tmp_path):
    check_page(READ["README.md"], tmp_path)
    assert (tmp_path / "runs/model/model.safetensors").is_file()


# test_examples.py runs the examples.
@pytest.mark.parametrize("name", [name for name in READ if name.startswith("docs/")])
def test_a_page(name, tmp_path):
    check_page(READ[name], tmp_path)
