"""What README and documentation show runs as it is shown."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
from documentation import PAGES, ROOT, read_page
from harness import run_ranks

READ = {page.name: page for page in map(read_page, PAGES)}
TIMEOUT_SECONDS = 300


def execute(source, name, folder):
    os.chdir(folder)
    exec(compile(source, name, "exec"), {"__name__": "page"})


@pytest.mark.parametrize("name", [name for name, page in READ.items() if page.python])
def test_python(name, tmp_path):
    page = READ[name]
    for file, text in page.files.items():
        (tmp_path / file).write_text(text)
    if page.num_ranks == 0:
        run_command("python page.py", tmp_path, {"page.py": page.source})
    else:
        run_ranks(execute, page.num_ranks, page.source, name, tmp_path)


def run_command(line, folder, files=()):
    for name in files:
        (folder / name).write_text(files[name])
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


@pytest.mark.parametrize(
    "name", [name for name, page in READ.items() if page.commands and not name.startswith("examples")]
)
def test_commands(name, tmp_path):
    """The commands of a page, after its Python blocks."""
    test_python(name, tmp_path)
    for line in READ[name].commands:
        run_command(line, tmp_path)


def test_no_block_is_forgotten():
    """A command that names a program of another kind has to be marked as not run."""
    for page in READ.values():
        assert all(reason for _, reason in page.not_run), page.name
        assert {line.split()[0] for line in page.commands} <= {"booster", "python"}, page.name


def test_links_to_files_are_right():
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.relative_to(ROOT)}: {target}"
