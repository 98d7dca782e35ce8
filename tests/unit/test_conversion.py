"""A checkpoint in another form holds the same: formats, shards, dtypes, one file, and nothing of it changed."""

from __future__ import annotations

import json
import threading
import zlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_cases import Net, assert_equal, names_in, state_of, stepped
from torch.optim import AdamW

from booster.checkpoint_io import GeneralCheckpointIO
from booster.checkpoint_io.layout import MODEL, OPTIMIZER
from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.tools.convert import Conversion, consolidate, convert, export_optimizer, with_dtype
from booster.checkpoint_io.tools.inspect import find_contents
from booster.errors import CheckpointError, ConfigError
from booster.interface import ModelWrapper
from booster.mixed_precision.fp16 import Fp32MasterWeights

IO = GeneralCheckpointIO()
STORAGE = Storage()


@pytest.fixture
def run(tmp_path):
    """A model and its optimizer, in one directory."""
    model, optimizer = stepped(Net())
    IO.save_model(model, tmp_path / "run", shard=True)
    IO.save_optimizer(optimizer, tmp_path / "run", shard=True)
    return model, optimizer, tmp_path / "run"


def converted(source, target, **options):
    return convert(STORAGE, find_contents(STORAGE, source), Path(target), Conversion(**options))


def tensors_at(path, kind=MODEL):
    with find_contents(STORAGE, path).only_part(kind).open(STORAGE) as stored:
        return {name: stored.read(name).clone() for name in stored.specs}


def bytes_of_all(directory):
    return {path: zlib.crc32(path.read_bytes()) for path in sorted(directory.rglob("*")) if path.is_file()}


# Formats and shards.


@pytest.mark.parametrize("is_safetensors", [True, False])
@pytest.mark.parametrize("size_per_shard", [1, 1024])
def test_formats_and_shards_change_nothing_else(tmp_path, is_safetensors, size_per_shard):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(300, 400) for _ in range(4)))
    IO.save_model(ModelWrapper(net), tmp_path / "a", shard=True, use_safetensors=not is_safetensors)
    before = bytes_of_all(tmp_path / "a")
    converted(tmp_path / "a", tmp_path / "b", is_safetensors=is_safetensors, size_per_shard=size_per_shard)
    assert_equal(tensors_at(tmp_path / "b"), state_of(net))
    suffix = ".safetensors" if is_safetensors else ".bin"
    files = [name for name in names_in(tmp_path / "b") if name.endswith(suffix)]
    assert len(files) == (2 if size_per_shard == 1 else 1)
    assert all((tmp_path / "b" / name).stat().st_size < 1_100_000 for name in files if size_per_shard == 1)
    assert bytes_of_all(tmp_path / "a") == before


@pytest.mark.parametrize("is_safetensors", [True, False])
def test_a_converted_run_continues(tmp_path, run, is_safetensors):
    model, optimizer, source = run
    converted(source, tmp_path / "b", is_safetensors=is_safetensors)
    other_model, other = stepped(Net(1), AdamW, 1)
    IO.load_model(other_model, tmp_path / "b")
    IO.load_optimizer(other, tmp_path / "b")
    assert_equal(state_of(other_model), state_of(model))
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert_equal(tensors_at(tmp_path / "b", OPTIMIZER), tensors_at(source, OPTIMIZER))


@pytest.mark.parametrize("name", ["m.safetensors", "m.bin", "m.pt"])
def test_a_single_file_becomes_a_directory(tmp_path, name):
    net = Net()
    IO.save_model(ModelWrapper(net), tmp_path / name, use_safetensors=name.endswith("safetensors"))
    converted(tmp_path / name, tmp_path / "b")
    assert tensors_at(tmp_path / "b").keys() == tensors_at(tmp_path / name).keys()
    assert_equal(tensors_at(tmp_path / "b"), tensors_at(tmp_path / name))


def test_a_variant_stays_one(tmp_path):
    IO.save_model(ModelWrapper(Net()), tmp_path / "a", shard=True, prefix="fp16")
    converted(tmp_path / "a", tmp_path / "b")
    assert "model.fp16.safetensors" in names_in(tmp_path / "b")


def test_variants_beside_each_other(tmp_path):
    for prefix in (None, "fp16"):
        IO.save_model(ModelWrapper(Net()), tmp_path / "a", shard=True, prefix=prefix)
    (tmp_path / "a" / "README.md").write_text("mine")
    converted(tmp_path / "a", tmp_path / "b", is_safetensors=False)
    assert names_in(tmp_path / "b") == [
        "README.md",
        "pytorch_model.bin",
        "pytorch_model.bin.manifest.fp16.json",
        "pytorch_model.bin.manifest.json",
        "pytorch_model.fp16.bin",
    ]
    contents = find_contents(STORAGE, tmp_path / "b")
    consolidate(STORAGE, contents, contents.only_part(MODEL), tmp_path / "one.bin")
    assert_equal(tensors_at(tmp_path / "one.bin"), tensors_at(tmp_path / "a"))


def test_without_the_optimizer(tmp_path, run):
    assert converted(run[2], tmp_path / "b", keeps_optimizer=False) == ["left out: optimizer"]
    assert not [name for name in names_in(tmp_path / "b") if "optimizer" in name]


def test_an_optimizer_alone_can_not_do_without_it(tmp_path):
    IO.save_optimizer(stepped(Net())[1], tmp_path / "o", shard=True)
    with pytest.raises(ConfigError, match="nothing but an optimizer"):
        converted(tmp_path / "o", tmp_path / "b", keeps_optimizer=False)


# Dtypes.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_floats_of_a_model_and_nothing_else_are_converted(tmp_path, dtype):
    net = Net(dtype=torch.bfloat16 if dtype == torch.float32 else torch.float32)
    IO.save_model(ModelWrapper(net), tmp_path / "a", shard=True)
    (note,) = converted(tmp_path / "a", tmp_path / "b", dtype=dtype)
    expected = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors_at(tmp_path / "a").items()
    }
    found = tensors_at(tmp_path / "b")
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in expected.items()}
    assert_equal(found, expected)
    assert ("rounded" in note) == (dtype != torch.float32)


def test_float8_stays(tmp_path):
    tensors = {"w": torch.ones(4).to(torch.float8_e4m3fn), "scale": torch.ones(2)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    converted(tmp_path / "model.safetensors", tmp_path / "b", dtype=torch.bfloat16)
    assert {n: t.dtype for n, t in tensors_at(tmp_path / "b").items()} == {
        "w": torch.float8_e4m3fn,
        "scale": torch.bfloat16,
    }


def test_an_optimizers_masters_and_counters_stay(tmp_path):
    _, optimizer = stepped(Net(dtype=torch.bfloat16), num_steps=0)
    optimizer.master_weights = Fp32MasterWeights(optimizer.unwrap())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.unwrap().step()
    IO.save_optimizer(optimizer, tmp_path / "o", shard=True)
    converted(tmp_path / "o", tmp_path / "b", dtype=torch.bfloat16)
    before, after = tensors_at(tmp_path / "o", OPTIMIZER), tensors_at(tmp_path / "b", OPTIMIZER)
    kept = [name for name in before if name.endswith((".master", ".step"))]
    assert kept
    assert_equal({name: after[name] for name in kept}, {name: before[name] for name in kept})
    assert all(after[name].dtype == before[name].dtype == torch.float32 for name in kept)
    moments = {name: tensor for name, tensor in before.items() if name.endswith(("exp_avg", "exp_avg_sq"))}
    scalars = {name for name, tensor in moments.items() if tensor.dim() == 0}
    assert scalars
    for name, tensor in moments.items():
        assert torch.equal(after[name], tensor if name in scalars else tensor.bfloat16())


def test_fp16_is_no_format_for_an_optimizer(tmp_path, run):
    with pytest.raises(ConfigError, match="squared gradients"):
        converted(run[2], tmp_path / "b", dtype=torch.float16)
    converted(run[2], tmp_path / "b", dtype=torch.float16, keeps_optimizer=False)


def test_numbers_beyond_the_new_format_are_refused(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(3), "w": torch.tensor([1.0, 7e4])}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'w' of the model holds values beyond 65504"):
        converted(tmp_path / "model.safetensors", tmp_path / "b", dtype=torch.float16)
    assert not (tmp_path / "b").exists()
    safetensors.torch.save_file({"w": torch.tensor([torch.inf, torch.nan, 65504.0])}, tmp_path / "model.safetensors")
    converted(tmp_path / "model.safetensors", tmp_path / "b", dtype=torch.float16)


CONFIG = {"architectures": ["Net"], "torch_dtype": "float32", "time_step_limit": [0.0, float("inf")]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIG, CONFIG | {"torch_dtype": "bfloat16"}),
        ({"dtype": "float16"}, {"dtype": "bfloat16"}),
        ({"dtype": None}, {"dtype": None}),
        ({"text_config": {"dtype": "float32"}}, {"text_config": {"dtype": "bfloat16"}}),
        ({"quantization_config": {"dtype": "float32"}}, {"quantization_config": {"dtype": "float32"}}),
    ],
)
def test_the_config_says_the_new_format(config, expected):
    assert json.loads(with_dtype(json.dumps(config).encode(), "bfloat16", "config.json")) == expected


def test_a_config_that_is_right_stays_byte_for_byte():
    raw = b'{"dtype":"bfloat16" }'
    assert with_dtype(raw, "bfloat16", "config.json") is raw


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_config_that_is_none_is_an_error(raw):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        with_dtype(raw, "bfloat16", "config.json")


# Files beside the tensors.


def test_plain_files_come_along_and_pickles_do_not(tmp_path):
    source = tmp_path / "a"
    source.mkdir()
    safetensors.torch.save_file({"w": torch.ones(3)}, source / "model.safetensors")
    (source / "config.json").write_text('{"torch_dtype": "float32"}')
    (source / "tokenizer.json").write_text("{}")
    (source / "merges.txt").write_text("a b")
    (source / "training_args.bin").write_bytes(b"x")
    (source / ".hidden").write_text("x")
    (source / "logs").mkdir()
    notes = converted(source, tmp_path / "b", dtype=torch.bfloat16)
    assert names_in(tmp_path / "b") == [
        "config.json",
        "merges.txt",
        "model.safetensors",
        "model.safetensors.manifest.json",
        "tokenizer.json",
    ]
    assert (tmp_path / "b" / "merges.txt").read_text() == "a b"
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == {"torch_dtype": "bfloat16"}
    assert [note for note in notes if note.startswith("left out")] == [
        "left out: logs (a directory)",
        "left out: training_args.bin (tensors or a pickle that do not belong to the checkpoint)",
    ]


def test_an_optimizers_plain_files_come_along(tmp_path):
    IO.save_optimizer(stepped(Net())[1], tmp_path / "o", shard=True)
    (tmp_path / "o" / "notes.txt").write_text("mine")
    converted(tmp_path / "o", tmp_path / "b")
    assert names_in(tmp_path / "b") == names_in(tmp_path / "o")


def test_plain_files_of_a_folder_come_along_from_a_commit_that_is_not_installed(tmp_path):
    IO.save_model(ModelWrapper(Net()), tmp_path / "a" / "first", shard=True)
    commit = tmp_path / "a" / f".booster-commit-{'1' * 32}" / "first"
    commit.mkdir(parents=True)
    (commit / "notes.json").write_text("{}")
    converted(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "first" / "notes.json").read_text() == "{}"


def test_a_snapshot_of_the_hub_cache(tmp_path):
    blobs, source = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    source.mkdir(parents=True)
    safetensors.torch.save_file({"w": torch.ones(3)}, blobs / "123")
    (blobs / "456").write_text("{}")
    for name, blob in {"model.safetensors": "123", "config.json": "456"}.items():
        (source / name).symlink_to(blobs / blob)
    converted(source, tmp_path / "b")
    assert names_in(tmp_path / "b") == ["config.json", "model.safetensors", "model.safetensors.manifest.json"]
    assert not (tmp_path / "b" / "config.json").is_symlink()


def test_a_link_that_leaves_the_source_is_not_followed(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    source = tmp_path / "a"
    source.mkdir()
    safetensors.torch.save_file({"w": torch.ones(3)}, source / "model.safetensors")
    (source / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(CheckpointError, match="leaves its directory"):
        converted(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()


# Where it goes.


def test_the_target_must_be_free(tmp_path, run):
    source = run[2]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    (tmp_path / "empty").mkdir()
    before = bytes_of_all(source)
    for target, message in {
        tmp_path / "full": "exists already",
        source: "are nested or the same",
        source / "inner": "are nested or the same",
        tmp_path: "are nested or the same",
        tmp_path / "b.safetensors": "use consolidate",
    }.items():
        with pytest.raises(ConfigError, match=message):
            converted(source, target)
    converted(source, tmp_path / "empty")
    assert bytes_of_all(source) == before


def test_overwriting_leaves_nothing_of_the_old_checkpoint(tmp_path, run):
    source = run[2]
    IO.save_model(ModelWrapper(Net(1)), tmp_path / "b", shard=True, use_safetensors=False)
    IO.save_optimizer(stepped(Net(1))[1], tmp_path / "b", shard=True)
    (tmp_path / "b" / "log.txt").write_text("mine")
    converted(source, tmp_path / "b", keeps_optimizer=False, overwrites=True)
    assert names_in(tmp_path / "b") == ["log.txt", "model.safetensors", "model.safetensors.manifest.json"]
    assert_equal(tensors_at(tmp_path / "b"), tensors_at(source))


@pytest.mark.parametrize("stem", ["model", "optimizer"])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_source_gets_no_new_checksums(tmp_path, run, stem, damage):
    (path,) = run[2].glob(f"{stem}*.safetensors")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw if damage == "flip" else raw[:-1])
    contents = find_contents(STORAGE, run[2])
    with pytest.raises(CheckpointError, match=path.name):
        convert(STORAGE, contents, tmp_path / "b", Conversion())
    part = contents.only_part(MODEL if stem == "model" else OPTIMIZER)
    with pytest.raises(CheckpointError, match=path.name):
        consolidate(STORAGE, contents, part, tmp_path / "b.safetensors")
    if stem == "optimizer":
        with pytest.raises(CheckpointError, match=path.name):
            export_optimizer(STORAGE, contents, tmp_path / "b.pt")
    assert names_in(tmp_path) == ["run"]


# One file.


@pytest.mark.parametrize("name", ["one.safetensors", "one.bin", "one.pt"])
@pytest.mark.parametrize("kind", [MODEL, OPTIMIZER], ids=lambda kind: kind.name)
def test_consolidated(tmp_path, run, name, kind):
    contents = find_contents(STORAGE, run[2])
    consolidate(STORAGE, contents, contents.only_part(kind), tmp_path / name)
    assert_equal(tensors_at(tmp_path / name, kind), tensors_at(run[2], kind))
    other_model, other = stepped(Net(1), AdamW, 1)
    if kind == MODEL:
        IO.load_model(other_model, tmp_path / name)
        assert_equal(state_of(other_model), state_of(run[0]))
    else:
        IO.load_optimizer(other, tmp_path / name)
        assert other.state_dict()["param_groups"] == run[1].state_dict()["param_groups"]


def test_one_file_replaces_another_only_when_asked(tmp_path, run):
    contents = find_contents(STORAGE, run[2])
    target = tmp_path / "one.safetensors"
    target.write_text("old")
    with pytest.raises(ConfigError, match="exists already"):
        consolidate(STORAGE, contents, contents.only_part(MODEL), target)
    consolidate(STORAGE, contents, contents.only_part(MODEL), target, overwrites=True)
    assert_equal(tensors_at(target), tensors_at(run[2]))


@pytest.mark.parametrize("name", ["one.txt", "run"])
def test_the_name_of_one_file_says_its_format(tmp_path, run, name):
    contents = find_contents(STORAGE, run[2])
    with pytest.raises(ConfigError):
        consolidate(STORAGE, contents, contents.only_part(MODEL), tmp_path / name)


# Memory.


def anonymous_bytes():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the memory in use")
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "is_safetensors"), [(torch.bfloat16, True), (None, False)])
def test_memory_does_not_grow_with_the_model(tmp_path, dtype, is_safetensors):
    size = 2**26  # 256 MiB of fp32
    net = torch.nn.ParameterList([torch.nn.Parameter(torch.full((size // 4,), float(i))) for i in range(4)])
    IO.save_model(ModelWrapper(net), tmp_path / "a", shard=True)
    del net
    converted(tmp_path / "a", tmp_path / "warm", size_per_shard=64)
    before, peak, is_done = anonymous_bytes(), [0], threading.Event()

    def watch():
        while not is_done.wait(0.002):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        converted(tmp_path / "a", tmp_path / "b", dtype=dtype, is_safetensors=is_safetensors)
    finally:
        is_done.set()
        watcher.join()
    assert 0 < peak[0] - before < 128 * 2**20
