"""The vision transformer of examples/vit learns the same on data-parallel ranks, pipeline stages and tensor parts."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import preload, run_ranks

pytestmark = pytest.mark.on_device

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vit"
SMALL = ["--batch-size", "16", "--layers", "2", "--width", "32"]
STEPS = 5

preload("transformers.models.vit.modeling_vit")


def import_example(name):
    """Returns a module of the example; sys.path is as before."""
    before = list(sys.path)
    sys.path.insert(0, str(EXAMPLE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = before


def train(plugin, folder):
    from booster import Booster

    example = import_example("train")
    arguments = example.parse_arguments(["--plugin", plugin, "--output", str(folder), "--steps", str(STEPS), *SMALL])
    return example.train(Booster(plugin=example.PLUGINS[plugin]()), arguments)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Losses and accuracy of one rank."""
    return run_ranks(train, 1, "none", tmp_path_factory.mktemp("vit"))[0]


@pytest.mark.parametrize(("plugin", "world_size"), [("torch_ddp", 2), ("pipeline", 2), ("pipeline_tensor", 4)])
def test_loss_curves_coincide(expected, tmp_path, plugin, world_size):
    losses, accuracy = expected
    assert max(losses) - min(losses) > 0.01  # there is a curve
    for of_rank, accuracy_of_rank in run_ranks(train, world_size, plugin, tmp_path):
        assert of_rank == pytest.approx(losses, rel=1e-4)
        assert accuracy_of_rank == pytest.approx(accuracy, abs=1 / 256)  # one image may lie on the edge


@pytest.mark.parametrize("plugin", ["low_level_zero", "gemini", "torch_fsdp", "pipeline"])
def test_other_plugins_share_each_batch(expected, tmp_path, plugin):
    for losses, _ in run_ranks(train, 4 if plugin == "pipeline" else 2, plugin, tmp_path):
        assert losses == pytest.approx(expected[0], rel=1e-4)


@pytest.fixture
def cifar10(tmp_path):
    """A folder like cifar-10-batches-bin with few images."""
    generator = torch.Generator().manual_seed(0)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        records = torch.randint(0, 256, (16, 1 + 3 * 32 * 32), dtype=torch.uint8, generator=generator)
        records[:, 0] %= 10
        (tmp_path / name).write_bytes(records.numpy().tobytes())
    return tmp_path


# On a rank of its own, as scikit-learn changes the environment of the process that imports it.


def check_cifar10(folder):
    train_images, held_out = import_example("images").read_cifar10(folder)
    assert (len(train_images), len(held_out)) == (80, 16)
    record = (folder / "data_batch_2.bin").read_bytes()[:3073]
    sample = train_images[16]
    assert int(sample["labels"]) == record[0]
    assert sample["pixel_values"].shape == (3, 32, 32)
    assert float(sample["pixel_values"][2, 31, 31]) == pytest.approx(record[-1] / 127.5 - 1)
    assert float(sample["pixel_values"][1, 0, 2]) == pytest.approx(record[1 + 1024 + 2] / 127.5 - 1)


def test_cifar10_is_read_from_its_binary_files(cifar10):
    run_ranks(check_cifar10, 1, cifar10)


def check_digits():
    train_images, held_out = import_example("images").read_digits()
    assert (len(train_images), len(held_out)) == (1541, 256)
    assert train_images[0]["pixel_values"].shape == (3, 32, 32)
    assert set(held_out.labels.tolist()) == set(range(10))
    assert -1 <= float(train_images.pixels.min()) < float(train_images.pixels.max()) <= 1


def test_digits_are_divided_into_those_to_train_on_and_others():
    run_ranks(check_digits, 1)


def _run(command, folder):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_script_learns_digits(tmp_path):
    launcher = [sys.executable, "-m", "booster", "run", "--nproc-per-node", "2", str(EXAMPLE / "train.py")]
    for plugin in ("torch_ddp", "pipeline"):
        done = _run([*launcher, "--plugin", plugin, "--output", str(tmp_path)], tmp_path)
        accuracy = float(re.search(r"accuracy ([\d.]+)%", done)[1])
        assert accuracy > 90
