"""Scripts written for ColossalAI's API train as one process does, save, and resume, with other imports and devices."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from harness import preload, run_ranks

PORTS = Path(__file__).parent
MODELS = ("bert", "opt", "vit")
preload(*(f"transformers.models.{name}.modeling_{name}" for name in MODELS), "sklearn.datasets", "tqdm")
# One process gets the batch of all ranks together, and the learning rate that scripts multiply by the world size.
BERT = ("-p", "torch_ddp", "-b", "32", "-l", "1e-3")
VIT = ("-p", "torch_ddp", "--learning_rate", "2e-3")
OPT = ("-p", "torch_ddp", "--learning_rate", "4e-3")
FP32 = "--mixed_precision", "fp32"
FOLDERS = {"resnet.py": "-c", "bert.py": "-o", "vit.py": "-o", "opt.py": "-o"}


def run(script, *arguments):
    """Return what a script prints on this rank when it is run as a command."""
    output = io.StringIO()
    address = mock.patch.dict(os.environ, MASTER_ADDR="localhost", MASTER_PORT="1")  # the group exists already
    command = mock.patch.object(sys, "argv", [script, *arguments])
    with address, command, contextlib.redirect_stdout(output):
        runpy.run_path(str(PORTS / script), run_name="__main__")
    return output.getvalue()


def read_figures(output):
    """Return the printed losses by epoch, and the figures of the evaluations."""
    losses = {}
    for epoch, loss in re.findall(r"\bepoch (\d+) loss ([\d.]+)$", output, re.MULTILINE):
        losses.setdefault(int(epoch), []).append(float(loss))
    return losses, [float(figure) for figure in re.findall(r"(?:average_loss|accuracy) ([\d.]+)", output)]


def train(script, world_size, folder, *arguments):
    arguments = (FOLDERS[script], str(folder), *arguments)
    return read_figures("".join(run_ranks(run, world_size, script, *arguments, fresh=True)))  # scripts set up loggers


def check(script, world_size, folder, of_one, of_ranks, rel=1e-5):  # six decimals are printed
    """Compare a script on several ranks with one process, and its second epoch with one that resumes."""
    expected, expected_evaluation = train(script, 1, folder / "1", *of_one)
    assert [len(losses) > 1 for losses in expected.values()] == [True, True]
    losses, evaluation = train(script, world_size, folder / "n", *of_ranks)
    assert losses.keys() == expected.keys()
    for epoch, of_epoch in expected.items():
        assert losses[epoch] == pytest.approx(of_epoch, rel=rel)
    assert evaluation == pytest.approx(expected_evaluation, rel=rel)
    resumed, evaluation_then = train(script, world_size, folder / "n", *of_ranks, "--resume", "1")
    assert resumed == {1: losses[1]}
    assert evaluation_then == evaluation[len(evaluation) - len(evaluation_then) :]


def test_resnet(tmp_path):
    check("resnet.py", 2, tmp_path, ("-b", "64"), ())


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["gemini", "low_level_zero", "torch_ddp_fp16"])
def test_resnet_in_half_precision(tmp_path, plugin):
    # The loss has the dtype of the plugin, which may be bf16, with two decimal digits.
    check("resnet.py", 2, tmp_path, ("-b", "64", "-p", plugin), ("-p", plugin), rel=0.02)


@pytest.mark.parametrize(
    "arguments",
    [
        ("gemini",),
        ("hybrid_parallel", "-b", "32"),
        ("hybrid_parallel", "-b", "32", "--pp_style", "1f1b"),
        ("low_level_zero",),
        ("torch_ddp",),
        ("torch_fsdp",),
    ],
    ids=" ".join,
)
def test_bert(tmp_path, arguments):
    check("bert.py", 2, tmp_path, BERT, ("-p", *arguments, *FP32))


@pytest.mark.slow
def test_vit(tmp_path):
    check("vit.py", 2, tmp_path, VIT, FP32)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--grad_checkpoint",), ("--pp_size", "1", "--tp_size", "2")], ids=" ".join)
def test_vit_otherwise(tmp_path, arguments):
    check("vit.py", 2, tmp_path, VIT, (*arguments, *FP32))


@pytest.mark.slow
def test_opt(tmp_path):
    check("opt.py", 4, tmp_path, OPT, FP32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "world_size", "of_one", "of_ranks"),
    [
        ("resnet.py", 2, ("-b", "64"), ("-p", "torch_ddp_fp16")),
        ("bert.py", 2, BERT, ("-p", "gemini")),
        ("bert.py", 2, BERT, ("-p", "hybrid_parallel", "-b", "32")),
        ("vit.py", 2, VIT, ()),
        ("opt.py", 4, OPT, ()),
    ],
)
@pytest.mark.parametrize("launcher", ["booster", "torch.distributed.run"])
def test_commands_in_fp16(tmp_path, launcher, script, world_size, of_one, of_ranks):
    expected, _ = train(script, 1, tmp_path / "1", *of_one)
    start = ("-m", launcher, *(["run"] if launcher == "booster" else []), "--nproc-per-node", str(world_size))
    command = [*start, str(PORTS / script), FOLDERS[script], str(tmp_path / "n"), *of_ranks]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    losses, _ = read_figures(done.stdout)
    assert losses.keys() == expected.keys()
    for epoch, of_epoch in expected.items():
        assert losses[epoch] == pytest.approx(of_epoch, rel=0.01)  # fp16 has three decimal digits
