"""What is opened, what is refused, and that nothing outside of a checkpoint is touched."""

from __future__ import annotations

import json
import os
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_tensors import save_tensors

from booster.checkpoint_io.layout import MODEL
from booster.checkpoint_io.loading.reader import open_checkpoint
from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def _tensors():
    tensors = {f"t.{dtype}": torch.arange(3).to(dtype) for dtype in DTYPES}
    return tensors | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "a/b \u00e9": torch.ones(2, 3).t()}


def _read_all(path):
    with open_checkpoint(Storage(), path, MODEL) as stored:
        return {name: stored.read(name).clone() for name in stored.specs}


def _assert_same(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert tensor.shape == right[name].shape
        assert tensor.tolist() == right[name].tolist()


def _refused(path, match=None):
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(Storage(), path, MODEL)


def test_our_files_open_elsewhere_and_theirs_here(tmp_path):
    save_tensors(tmp_path / "ours.safetensors", _tensors())
    save_file({name: tensor.contiguous() for name, tensor in _tensors().items()}, tmp_path / "theirs.safetensors")
    _assert_same(load_file(tmp_path / "ours.safetensors"), _tensors())
    _assert_same(_read_all(tmp_path / "ours.safetensors"), _tensors())
    _assert_same(_read_all(tmp_path / "theirs.safetensors"), _tensors())


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_files_of_torch_save_open(tmp_path, suffix, is_zip):
    path = tmp_path / f"weights{suffix}"
    tensors = _tensors() | {"parameter": torch.nn.Parameter(torch.ones(2))}
    if not is_zip:  # torch cannot read its own old form with newer formats
        tensors = {name: tensor for name, tensor in tensors.items() if "float8" not in name}
    torch.save(tensors, path, _use_new_zipfile_serialization=is_zip)
    _assert_same(_read_all(path), tensors)


def test_a_view_is_written_without_the_rest_of_its_memory(tmp_path):
    save_tensors(tmp_path / "view.bin", {"view": torch.zeros(100_000)[:2]}, use_safetensors=False)
    assert (tmp_path / "view.bin").stat().st_size < 10_000


class _RunsCode:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize("content", [{"a": _RunsCode()}, [torch.zeros(1)], {"a": 1}, {1: torch.zeros(1)}])
@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_other_pickles_are_refused(tmp_path, monkeypatch, content, suffix):
    monkeypatch.chdir(tmp_path)
    torch.save(content, tmp_path / f"x{suffix}")
    _refused(tmp_path / f"x{suffix}")
    assert not (tmp_path / "ran").exists()


def _write(directory, name="model.safetensors", **tensors):
    directory.mkdir(exist_ok=True)
    save_file(tensors or {"a": torch.ones(2)}, directory / name)


def _write_index(directory, weight_map, name="model.safetensors.index.json"):
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_the_index_goes_before_a_single_file(tmp_path):
    _write(tmp_path, "model.safetensors", stale=torch.zeros(1))
    _write(tmp_path, "model-00001-of-00001.safetensors")
    _write(tmp_path, "model-00001-of-00009.safetensors", left_over=torch.zeros(1))
    _write_index(tmp_path, {"a": "model-00001-of-00001.safetensors"})
    assert list(_read_all(tmp_path)) == ["a"]
    assert list(_read_all(tmp_path / "model.safetensors.index.json")) == ["a"]


def test_one_variant_is_found_and_two_are_not_guessed(tmp_path):
    _write(tmp_path, "model.fp16.safetensors")
    assert list(_read_all(tmp_path)) == ["a"]
    _write(tmp_path, "model.bf16.safetensors")
    _refused(tmp_path, "several")
    _write(tmp_path, "model.safetensors", plain=torch.ones(1))
    assert list(_read_all(tmp_path)) == ["plain"]


def test_of_a_release_in_both_formats_safetensors_are_read(tmp_path):
    _write(tmp_path, "model.safetensors", plain=torch.ones(1))
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert list(_read_all(tmp_path)) == ["plain"]
    (tmp_path / "pytorch_model.bin.manifest.json").touch()  # a save: which of the two is the newer one?
    _refused(tmp_path, "several")
    (tmp_path / "pytorch_model.bin.manifest.json").unlink()
    save_tensors(tmp_path / "model.safetensors", {"plain": torch.ones(1)})
    _refused(tmp_path, "several")


def test_nothing_is_globbed(tmp_path):
    _write(tmp_path, "adapter_model.safetensors")
    _write(tmp_path, "model-00001-of-00002.safetensors")
    _refused(tmp_path, "holds no model checkpoint")


def test_missing_and_unknown_paths(tmp_path):
    _refused(tmp_path / "nowhere", "does not exist")
    (tmp_path / "file.ckpt").write_bytes(b"")
    _refused(tmp_path / "file.ckpt", "is not a known format")
    (tmp_path / "other.json").write_text("{}")
    _refused(tmp_path / "other.json", "is not a model index")
    (tmp_path / "model.safetensors").mkdir()
    _refused(tmp_path, "is not a regular file")


HOSTILE_NAMES = [
    "../x.safetensors",
    "/etc/x.safetensors",
    "a/../x.safetensors",
    "C:x.safetensors",
    "\\\\srv\\x.safetensors",
    "x\0.safetensors",
    "x\n.safetensors",
    ".",
    "..",
    "",
    ".hidden.safetensors",
    "x.bin",
    "x" * 4096 + ".safetensors",
    3,
    None,
    ["x.safetensors"],
    "\u202exmodel.safetensors",
    "missing.safetensors",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: repr(name)[:30])
def test_names_in_an_index_stay_in_the_directory(tmp_path, name):
    _write(tmp_path, "x.safetensors")
    _write_index(tmp_path / "dir", {"a": name})
    _refused(tmp_path / "dir")


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": "m.safetensors", "a": "m.safetensors"}}', b"\xff"]
    + [b'{"weight_map": {}, "x": NaN}', b'{"weight_map": ' + b'{"a":' * 100_000],
    ids=lambda text: repr(text[:30]),
)
def test_damaged_indexes_are_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    _refused(tmp_path)


def test_a_huge_index_is_refused_unread(tmp_path):
    with (tmp_path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(65 * 2**20)
    _refused(tmp_path, "are allowed")


def test_a_shard_that_lost_a_tensor_and_a_tensor_in_two_shards(tmp_path):
    _write(tmp_path, "x.safetensors")
    _write(tmp_path, "y.safetensors")
    _write_index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    _refused(tmp_path, "lacks 1 tensors")
    _write_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    _refused(tmp_path)
    _write(tmp_path, "y.safetensors", a=torch.zeros(1), b=torch.zeros(1))
    _refused(tmp_path, "is in two files")


@pytest.mark.parametrize("linked", ["model.safetensors", "model.safetensors.index.json"])
def test_links_out_of_the_directory_are_refused(tmp_path, linked):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    _write(outside)
    _write_index(outside, {"a": "model.safetensors"})
    inside.mkdir()
    (inside / linked).symlink_to(outside / linked)
    _refused(inside, "leaves its directory")
    (tmp_path / "link").symlink_to(outside)
    assert list(_read_all(tmp_path / "link")) == ["a"]  # the user's own link to a whole checkpoint


def test_links_of_a_hub_cache_are_followed_to_its_blobs_only(tmp_path):
    blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / "revision"
    snapshot.mkdir(parents=True)
    _write(blobs, "0a1b")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a1b")
    assert list(_read_all(snapshot)) == ["a"]
    _write(tmp_path, "secret")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../../secret")
    _refused(snapshot, "leaves its directory")


@pytest.mark.parametrize("target", ["model.safetensors", "nowhere"])
def test_loops_and_dangling_links_are_refused(tmp_path, target):
    (tmp_path / "model.safetensors").symlink_to(target)
    _refused(tmp_path, "cannot open")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
def test_a_pipe_does_not_block(tmp_path, name):
    os.mkfifo(tmp_path / name)
    _refused(tmp_path, "is not a regular file")


def _safetensors(document, data=b""):
    raw = json.dumps(document).encode() if not isinstance(document, bytes) else document
    return len(raw).to_bytes(8, "little") + raw + data


def _entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


MALFORMED = {
    "empty": b"",
    "short": b"\x01\x00",
    "header beyond the file": (2**40).to_bytes(8, "little") + b"{}",
    "header beyond 64 bits": b"\xff" * 8 + b"{}",
    "a list": _safetensors([]),
    "no JSON": _safetensors(b"{'a'"),
    "deep": _safetensors(b'{"a":' * 100_000),
    "duplicate": _safetensors(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'),
    "metadata": _safetensors({"__metadata__": {"a": 1}}),
    "incomplete": _safetensors({"a": {"dtype": "F32"}}),
    "format": _safetensors({"a": _entry(dtype="F4")}, b"1234"),
    "format no text": _safetensors({"a": _entry(dtype=["F32"])}, b"1234"),
    "negative": _safetensors({"a": _entry(shape=(-1, -1))}, b"1234"),
    "float size": _safetensors({"a": _entry(shape=(1.0,))}, b"1234"),
    "bool size": _safetensors({"a": _entry(shape=(True,))}, b"1234"),
    "wrong size": _safetensors({"a": _entry(shape=(2,))}, b"1234"),
    "overflow": _safetensors({"a": _entry(shape=(2**62, 2**62))}, b"1234"),
    "many dimensions": _safetensors({"a": _entry(shape=(1,) * 1000)}, b"1234"),
    "gap": _safetensors({"a": _entry(offsets=(4, 8))}, b"12345678"),
    "overlap": _safetensors({"a": _entry(), "b": _entry()}, b"1234"),
    "cut": _safetensors({"a": _entry()}, b"123"),
    "longer": _safetensors({"a": _entry()}, b"12345"),
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_headers_are_refused(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    _refused(tmp_path / "x.safetensors", "x.safetensors")


def test_damaged_files_are_refused_or_whole(tmp_path):
    """Bytes of the header changed at random: an error of ours, or tensors of the right sizes, never another error."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(4.0), "b": torch.arange(3)}, path)
    good, rng = path.read_bytes(), random.Random(0)
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(good) - 40)] = rng.randrange(256)
        path.write_bytes(bytes(damaged))
        try:
            assert sum(tensor.nbytes for tensor in _read_all(path).values()) == 40
        except CheckpointError:
            num_refused += 1
    assert num_refused > 300


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_cut_files_are_refused(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    save_tensors(path, {"a": torch.arange(8.0)}, use_safetensors=suffix == ".safetensors")
    good = path.read_bytes()
    for length in range(0, len(good), 7):
        path.write_bytes(good[:length])
        _refused(path)
