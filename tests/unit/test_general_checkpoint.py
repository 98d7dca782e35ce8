"""GeneralCheckpointIO in one process: what it writes, what it loads, what it refuses, what it leaves untouched."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_cases import FORMS, Net, assert_equal, names_in, state_of, stepped
from torch import nn

from booster.checkpoint_io import GeneralCheckpointIO
from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError, ConfigError
from booster.interface import ModelWrapper

IO = GeneralCheckpointIO()


def _tree(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _with_usual_names(tree):
    """Returns the files as if no shard had a second name; of a manifest, which has a checksum of itself, its files."""
    usual = {name.replace(".b.", "."): raw.replace(b".b.safetensors", b".safetensors") for name, raw in tree.items()}
    return {name: json.loads(raw)["files"] if ".manifest." in name else raw for name, raw in usual.items()}


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def form(request):
    return request.param


# Models.


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_comes_back(tmp_path, form, tied):
    name, options = form
    saved, loaded = Net(0, tied), Net(1, tied)
    IO.save_model(ModelWrapper(saved), tmp_path / name, **options)
    IO.load_model(ModelWrapper(loaded), tmp_path / name)
    assert_equal(state_of(loaded), state_of(saved))
    assert (loaded.head.weight is loaded.embed.weight) is tied
    assert names_in(tmp_path) == [name]


def test_a_plain_module_comes_back(tmp_path, form):
    name, options = form
    saved, loaded = Net(0), Net(1)
    IO.save_model(saved, tmp_path / name, **options)
    IO.load_model(loaded, tmp_path / name)
    assert_equal(state_of(loaded), state_of(saved))


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda path: IO.save_model({"weight": torch.ones(1)}, path), "a dict was given for the model"),
        (lambda path: IO.load_model(torch.ones(1), path), "a Tensor was given for the model"),
        (lambda path: IO.save_optimizer(Net(0), path), "a Net was given for the optimizer"),
        (lambda path: IO.load_optimizer(None, path), "a NoneType was given for the optimizer"),
    ],
)
def test_what_is_no_model_or_optimizer_is_refused(tmp_path, call, what):
    with pytest.raises(ConfigError, match=what):
        call(tmp_path / "file.safetensors")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("options", [{}, {"use_safetensors": False}, {"prefix": "a"}], ids=repr)
def test_a_model_in_several_shards_comes_back(tmp_path, options):
    saved, loaded = Net(0), Net(1)
    IO.save_model(ModelWrapper(saved), tmp_path / "m", shard=True, size_per_shard=100e-6, **options)
    (index,) = [name for name in names_in(tmp_path / "m") if ".index" in name]
    document = json.loads((tmp_path / "m" / index).read_text())
    assert document["metadata"] == {
        "total_parameters": sum(p.numel() for p in saved.parameters()),
        "total_size": sum(t.nbytes for name, t in saved.state_dict().items() if name != "head.weight"),
    }
    (manifest,) = [name for name in names_in(tmp_path / "m") if ".manifest" in name]
    assert set(document["weight_map"].values()) == set(names_in(tmp_path / "m")) - {index, manifest}
    assert "head.weight" not in document["weight_map"]
    IO.load_model(ModelWrapper(loaded), tmp_path / "m")
    assert_equal(state_of(loaded), state_of(saved))


def test_an_empty_model_comes_back(tmp_path, form):
    name, options = form
    IO.save_model(ModelWrapper(nn.ReLU()), tmp_path / name, **options)
    IO.load_model(ModelWrapper(nn.ReLU()), tmp_path / name)
    with pytest.raises(CheckpointError, match="missing in the checkpoint"):
        IO.load_model(ModelWrapper(Net()), tmp_path / name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_formats_are_kept_and_views_are_written_alone(tmp_path, dtype):
    model = nn.Module()
    model.view = nn.Parameter(torch.randn(8, 8, dtype=dtype)[2:5].t())
    model.count = nn.Buffer(torch.tensor(3))
    IO.save_model(ModelWrapper(model), tmp_path / "m.safetensors")
    before = state_of(model)
    with torch.no_grad():
        model.view.zero_()
    IO.load_model(ModelWrapper(model), tmp_path / "m.safetensors")
    assert_equal(state_of(model), before)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_floats_become_the_models_format(tmp_path, stored, wanted):
    saved, loaded = Net(0, dtype=stored), Net(1, dtype=wanted)
    IO.save_model(ModelWrapper(saved), tmp_path / "m.safetensors")
    IO.load_model(ModelWrapper(loaded), tmp_path / "m.safetensors")
    assert loaded.embed.weight.dtype == wanted
    assert torch.equal(loaded.embed.weight, saved.embed.weight.to(wanted))


@pytest.mark.parametrize(
    ("stored", "wanted", "fits"),
    [
        (torch.int32, torch.int64, True),
        (torch.int64, torch.int32, False),
        (torch.uint8, torch.int8, False),
        (torch.int64, torch.float64, False),
        (torch.float32, torch.int64, False),
        (torch.bool, torch.int64, False),
    ],
)
def test_other_formats_convert_without_loss_or_not_at_all(tmp_path, stored, wanted, fits):
    model, target = nn.Module(), nn.Module()
    model.register_buffer("x", torch.ones(2, dtype=stored))
    target.register_buffer("x", torch.zeros(2, dtype=wanted))
    IO.save_model(ModelWrapper(model), tmp_path / "m.safetensors")
    if fits:
        IO.load_model(ModelWrapper(target), tmp_path / "m.safetensors")
    else:
        with pytest.raises(CheckpointError, match="'x' is torch"):
            IO.load_model(ModelWrapper(target), tmp_path / "m.safetensors")
    assert target.x.tolist() == ([1, 1] if fits else [0, 0])


def test_loading_tells_the_hooks(tmp_path):
    calls = []
    model = ModelWrapper(Net())
    model.register_load_hook(lambda: calls.append(1))
    IO.save_model(model, tmp_path / "m.safetensors")
    IO.load_model(model, tmp_path / "m.safetensors")
    assert calls == [1]


def _save_state(state, path):
    torch.save(state, path)
    return path


@pytest.mark.parametrize("prefix", ["module", "_orig_mod"])
def test_names_with_the_prefix_of_a_wrapper_say_so(tmp_path, prefix):
    state = {f"{prefix}.{name}": tensor for name, tensor in state_of(Net(0)).items()}
    with pytest.raises(CheckpointError, match=rf"begin with '{prefix}\.'.*model\.{prefix}\.state_dict\(\)"):
        IO.load_model(ModelWrapper(Net(1)), _save_state(state, tmp_path / "m.bin"))
    with pytest.raises(CheckpointError, match="model that it was saved from"):
        IO.load_model(ModelWrapper(Net(1)), _save_state({**state, "other": torch.ones(1)}, tmp_path / "m.bin"))


def test_all_that_differs_is_listed_and_nothing_is_loaded(tmp_path):
    state = state_of(Net(0))
    del state["norm.bias"], state["scale"]
    state |= {"norm.weight": torch.zeros(7), "mask": torch.zeros(4), "extra": torch.zeros(1)}
    state |= {f"layer{i}": torch.zeros(1) for i in range(20)}
    model = Net(1)
    before = state_of(model)
    with pytest.raises(CheckpointError) as caught:
        IO.load_model(ModelWrapper(model), _save_state(state, tmp_path / "m.bin"))
    text = str(caught.value)
    assert "2 missing in the checkpoint:\n    scale\n    norm.bias" in text
    assert "21 not in the model:\n    extra" in text
    assert "... and 11 more" in text
    assert "'norm.weight' has shape (7,) in the checkpoint, (6,) in the model" in text
    assert "'mask' is torch.float32 in the checkpoint, torch.bool in the model" in text
    assert_equal(state_of(model), before)


def test_not_strict_loads_what_fits_and_at_least_something(tmp_path):
    saved, model = Net(0), Net(1)
    state = {"embed.weight": saved.embed.weight.detach(), "norm.weight": torch.zeros(7), "extra": torch.zeros(1)}
    before = state_of(model)
    IO.load_model(ModelWrapper(model), _save_state(state, tmp_path / "m.bin"), strict=False)
    assert torch.equal(model.embed.weight, saved.embed.weight)
    assert torch.equal(model.norm.weight, before["norm.weight"])
    before = state_of(model)
    with pytest.raises(CheckpointError, match="no tensor of"):
        IO.load_model(ModelWrapper(model), _save_state({"x": torch.zeros(1)}, tmp_path / "x.bin"), strict=False)
    assert_equal(state_of(model), before)


@pytest.mark.parametrize("names", [("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")], ids=str)
def test_a_tied_tensor_is_found_under_any_name(tmp_path, names):
    saved, model = Net(0), Net(1)
    tied = {"embed.weight", "head.weight"}
    state = {name: tensor for name, tensor in state_of(saved).items() if name not in tied or name in names}
    IO.load_model(ModelWrapper(model), _save_state(state, tmp_path / "m.bin"))
    assert_equal(state_of(model), state_of(saved))


def test_tied_tensors_that_differ_in_the_file_are_refused(tmp_path):
    untied, model = Net(0, tied=False), Net(1)
    before = state_of(model)
    path = _save_state(state_of(untied), tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match="one tied tensor in the model, but differ"):
        IO.load_model(ModelWrapper(model), path)
    assert_equal(state_of(model), before)
    IO.load_model(ModelWrapper(model), path, strict=False)
    assert torch.equal(model.head.weight, untied.embed.weight)


# The directory.


def _modes(path):
    return {stat.S_IMODE(found.stat().st_mode) for found in path.rglob("*") if found.is_file()}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_modes_follow_the_umask(tmp_path, form, umask, mode):
    name, options = form
    before = os.umask(umask)
    try:
        (tmp_path / "d").mkdir()
        IO.save_model(ModelWrapper(Net()), tmp_path / "d" / name, **options)
    finally:
        os.umask(before)
    assert _modes(tmp_path / "d") == {mode}


@pytest.mark.parametrize(("first", "second"), [(100, 200), (200, 100), (100, 10**6), (10**6, 100), (100, 100)])
def test_a_save_over_a_save_leaves_the_new_one_alone(tmp_path, first, second):
    target = tmp_path / "m"
    for seed, size in ((0, first), (1, second)):
        IO.save_model(ModelWrapper(Net(seed)), target, shard=True, size_per_shard=size / 10**6)
    IO.save_model(ModelWrapper(Net(1)), tmp_path / "fresh", shard=True, size_per_shard=second / 10**6)
    assert _with_usual_names(_tree(target)) == _with_usual_names(_tree(tmp_path / "fresh"))
    assert any(".b." in name for name in _tree(target)) is (first == second)


@pytest.mark.parametrize("is_safetensors", [True, False])
def test_a_save_in_the_other_format_replaces_the_one_before(tmp_path, is_safetensors):
    target = tmp_path / "m"
    IO.save_model(ModelWrapper(Net()), target, shard=True, size_per_shard=1e-4, use_safetensors=is_safetensors)
    IO.save_model(ModelWrapper(Net()), target, shard=True, prefix="ema", use_safetensors=is_safetensors)
    IO.save_model(ModelWrapper(Net(1)), target, shard=True, use_safetensors=not is_safetensors)
    suffix = "bin" if is_safetensors else "safetensors"
    assert {name.rpartition(".")[2] for name in _tree(target) if "ema" not in name} == {suffix, "json"}
    assert any("ema" in name for name in _tree(target))
    loaded = ModelWrapper(Net(2))
    IO.load_model(loaded, target)
    assert_equal(state_of(loaded.unwrap()), state_of(Net(1)))


@pytest.mark.parametrize("is_safetensors", [True, False])
def test_a_release_in_the_other_format_stays(tmp_path, capfd, is_safetensors):
    name = "model.safetensors" if is_safetensors else "pytorch_model.bin"
    release = tmp_path / "release" / name
    IO.save_model(ModelWrapper(Net()), release)
    shutil.copy(release, tmp_path)
    IO.save_model(ModelWrapper(Net(1)), tmp_path, shard=True, use_safetensors=not is_safetensors)
    assert (tmp_path / name).exists()
    assert ("transformers reads it before" in capfd.readouterr().err) is is_safetensors


class _Overtaken(Storage):
    """Lets another save begin and end as soon as the first one here has ended its commit."""

    def __init__(self, save):
        self.save = save

    def unlock(self, descriptor):
        super().unlock(descriptor)
        save, self.save = self.save, lambda: None
        save()


def test_a_save_that_another_one_replaces_at_once_does_not_call_it_a_release(tmp_path, capfd):
    storage = _Overtaken(lambda: IO.save_model(ModelWrapper(Net(1)), tmp_path, shard=True))
    GeneralCheckpointIO(storage=storage).save_model(ModelWrapper(Net()), tmp_path, shard=True, use_safetensors=False)
    assert names_in(tmp_path) == ["model.safetensors", "model.safetensors.manifest.json"]
    assert "transformers" not in capfd.readouterr().err


class _BothBegin(Storage):
    """Lets both of two saves begin before either writes."""

    def __init__(self):
        self.begun = threading.Barrier(2)
        self.directories = set()

    def create(self, path):
        if path.parent not in self.directories:
            self.directories.add(path.parent)
            self.begun.wait(30)
        return super().create(path)


@pytest.mark.parametrize("size_per_shard", [1024, 200e-6])
def test_asynchronous_saves_in_two_formats_end_as_one_after_the_other(tmp_path, size_per_shard):
    storage = _BothBegin()
    saves = [GeneralCheckpointIO(storage=storage) for _ in range(2)]
    for number, one in enumerate(saves):
        model, is_safetensors = ModelWrapper(Net(number)), number == 0
        one.save_model(
            model, tmp_path, shard=True, size_per_shard=size_per_shard, use_safetensors=is_safetensors, use_async=True
        )
    for one in saves:
        one.wait()
    suffixes = {Path(name).suffix for name in names_in(tmp_path) if not name.endswith(".json")}
    found = ModelWrapper(Net(5))
    IO.load_model(found, tmp_path)
    number = [".safetensors", ".bin"].index(*suffixes)
    assert all(torch.equal(found.state_dict()[name], one) for name, one in Net(number).state_dict().items())


def test_an_asynchronous_save_goes_where_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saves = GeneralCheckpointIO()
    saves.save_model(ModelWrapper(Net()), "m", shard=True, use_async=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    saves.wait()
    assert names_in(tmp_path) == ["elsewhere", "m"]
    assert not names_in(tmp_path / "elsewhere")


def test_other_files_stay(tmp_path):
    target = tmp_path / "m"
    model, optimizer = stepped(Net())
    IO.save_model(model, target, shard=True, size_per_shard=200e-6, prefix="ema")
    IO.save_optimizer(optimizer, target, shard=True, size_per_shard=200e-6)
    others = {"notes.txt": b"x", "model-00001-of-00009.safetensors.bak": b"y", "adapter_model.safetensors": b"z"}
    for name, content in others.items():
        (target / name).write_bytes(content)
    before = _tree(target)
    IO.save_model(model, target, shard=True, size_per_shard=100e-6)
    after = _tree(target)
    assert before.items() <= after.items()
    assert "model.safetensors.index.json" in after
    IO.load_model(ModelWrapper(Net(2)), target)
    IO.load_optimizer(stepped(Net(2))[1], target)


@pytest.mark.parametrize("form_name", ["safetensors", "bin", "sharded"])
def test_what_a_dead_save_left_is_cleared_and_a_running_ones_is_not(tmp_path, form_name):
    name, options = FORMS[form_name]
    dead = [tmp_path / f".{name}.tmp-{'0' * 32}", tmp_path / f".{name}.tmp-{'1' * 32}"]
    dead[0].mkdir()
    (dead[0] / "model.safetensors").write_bytes(b"half")
    dead[1].mkdir()
    running = tmp_path / f".{name}.tmp-{'2' * 32}"
    running.mkdir()
    foreign = tmp_path / f".other.tmp-{'0' * 32}"
    foreign.mkdir()
    lock = Storage().lock(running)
    try:
        IO.save_model(ModelWrapper(Net()), tmp_path / name, **options)
    finally:
        Storage().unlock(lock)
    assert names_in(tmp_path) == sorted([name, running.name, foreign.name])


class _Fails(Storage):
    """Fails at one of the operations that change something, as a full or broken disk does."""

    def __init__(self, at):
        self.at = at
        self.num_done = 0

    def _count(self, path):
        self.num_done += 1
        if self.num_done - 1 == self.at:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def make_directory(self, path):
        self._count(path)
        super().make_directory(path)

    def create(self, path):
        self._count(path)
        return super().create(path)

    def sync(self, file):
        self._count(file.path)
        super().sync(file)

    def replace(self, source, target):
        self._count(target)
        super().replace(source, target)


def test_a_save_killed_between_two_moves_is_never_a_mixture(tmp_path):
    """Every operation of a save over a save fails in turn: what is left loads as old or as new."""
    old, new = Net(0), Net(1)
    found = set()
    for size in (100, 10**6):
        at, is_done = 0, False
        while not is_done:
            path = tmp_path / f"{size}-{at}"
            IO.save_model(ModelWrapper(old), path, shard=True, size_per_shard=100e-6)
            try:
                GeneralCheckpointIO(storage=_Fails(at)).save_model(
                    ModelWrapper(new), path, shard=True, size_per_shard=size / 10**6
                )
                is_done = True
            except CheckpointError:
                found.add(_which(path, old, new))
            at += 1
    assert found == {"old", "new"}


def _which(path, old, new):
    model = Net(2)
    try:
        IO.load_model(ModelWrapper(model), path)
    except CheckpointError:
        return "none"
    for name, candidate in (("old", old), ("new", new)):
        if all(
            torch.equal(left, right)
            for left, right in zip(state_of(model).values(), state_of(candidate).values(), strict=True)
        ):
            return name
    return "mixture"


# Arguments.


def _wrong_calls(directory, file):
    return {
        "directory for a file": (directory / "directory.bin", {}),
        "file for a directory": (file, {"shard": True}),
        "suffix bin": (directory / "m.bin", {"use_safetensors": True}),
        "suffix safetensors": (directory / "m.safetensors", {"use_safetensors": False}),
        "suffix of no format": (directory / "m.ckpt", {}),
        "file for a directory without a suffix": (file, {}),
        "size 0": (directory / "m", {"shard": True, "size_per_shard": 0}),
        "size nan": (directory / "m", {"shard": True, "size_per_shard": float("nan")}),
        "size without a unit": (directory / "m", {"shard": True, "size_per_shard": "5"}),
        "size in bits": (directory / "m", {"shard": True, "size_per_shard": "5Gb"}),
        "size bool": (directory / "m", {"shard": True, "size_per_shard": True}),
        "prefix of a file": (directory / "m.safetensors", {"prefix": "a"}),
        "prefix with a slash": (directory / "m", {"shard": True, "prefix": "../a"}),
        "empty prefix": (directory / "m", {"shard": True, "prefix": ""}),
        "empty path": ("", {}),
    }


@pytest.mark.parametrize("case", _wrong_calls(Path(), Path()))
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path, case):
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "directory.bin").mkdir()
    path, options = _wrong_calls(tmp_path, tmp_path / "file")[case]
    model, optimizer = stepped(Net())
    with pytest.raises(ConfigError):
        IO.save_model(model, path, **options)
    with pytest.raises(ConfigError):
        IO.save_optimizer(optimizer, path, **options)
    assert _tree(tmp_path) == {"file": b"mine"}
    assert not names_in(tmp_path / "directory.bin")


# As scripts of ColossalAI name what they save, without shard=True: the name, and what is there then.
NAMES = {
    "out": ["model.safetensors", "model.safetensors.manifest.json"],
    "model": ["model.safetensors", "model.safetensors.manifest.json"],
    "model.pth": None,
    "model.bin": None,
    "model.safetensors": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_name_decides_between_a_file_and_a_directory_of_one(tmp_path, name):
    model, optimizer = stepped(Net(tied=False))
    IO.save_model(model, tmp_path / "m" / name, size_per_shard=1e-6)
    IO.save_optimizer(optimizer, tmp_path / "o" / name, size_per_shard=1e-6)
    if NAMES[name] is None:
        assert names_in(tmp_path / "m") == names_in(tmp_path / "o") == [name]
    else:
        assert names_in(tmp_path / "m" / name) == NAMES[name]
        tensor_files = [one for one in names_in(tmp_path / "o" / name) if one.endswith(".safetensors")]
        assert tensor_files == ["optimizer-00001-of-00001.safetensors"]
    if name.endswith((".pth", ".bin")):
        assert torch.load(tmp_path / "m" / name, weights_only=True).keys() == state_of(model).keys()
    other, other_optimizer = stepped(Net(seed=1, tied=False))
    IO.load_model(other, tmp_path / "m" / name)
    IO.load_optimizer(other_optimizer, tmp_path / "o" / name)
    assert_equal(state_of(model), state_of(other))


@pytest.mark.parametrize(("size", "num_files"), [(0.004, 4), ("4KB", 4), ("4.0 KB", 4), ("1GiB", 1), (1024, 1)])
def test_sizes_are_megabytes_or_have_a_unit(tmp_path, size, num_files):
    model = nn.Sequential(*(nn.Linear(1000, 1, bias=False) for _ in range(4)))
    IO.save_model(model, tmp_path / "m", shard=True, size_per_shard=size)
    assert sum(name.endswith(".safetensors") for name in names_in(tmp_path / "m")) == num_files


def test_a_path_through_a_link_is_followed(tmp_path, form):
    name, options = form
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    IO.save_model(ModelWrapper(Net(0)), tmp_path / "link" / "deep" / name, **options)
    assert names_in(tmp_path / "real" / "deep") == [name]


def test_a_parent_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="saving the model"):
        IO.save_model(ModelWrapper(Net()), tmp_path / "file" / "m.safetensors")


def test_tensors_without_elements_to_write_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="materialise"):
        IO.save_model(ModelWrapper(nn.Linear(2, 2, device="meta")), tmp_path / "m.safetensors")
    assert names_in(tmp_path) == []


# State that is not the model's memory.


class Counting(nn.Module):
    """Counts its forwards in its extra state, and in a state of its own that `_save_to_state_dict` adds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.num_calls, self.num_more = nn.Linear(4, 4), 0, 0

    def get_extra_state(self):
        return torch.tensor(self.num_calls)

    def set_extra_state(self, state):
        self.num_calls = int(state)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "more"] = torch.tensor(self.num_more)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        self.num_more = int(state_dict.pop(prefix + "more", self.num_more))
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class Halved(nn.Module):
    """Shows its weights in half precision."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self._register_state_dict_hook(
            lambda module, state, prefix, _: state.update(
                {name: one.half() for name, one in state.items() if one.is_floating_point()}
            )
        )


def test_extra_state_and_state_of_overrides_come_back(tmp_path, form):
    name, options = form
    saved, loaded = nn.Sequential(Counting(), nn.BatchNorm1d(4)), nn.Sequential(Counting(), nn.BatchNorm1d(4))
    saved[0].num_calls, saved[0].num_more = 3, 5
    IO.save_model(ModelWrapper(saved), tmp_path / name, **options)
    IO.load_model(ModelWrapper(loaded), tmp_path / name)
    assert (loaded[0].num_calls, loaded[0].num_more) == (3, 5)
    assert_equal(state_of(loaded), state_of(saved))


def test_weights_that_a_hook_converts_come_back(tmp_path, form):
    name, options = form
    saved, loaded = Halved(0), Halved(1)
    saved.norm.running_mean.fill_(0.25)
    IO.save_model(ModelWrapper(saved), tmp_path / name, **options)
    IO.load_model(ModelWrapper(loaded), tmp_path / name)
    for one, other in zip(loaded.parameters(), saved.parameters(), strict=True):
        assert torch.equal(one, other.half().float())
    assert torch.equal(loaded.norm.running_mean, saved.norm.running_mean)
