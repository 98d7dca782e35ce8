"""The examples run on two ranks, under every plugin by a flag; `test_vit_example.py` has the vision transformer."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from harness import preload, run_ranks

from booster import Booster
from booster.plugins import HybridParallelPlugin

pytestmark = pytest.mark.on_device

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/train.py"))
MAX_LINES = 120
_FAMILIES = ("bert", "gpt2", "llama", "mixtral")
preload("peft", *(f"transformers.models.{name}.modeling_{name}" for name in _FAMILIES), "sklearn.datasets")
PLAIN = ("none", "torch_ddp", "low_level_zero", "gemini", "torch_fsdp", "hybrid_parallel")


@cache
def example(name):
    """Returns the module of an example's train.py."""
    spec = importlib.util.spec_from_file_location(f"example_of_{name}", EXAMPLES / name / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, plugin, output, *more):
    """Returns what the example's `train` returns."""
    module = example(name)
    argument = "--checkpoint" if name == "resnet" else "--output"
    arguments = module.parse_arguments(["--plugin", plugin, argument, str(output), *more])
    if name == "llama":
        return module.train(module.make_booster(arguments), arguments)
    if name == "annotated" and plugin == "hybrid_parallel":
        return module.train(Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32")), arguments)
    if hasattr(module, "PLUGINS"):
        return module.train(Booster(plugin=module.PLUGINS[plugin]()), arguments)
    booster = Booster(plugin=None if plugin == "none" else plugin, mixed_precision="fp32")
    return module.train(booster, arguments)


def run_on_one_and_two(name, plugin, tmp_path, *more):
    return run_ranks(run, 1, name, "none", tmp_path / "1", *more)[0], run_ranks(
        run, 2, name, plugin, tmp_path / "2", *more
    )


SMALL_GPT = ("--steps", "4", "--layers", "2", "--width", "32", "--batch-size", "8")


@pytest.mark.parametrize("plugin", list(example("gpt_pretraining").PLUGINS)[1:])
def test_gpt_pretraining(tmp_path, plugin):
    expected, found = run_on_one_and_two("gpt_pretraining", plugin, tmp_path, *SMALL_GPT)
    assert len(expected) == 4
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-4)


LLAMAS = [
    ("hybrid_parallel", "--tp", "2"),
    ("hybrid_parallel", "--pp", "2", "--pp_style", "zbv", "-g"),
    ("hybrid_parallel", "--zero", "2"),
    ("low_level_zero", "--zero", "2"),
    ("gemini",),
    ("torch_fsdp",),
    ("torch_ddp",),
]


@pytest.mark.parametrize("arguments", LLAMAS, ids=" ".join)
def test_llama(tmp_path, arguments):
    common = ("--config", "tiny", "--num_steps", "3", "--batch_size", "8", "--precision", "fp32")
    expected = run_ranks(run, 1, "llama", "torch_ddp", tmp_path / "1", *common)[0]
    for loss in run_ranks(run, 2, "llama", arguments[0], tmp_path / "2", *arguments[1:], *common):
        assert loss == pytest.approx(expected, rel=1e-3)


def test_annotated(tmp_path):
    expected, found = run_on_one_and_two("annotated", "hybrid_parallel", tmp_path, *SMALL_GPT)
    assert len(expected) == 4
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-4)


def run_finetune(output, *more):
    """Returns the losses; the base is trained where there is none, by all ranks of this run."""
    module = example("finetune")
    small = ("--pretrain-steps", "2", "--steps", "3", "--layers", "2", "--width", "32", "--batch-size", "8")
    arguments = module.parse_arguments(["--output", str(output), *small, *more])
    if not (output / "base").exists():
        module.pretrain(arguments)
    return module.finetune(Booster(plugin=module.PLUGINS[arguments.plugin]()), arguments)


def sample_finetuned(output, plugin):
    module = example("finetune")
    base = module.LlamaForCausalLM.from_pretrained(output / "base")
    before = module.sample(base)
    merged = module.PeftModel.from_pretrained(base, output / plugin).merge_and_unload()
    return before, module.sample(merged)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # called by peft
@pytest.mark.parametrize(
    "plugin",
    [
        name if name in ("fsdp", "tp2") else pytest.param(name, marks=pytest.mark.slow)
        for name in example("finetune").PLUGINS
    ],
)
def test_finetune(tmp_path, plugin):
    """One process and two ranks over the same base: the same losses, and adapters that peft merges."""
    expected = run_ranks(run_finetune, 1, tmp_path, "--plugin", "ddp")[0]
    before, one = run_ranks(sample_finetuned, 1, tmp_path, "ddp")[0]
    assert len(expected) == 3
    for losses in run_ranks(run_finetune, 2, tmp_path, "--plugin", plugin):
        assert losses == pytest.approx(expected, rel=1e-4)
    assert run_ranks(sample_finetuned, 1, tmp_path, plugin)[0] == (before, one)
    assert one != before


@pytest.mark.slow
def test_finetune_writes_capitals(tmp_path):
    train = ("-m", "booster", "run", "--nproc-per-node", "2", EXAMPLES / "finetune/train.py", "--output", tmp_path)
    found = run_command(*train, "--plugin", "zero2", "--pretrain-steps", "150", "--steps", "60")
    base, _, merged = found.partition("with the adapter:")
    letters = [sum(map(test, text)) for text in (base, merged) for test in (str.islower, str.isupper)]
    assert letters[0] > letters[1]
    assert letters[3] > letters[2]


def run_moe(output, *more):
    module = example("moe")
    arguments = module.parse_arguments(["--output", str(output), "--steps", "3", "--batch-size", "8", *more])
    return module.train(module.make_booster(arguments), arguments)


@pytest.mark.slow
def test_moe(tmp_path):
    """Experts on one rank, replicated on two, shared by two: the same losses, and a picture."""
    expected = run_ranks(run_moe, 1, tmp_path / "1", "--ep", "1", "--width", "32")[0]
    for loss in run_ranks(run_moe, 2, tmp_path / "2", "--ep", "1", "--width", "32"):
        assert loss == pytest.approx(expected, rel=1e-4)
    for loss in run_ranks(run_moe, 2, tmp_path / "2", "--ep", "2", "--width", "32"):
        assert loss == pytest.approx(expected, rel=1e-4)
    assert (tmp_path / "2" / "curves.png").stat().st_size > 0


@pytest.mark.parametrize("plugin", PLAIN[1:])
def test_bert_classification(tmp_path, plugin):
    small = ("--steps", "3", "--layers", "1", "--batch_size", "12")
    (expected, accuracy, count), found = run_on_one_and_two("bert_classification", plugin, tmp_path, *small)
    for losses, accuracy_of_rank, count_of_rank in found:
        assert losses == pytest.approx(expected, rel=1e-4)
        assert accuracy_of_rank == pytest.approx(accuracy, abs=0.01)
        assert count_of_rank == count == len(example("bert_classification").read_texts(is_test=True))


@pytest.mark.slow
def test_bert_classification_resumes_on_three_ranks(tmp_path):
    small = ("--layers", "1", "--batch_size", "12")
    run_ranks(run, 2, "bert_classification", "torch_fsdp", tmp_path, "--steps", "5", "--stop_after", "3", *small)
    for losses, _, _ in run_ranks(
        run, 3, "bert_classification", "gemini", tmp_path, "--steps", "5", "--resume", *small
    ):
        assert len(losses) == 2


@pytest.mark.parametrize("plugin", PLAIN[1:])
def test_resnet(tmp_path, plugin):
    (expected, _), found = run_on_one_and_two("resnet", plugin, tmp_path, "--max-steps", "4", "--batch-size", "32")
    for losses, _ in found:
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("plugin", PLAIN[1:])
def test_gan(tmp_path, plugin):
    losses, images = run_ranks(run, 2, "gan", plugin, tmp_path, "--max-steps", "3")[0]
    assert len(losses) == 3
    assert images.shape == (16, 8, 8)
    assert torch.isfinite(images).all()


@pytest.mark.parametrize("plugin", PLAIN[1:])
def test_distillation(tmp_path, plugin):
    for losses, of_teacher, _ in run_ranks(run, 2, "distillation", plugin, tmp_path, "--max-steps", "60"):
        assert len(losses) == 60
        assert of_teacher > 0.5


@pytest.mark.parametrize("plugin", PLAIN[1:])
def test_slurm_continues_from_its_last_step(tmp_path, plugin):
    assert run_ranks(run, 2, "slurm", plugin, tmp_path, "--steps", "4", "--every", "2") == [4, 4]
    assert run_ranks(run, 2, "slurm", plugin, tmp_path, "--steps", "6") == [6, 6]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000004", "step-00000006"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plugin",
    [
        name if name == "pipeline" else pytest.param(name, marks=pytest.mark.slow)
        for name in list(example("trainer").PLUGINS)[1:]
    ],
)
def test_trainer(tmp_path, plugin):
    expected, found = run_on_one_and_two("trainer", plugin, tmp_path, "--epochs", "1")
    for metrics in found:
        assert metrics["epoch_loss"] == pytest.approx(expected["epoch_loss"], rel=1e-4)
        assert metrics["eval_accuracy"] == pytest.approx(expected["eval_accuracy"], abs=0.01)
    # Under another plugin on one rank, from what two have saved.
    (metrics,) = run_ranks(run, 1, "trainer", "torch_ddp", tmp_path / "2", "--epochs", "2")
    assert metrics["epoch_loss"] < expected["epoch_loss"]


def run_nvme(*arguments):
    module = example("nvme")
    return module.train(module.parse_arguments([*arguments]))


@pytest.mark.parametrize("plugin", ["gemini", "torch_ddp", "low_level_zero", "torch_fsdp", "hybrid_parallel"])
def test_nvme(plugin):
    small = ("--width", "64", "--layers", "3")
    expected = run_ranks(run_nvme, 1, *small)[0]
    for losses, num_bytes in run_ranks(run_nvme, 2, "--plugin", plugin, *small):
        assert losses == pytest.approx(expected[0], rel=1e-4)
        assert num_bytes == expected[1]


@pytest.mark.slow
@pytest.mark.parametrize(("plugin", "fits"), [("gemini", True), ("torch_ddp", False)])
def test_nvme_within_a_memory_limit(plugin, fits):
    command = [sys.executable, "-m", "booster", "run", "--nproc-per-node", "2", str(EXAMPLES / "nvme/train.py")]
    done = subprocess.run(
        [*command, "--limit-mib", "700", "--plugin", plugin], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == fits, done.stderr
    assert ("memory" in done.stderr) != fits


def run_command(*command):
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo_learns_and_resumes(tmp_path):
    train = ("-m", "booster", "run", "--nproc-per-node", "2", EXAMPLES / "demo/train.py", "--output", tmp_path)
    run_command(*train, "--steps", "60", "--stop-after", "30")
    last = run_command(*train, "--steps", "60", "--resume")
    step, loss, entropy = re.search(r"step (\d+): validation loss ([\d.]+), unigram entropy ([\d.]+)", last).groups()
    assert int(step) == 60
    assert float(loss) < float(entropy) - 0.3
    sample = run_command(EXAMPLES / "demo/sample.py", tmp_path / "checkpoint")
    assert "reloaded by GPT2LMHeadModel.from_pretrained" in sample


@pytest.mark.slow
def test_ray_trains_the_demo_as_the_launcher_does(tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'torch-booster[ray]' runs this test")
    script = EXAMPLES / "ray/train.py"
    run_command(script, "--output", tmp_path / "ray", "--steps", "4", "--stop-after", "2")
    said = run_command(script, "--output", tmp_path / "ray", "--steps", "4", "--resume")
    train = ("-m", "booster", "run", "--nproc-per-node", "2", EXAMPLES / "demo/train.py", "--steps", "4")
    run_command(*train, "--output", tmp_path / "plain")
    found, expected = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("ray", "plain")
    )
    assert len(found) == 4
    assert found == expected
    assert f"step 4: loss {found[-1]:.3f}" in said


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_are_alike(name):
    folder = EXAMPLES / name
    lines = (folder / "train.py").read_text().splitlines()
    assert len(lines) < MAX_LINES
    assert any(line.startswith("Run: ") for line in lines[:4])
    text = (folder / "README.md").read_text()
    pictures = re.findall(r"!\[.+\]\((.+)\)", text)
    assert pictures
    assert all((folder / one).is_file() for one in pictures)
