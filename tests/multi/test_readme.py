"""What the README shows runs as it is shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("launcher", [["-m", "booster", "run", "--nproc-per-node", "2"], []])
def test_the_user_loop(tmp_path, launcher):
    script = next(text for language, text in BLOCKS if language == "python")
    assert len([line for line in script.splitlines() if line and not line.startswith(("import", "from"))]) <= 15
    (tmp_path / "train.py").write_text(script)
    run([sys.executable, *launcher, "train.py"], tmp_path)
    assert (tmp_path / "runs/model/model.safetensors").is_file()


def test_every_file_that_is_linked_is_there():
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


@pytest.mark.slow
def test_the_demo_learns_and_resumes(tmp_path):
    booster = [sys.executable, "-m", "booster", "run", "--nproc-per-node", "2", str(ROOT / "examples/demo/train.py")]
    arguments = ["--output", str(tmp_path), "--steps", "60"]
    run([*booster, *arguments, "--stop-after", "30"], ROOT)
    last = run([*booster, *arguments, "--resume"], ROOT)
    step, loss, entropy = re.search(r"step (\d+): validation loss ([\d.]+), unigram entropy ([\d.]+)", last).groups()
    assert int(step) == 60
    assert float(loss) < float(entropy) - 0.3
    sample = run([sys.executable, str(ROOT / "examples/demo/sample.py"), str(tmp_path / "checkpoint")], ROOT)
    assert "reloaded by GPT2LMHeadModel.from_pretrained" in sample
