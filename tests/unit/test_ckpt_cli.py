"""`booster ckpt`: what it prints, what it returns, and what it writes, on checkpoints of every kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_cases import Net, assert_equal, names_in, state_of, stepped
from torch import nn
from torch.optim import AdamW

from booster import Booster
from booster.checkpoint_io import GeneralCheckpointIO
from booster.checkpoint_io.storage import Storage
from booster.cli import main
from booster.errors import CheckpointError
from booster.interface import ModelWrapper

IO = GeneralCheckpointIO()


@pytest.fixture
def ckpt(capsys):
    """Runs `booster ckpt` and returns its exit code and what it wrote."""

    def run(*arguments):
        code = main(["ckpt", *map(str, arguments)])
        written = capsys.readouterr()
        return code, written.out, written.err

    return run


@pytest.fixture
def run(tmp_path):
    """A directory of a model and its optimizer."""
    model, optimizer = stepped(Net())
    IO.save_model(model, tmp_path / "run", shard=True)
    IO.save_optimizer(optimizer, tmp_path / "run", shard=True)
    return tmp_path / "run"


@pytest.fixture
def foreign(tmp_path):
    """A folder that transformers could have written."""
    directory = tmp_path / "foreign"
    directory.mkdir()
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, file in files.items():
        safetensors.torch.save_file({name: torch.ones(4)}, directory / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 32}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text('{"torch_dtype": "float32"}')
    return directory


def flip(path, offset=-1):
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def trained(seed=0):
    """A booster, a boosted model and its optimizer after a step."""
    torch.manual_seed(seed)
    booster, net = Booster(), nn.Linear(4, 3)
    model, optimizer, *_ = booster.boost(net, AdamW(net.parameters(), lr=0.1))
    booster.backward(model(torch.ones(2, 4)).sum(), optimizer)
    optimizer.step()
    return booster, model, optimizer


# inspect


def test_inspect_lists_everything(ckpt, run):
    code, out, err = ckpt("inspect", run)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == str(run)
    assert "model: 9 tensors, 96 elements, 376 B" in lines
    assert "  dtypes       int64 x 1, float32 x 7, bool x 1" in lines
    assert "    embed.weight              float32  [11, 6]      264 B" in lines
    assert "  optimizer    AdamW, 0 skipped steps" in lines
    assert any(line.startswith("  group 1      2 parameters: lr=0.25, betas=(0.9, 0.999)") for line in lines)
    assert out.count("checksums    recorded") == 2


def test_inspect_as_json(ckpt, run):
    found = json.loads(ckpt("inspect", run, "--json")[1])
    model, optimizer = found["parts"]
    assert (found["path"], found["training_state"]) == (str(run), None)
    assert (model["kind"], optimizer["kind"]) == ("model", "optimizer")
    assert {"name": "mask", "dtype": "bool", "shape": [4], "num_bytes": 4, "file": "model.safetensors"} in model[
        "tensors"
    ]
    assert model["facts"]["world_size"] == 1
    assert model["checksums"]
    assert optimizer["optimizer"]["param_groups"][1]["lr"] == 0.25
    assert optimizer["files"][0]["name"] == "optimizer-00001-of-00001.safetensors"


@pytest.mark.parametrize("name", ["m.safetensors", "m.bin", "m.pt"])
def test_inspect_of_one_file(ckpt, tmp_path, name):
    _, optimizer = stepped(Net())
    IO.save_optimizer(optimizer, tmp_path / name, use_safetensors=name.endswith("safetensors"))
    (part,) = json.loads(ckpt("inspect", tmp_path / name, "--json")[1])["parts"]
    assert (part["kind"], part["num_tensors"], part["optimizer"]["class"]) == ("optimizer", 12, "AdamW")
    assert part["checksums"] == name.endswith("safetensors")


def test_inspect_of_a_foreign_folder(ckpt, foreign):
    code, out, _ = ckpt("inspect", foreign)
    assert code == 0
    assert "model: 2 tensors, 8 elements, 32 B" in out
    assert "checksums    none recorded" in out
    assert "    b  float32  [4]       16 B  model-00002-of-00002.safetensors" in out


def test_inspect_of_variants(ckpt, tmp_path):
    for prefix in (None, "fp16"):
        IO.save_model(ModelWrapper(Net()), tmp_path / "m", shard=True, prefix=prefix)
    out = ckpt("inspect", tmp_path / "m")[1]
    assert "\nmodel: 9 tensors" in out
    assert "\nmodel (fp16): 9 tensors" in out


@pytest.mark.parametrize("name", ["model.safetensors.manifest.json", "model.safetensors"])
def test_a_file_of_a_directory_stands_for_its_checkpoint(ckpt, run, name):
    code, out, _ = ckpt("verify", run / name)
    assert code == 0
    assert out.startswith("model: 9 tensors in 1 file")


def test_a_name_that_a_terminal_would_obey_is_quoted(ckpt, tmp_path):
    for name in ("l", "r"):
        safetensors.torch.save_file({f"{name}\x1b[31m\n": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    for arguments in (["inspect", "l.safetensors"], ["diff", "l.safetensors", "r.safetensors"]):
        out = ckpt(arguments[0], *(tmp_path / name for name in arguments[1:]))[1]
        assert "'l\\x1b[31m\\n'" in out
        assert "\x1b" not in out


class Dying(Storage):
    """Stops when the files of a commit are moved to their places."""

    def replace(self, source, target):
        raise OSError("the power is gone")


def test_a_commit_that_was_not_installed_yet_counts(ckpt, tmp_path, run):
    model = ModelWrapper(Net(5))
    with pytest.raises(CheckpointError, match="the power is gone"):
        GeneralCheckpointIO(storage=Dying()).save_model(model, run, shard=True)
    assert any(name.startswith(".booster-commit-") for name in names_in(run))
    IO.save_model(model, tmp_path / "expected", shard=True)
    assert "OK: " in ckpt("verify", run)[1]
    assert "\nmodel: 9 tensors" in ckpt("inspect", run)[1]
    assert ckpt("convert", run, tmp_path / "out", "--no-optimizer")[0] == 0
    assert ckpt("diff", tmp_path / "out", tmp_path / "expected")[0] == 0


# verify


@pytest.mark.parametrize("use_safetensors", [True, False])
def test_verify_says_what_it_checked(ckpt, tmp_path, use_safetensors):
    model, optimizer = stepped(Net())
    IO.save_model(model, tmp_path / "run", shard=True, use_safetensors=use_safetensors)
    IO.save_optimizer(optimizer, tmp_path / "run", shard=True, use_safetensors=use_safetensors)
    code, out, err = ckpt("verify", tmp_path / "run")
    assert (code, err) == (0, "")
    right = "files, sizes, structure, tiling and checksums are right"
    lines = out.splitlines()
    assert lines[:2] == [
        f"model: 9 tensors in 1 file, 376 B: {right}",
        f"optimizer: 12 tensors in 1 file, 648 B: {right}",
    ]
    assert lines[2].startswith(f"OK: {tmp_path / 'run'} is what was saved (1.02 kB in ")
    assert lines[2].endswith(" GB/s)")


FILES = [
    "model.safetensors",
    "model.safetensors.manifest.json",
    "optimizer-00001-of-00001.safetensors",
    "optimizer.safetensors.index.json",
    "optimizer.safetensors.manifest.json",
    "optimizer_groups.json",
]


# By default every file cut, which what reads it must see, and every damage to one that a manifest is for.
@pytest.mark.parametrize(
    ("damage", "name"),
    [
        pytest.param(damage, name, marks=() if damage == "cut" or name == FILES[0] else pytest.mark.slow)
        for damage in ("flip", "cut", "empty", "remove")
        for name in FILES
    ],
)
def test_verify_finds_damage_in_every_file(ckpt, run, name, damage):
    path = run / name
    if damage == "remove":
        path.unlink()
    elif damage == "flip":
        flip(path, path.stat().st_size // 2 if path.suffix == ".json" else -1)
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "cut" else b"")
    code, out, _ = ckpt("verify", run)
    assert code == 1
    part = name.partition(".")[0].partition("-")[0].partition("_")[0]
    assert f"DAMAGED: {part}: " in out
    assert name in out or "manifest" in out
    other = {"model": "optimizer", "optimizer": "model"}[part]
    assert f"{other}: " in out
    assert "checksums are right" in out  # the other part is looked at all the same


def test_verify_reports_shards_that_nothing_names(ckpt, foreign):
    (foreign / "model.safetensors.index.json").unlink()
    IO.save_optimizer(stepped(Net())[1], foreign, shard=True)
    code, out, _ = ckpt("verify", foreign)
    assert code == 1
    assert out.count("is a shard of a checkpoint without index and manifest") == 2


def test_verify_of_a_foreign_folder_checks_structure_and_says_so(ckpt, foreign):
    code, out, _ = ckpt("verify", foreign)
    assert code == 0
    assert "no checksums were recorded" in out
    assert f"OK in structure: {foreign} has no checksums" in out
    flip(foreign / "model-00001-of-00002.safetensors")
    assert ckpt("verify", foreign)[0] == 0  # that is what it means
    (foreign / "model-00002-of-00002.safetensors").write_bytes(b"")
    assert ckpt("verify", foreign)[0] == 1


@pytest.mark.parametrize(("name", "code"), [("m.safetensors", 1), ("m.bin", 0)])
def test_verify_of_one_file(ckpt, tmp_path, name, code):
    IO.save_model(ModelWrapper(nn.Linear(64, 64)), tmp_path / name, use_safetensors=name.endswith("safetensors"))
    assert ckpt("verify", tmp_path / name)[0] == 0
    flip(tmp_path / name, -1 if code else 9000)
    assert ckpt("verify", tmp_path / name)[0] == code


def test_verify_of_a_file_that_is_cut(ckpt, tmp_path):
    safetensors.torch.save_file({"a": torch.ones(4)}, tmp_path / "m.safetensors")
    path = tmp_path / "m.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    code, out, _ = ckpt("verify", path)
    assert code == 1
    assert out.startswith("DAMAGED: ")


# convert, consolidate


def test_convert_for_inference(ckpt, run, tmp_path):
    (run / "config.json").write_text('{"torch_dtype": "float32"}')
    code, out, _ = ckpt("convert", run, tmp_path / "out", "--dtype", "bf16", "--no-optimizer", "--format", "bin")
    assert code == 0
    assert out.splitlines() == [
        "left out: optimizer",
        "model: 7 tensors from float32 to bfloat16, with fewer bits: values are rounded",
        f"converted {run} to {tmp_path / 'out'}",
    ]
    assert names_in(tmp_path / "out") == ["config.json", "pytorch_model.bin", "pytorch_model.bin.manifest.json"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"torch_dtype": "bfloat16"}
    assert ckpt("verify", tmp_path / "out")[0] == 0
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert found["embed.weight"].dtype == torch.bfloat16


def test_convert_of_a_foreign_folder_records_checksums(ckpt, foreign, tmp_path):
    assert ckpt("convert", foreign, tmp_path / "out", "--size-per-shard", "5000")[0] == 0
    assert "model.safetensors" in names_in(tmp_path / "out")
    assert "checksums are right" in ckpt("verify", tmp_path / "out")[1]
    assert ckpt("diff", foreign, tmp_path / "out")[0] == 0


def test_convert_refuses_a_target_that_is_there(ckpt, run, foreign):
    code, out, err = ckpt("convert", run, foreign)
    assert (code, out) == (2, "")
    assert err == (
        f"booster ckpt: {foreign} exists already: give a new path, or --overwrite to replace the checkpoint there\n"
    )
    assert ckpt("convert", run, foreign, "--overwrite")[0] == 0
    assert ckpt("diff", run, foreign)[0] == 0


def test_consolidate(ckpt, foreign, run, tmp_path):
    assert ckpt("consolidate", foreign, tmp_path / "m.safetensors")[0] == 0
    assert_equal(safetensors.torch.load_file(tmp_path / "m.safetensors"), {"a": torch.ones(4), "b": torch.ones(4)})
    assert "checksums are right" in ckpt("verify", tmp_path / "m.safetensors")[1]
    assert ckpt("consolidate", run, tmp_path / "o.bin", "--optimizer")[0] == 0
    assert ckpt("diff", run, tmp_path / "o.bin")[0] == 0
    code, _, err = ckpt("consolidate", foreign, tmp_path / "o.safetensors", "--optimizer")
    assert code == 2
    assert "holds no optimizer, only model" in err


# diff


def test_diff_of_equals(ckpt, run, tmp_path):
    assert ckpt("convert", run, tmp_path / "b", "--format", "bin")[0] == 0
    code, out, _ = ckpt("diff", run, tmp_path / "b")
    assert code == 0
    assert out.splitlines() == [
        "model: 9 tensors in both, largest difference of an element 0",
        "optimizer: 12 tensors in both, largest difference of an element 0",
        "the checkpoints are equal",
    ]


def test_diff_lists_what_differs(ckpt, tmp_path):
    left = {"a": torch.zeros(3), "b": torch.zeros(2, 2), "c": torch.zeros(3), "d": torch.zeros(1)}
    right = {"a": torch.tensor([0, 0.5, 0]), "b": torch.zeros(4), "c": torch.zeros(3).half(), "e": torch.zeros(1)}
    for name, tensors in {"l": left, "r": right}.items():
        safetensors.torch.save_file(tensors, tmp_path / f"{name}.safetensors")
    code, out, _ = ckpt("diff", tmp_path / "l.safetensors", tmp_path / "r.safetensors")
    assert code == 1
    assert sorted(out.splitlines()[1:-1]) == [
        "  a: 1 of 3 elements differ, by at most 0.5",
        "  b: shape [2, 2] != [4]",
        "  c: dtype float32 != float16",
        "  only in A: d",
        "  only in B: e",
    ]
    assert out.splitlines()[-1] == "the checkpoints differ"


def test_diff_with_a_tolerance(ckpt, tmp_path):
    for name, value in {"l": 1.0, "r": 1.25}.items():
        safetensors.torch.save_file({"a": torch.tensor([value])}, tmp_path / f"{name}.safetensors")
    paths = tmp_path / "l.safetensors", tmp_path / "r.safetensors"
    assert ckpt("diff", *paths)[0] == 1
    code, out, _ = ckpt("diff", *paths, "--tolerance", "0.25")
    assert code == 0
    assert "largest difference of an element 0.25" in out
    assert ckpt("diff", *paths, "--tolerance", "-1")[0] == 2
    assert ckpt("diff", *paths, "--tolerance", "nan")[0] == 2


def test_diff_compares_groups(ckpt, run, tmp_path):
    IO.save_optimizer(stepped(Net(), lr=0.5)[1], tmp_path / "o.safetensors")
    code, out, _ = ckpt("diff", run, tmp_path / "o.safetensors")
    assert code == 1
    assert "  param_groups[0].lr: 0.125 != 0.5" in out.splitlines()
    assert "model" not in out


def test_diff_of_a_checkpoint_without_the_optimizer(ckpt, run, foreign):
    code, out, _ = ckpt("diff", run, foreign)
    assert code == 1
    assert "optimizer: not in both\n  only in A\n" in out


# Whole training states.


def test_a_root_of_steps_stands_for_its_latest(ckpt, tmp_path):
    booster, model, optimizer = trained()
    for step in (5, 10):
        booster.save(tmp_path / "root", model, optimizer, extra={"note": "x"}, step=step)
    found = json.loads(ckpt("inspect", tmp_path / "root", "--json")[1])
    assert found["path"] == str(tmp_path / "root" / "step-00000010")
    assert [part["kind"] for part in found["parts"]] == ["model", "optimizer", "random_state"]
    assert found["training_state"]["facts"]["step"] == 10
    assert found["training_state"]["extra"] == ["note"]
    out = ckpt("inspect", tmp_path / "root")[1]
    assert "  step         10\n" in out
    assert out.count("  step ") == 1
    code, out, _ = ckpt("verify", tmp_path / "root")
    assert code == 0
    assert "training state: " in out
    code, out, _ = ckpt("diff", tmp_path / "root" / "step-00000005", tmp_path / "root")
    assert code == 1
    assert out.splitlines()[-3:] == ["training state: 1 difference", "  step: 5 != 10", "the checkpoints differ"]


@pytest.mark.parametrize("name", ["training_state.json", "training_state.manifest.json", "model.safetensors"])
def test_verify_of_a_whole_training_state(ckpt, tmp_path, name):
    booster, model, optimizer = trained()
    booster.save(tmp_path / "s", model, optimizer)
    assert ckpt("verify", tmp_path / "s")[0] == 0
    path = tmp_path / "s" / name
    flip(path, path.stat().st_size // 2 if path.suffix == ".json" else -1)
    code, out, _ = ckpt("verify", tmp_path / "s")
    assert code == 1
    assert "DAMAGED: " in out


def test_a_component_of_another_save_is_found(ckpt, tmp_path):
    booster, model, optimizer = trained()
    booster.save(tmp_path / "s", model, optimizer)
    IO.save_model(ModelWrapper(nn.Linear(4, 3)), tmp_path / "other", shard=True)
    for name in names_in(tmp_path / "other"):
        os.replace(tmp_path / "other" / name, tmp_path / "s" / name)
    code, out, _ = ckpt("verify", tmp_path / "s")
    assert code == 1
    assert "model.safetensors.manifest.json" in out


def test_a_converted_training_state_continues(ckpt, tmp_path):
    booster, model, optimizer = trained()
    booster.save(tmp_path / "s", model, optimizer, extra={"note": 1})
    assert ckpt("convert", tmp_path / "s", tmp_path / "b", "--format", "bin")[0] == 0
    assert ckpt("verify", tmp_path / "b")[0] == 0
    assert ckpt("diff", tmp_path / "s", tmp_path / "b")[0] == 0
    other, other_model, other_optimizer = trained(1)
    assert other.load(tmp_path / "b", other_model, other_optimizer) == {"note": 1}
    assert_equal(state_of(other_model), state_of(model))


def test_several_models_have_folders(ckpt, tmp_path):
    booster, model, optimizer = trained()
    booster.save(tmp_path / "s", {"g": model, "d": trained(1)[1]}, {"g": optimizer})
    found = json.loads(ckpt("inspect", tmp_path / "s", "--json")[1])
    assert sorted((part["folder"], part["kind"]) for part in found["parts"]) == [
        ("", "random_state"),
        ("d", "model"),
        ("g", "model"),
        ("g", "optimizer"),
    ]
    code, _, err = ckpt("consolidate", tmp_path / "s", tmp_path / "m.safetensors")
    assert code == 2
    assert "holds several" in err
    assert ckpt("consolidate", tmp_path / "s" / "d", tmp_path / "m.safetensors")[0] == 0
    assert ckpt("convert", tmp_path / "s", tmp_path / "b", "--size-per-shard", "1")[0] == 0
    assert ckpt("diff", tmp_path / "s", tmp_path / "b")[0] == 0
    assert ckpt("verify", tmp_path / "b")[0] == 0
    assert ckpt("convert", tmp_path / "s", tmp_path / "models", "--no-optimizer")[0] == 0
    assert names_in(tmp_path / "models") == ["d", "g"]
    assert ckpt("inspect", tmp_path / "models")[0] == 0


# What can't be done.


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["inspect", "nothing"], "does not exist"),
        (["verify", "nothing"], "does not exist"),
        (["inspect", "empty"], "holds no checkpoint"),
        (["verify", "empty"], "holds no checkpoint"),
        (["inspect", "text.txt"], "is not a known format"),
        (["inspect", "config.json"], "is not an index"),
        (["convert", "m.safetensors", "b", "--size-per-shard", "0"], "size_per_shard=0"),
        (["consolidate", "m.safetensors", "m.safetensors"], "are nested or the same"),
        (["export-optimizer", "m.safetensors", "o.pt"], "holds no optimizer"),
    ],
)
def test_errors_are_one_line_and_exit_with_2(ckpt, tmp_path, monkeypatch, arguments, text):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text.txt").write_text("x")
    Path("config.json").write_text("{}")
    safetensors.torch.save_file({"a": torch.ones(2)}, "m.safetensors")
    before = names_in(tmp_path)
    code, out, err = ckpt(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("booster ckpt: ")
    assert text in err
    assert err.count("\n") == 1
    assert names_in(tmp_path) == before


def test_a_pickle_is_not_run(ckpt, tmp_path):
    torch.save({"a": nn.Linear(2, 2)}, tmp_path / "m.pt")
    code, _, err = ckpt("inspect", tmp_path / "m.pt")
    assert code == 2
    assert "without running code" in err


@pytest.mark.parametrize("action", ["inspect", "verify", "convert", "consolidate", "diff", "export-optimizer"])
def test_help_has_an_example(capsys, action):
    with pytest.raises(SystemExit, match="0"):
        main(["ckpt", action, "--help"])
    assert f"booster ckpt {action} " in capsys.readouterr().out.partition("example:")[2]


def test_the_real_command(run):
    flip(run / "model.safetensors")
    command = [sys.executable, "-m", "booster", "ckpt", "verify", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "DAMAGED: model: " in done.stdout
    assert "optimizer: 12 tensors" in done.stdout


def test_a_reader_of_the_output_that_has_enough_is_no_error(run, monkeypatch):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["ckpt", "inspect", str(run)]) == 141
        output.flush()  # as the interpreter does when it ends
        monkeypatch.undo()
