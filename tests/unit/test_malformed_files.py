"""Indexes, manifests and headers that are wrong: one kind of error, soon, in little memory, or an exact load."""

from __future__ import annotations

import json
import re
import time
import zlib
from pathlib import Path

import pytest
import torch
from oracles.malformed import mutated, odd_versions, random_of, with_head_crc32, with_header, with_seal
from safetensors.torch import save_file
from stored_tensors import bits, load_tensors, save_tensors

from booster.checkpoint_io.layout import MODEL
from booster.checkpoint_io.loading.reader import open_checkpoint
from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError

MAX_SECONDS = 1.0
MAX_BYTES = 64 * 2**20
INDEX = "model.safetensors.index.json"
MANIFEST = "model.safetensors.manifest.json"
SHARD = "model-00002-of-00003.safetensors"


def _tensors():
    # No two of the same size: what is swapped shows.
    return {"a": torch.arange(7.0), "b": torch.arange(15.0).reshape(3, 5), "c": torch.arange(4), "d": torch.ones(2, 1)}


def _header(raw):
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")]


class ReplacedDocument:
    """A checkpoint in which one document is replaced.

    Args:
        root: The directory or the only file.
        name: The file that holds the document.
        document: The document's text as it is.
    """

    def __init__(self, root, name, document):
        self.root, self.name, self.text = root, name, document
        self.path = root / name if root.is_dir() else root
        self.good = self.path.read_bytes()
        self.size = sum(path.stat().st_size for path in self.path.parent.iterdir())

    def put(self, raw):
        """Writes the changed document."""
        self.path.write_bytes(self.file(raw))

    def file(self, raw):
        """Returns the file with a changed document."""
        return raw


class HeaderPlace(ReplacedDocument):
    """The header of a safetensors file."""

    def file(self, raw):
        return with_head_crc32(with_header(raw, self.good[8 + len(_header(self.good)) :]))


class ManifestPlace(ReplacedDocument):
    """A manifest, whose own checksum is made to fit."""

    def file(self, raw):
        return with_seal(raw)


class RecordedPlace(ReplacedDocument):
    """A document that a manifest vouches for; the manifest is made to fit."""

    def __init__(self, root, name, document):
        super().__init__(root, name, document)
        self.manifest = json.loads((root / MANIFEST).read_bytes())

    def put(self, raw):
        super().put(raw)
        changed = self.file(raw)
        table = next(self.manifest[key] for key in ("documents", "files") if self.name in self.manifest[key])
        table[self.name] |= {"num_bytes": len(changed)} | self.checksums(changed)
        sealed = with_seal(json.dumps(self.manifest, separators=(",", ":")).encode())
        (self.root / MANIFEST).write_bytes(sealed)

    def checksums(self, changed):
        """Returns the members that vouch for the file."""
        return {"crc32": f"{zlib.crc32(changed):08x}"}


class RecordedHeaderPlace(RecordedPlace, HeaderPlace):
    """The header of a shard that a manifest vouches for."""

    def checksums(self, changed):
        head = changed[: 8 + len(_header(changed))]
        return {"head_bytes": len(head), "head_crc32": f"{zlib.crc32(head):08x}"}


def _foreign(root):
    root.mkdir()
    tensors = _tensors()
    save_file({"a": tensors["a"]}, root / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in "bcd"}, root / "model-00002-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors"} | dict.fromkeys("bcd", "model-00002-of-00002.safetensors")
    document = {"metadata": {"total_size": 128}, "weight_map": files}
    (root / INDEX).write_text(json.dumps(document))
    return root


def _ours(root):
    save_tensors(root, _tensors(), shard_bytes=70)
    assert (root / SHARD).exists()
    return root


def _place(kind, root):
    """Returns a fresh checkpoint with the place of this kind."""
    if kind == "foreign index":
        return ReplacedDocument(_foreign(root), INDEX, (root / INDEX).read_text())
    if kind == "foreign header":
        save_file(_tensors(), path := root.with_suffix(".safetensors"))
        return HeaderPlace(path, path.name, _header(path.read_bytes()).decode())
    if kind == "header":
        save_tensors(path := root.with_suffix(".safetensors"), _tensors())
        return HeaderPlace(path, path.name, _header(path.read_bytes()).decode())
    _ours(root)
    if kind == "manifest":
        return ManifestPlace(root, MANIFEST, (root / MANIFEST).read_text())
    if kind == "index":
        return RecordedPlace(root, INDEX, (root / INDEX).read_text())
    return RecordedHeaderPlace(root, SHARD, _header((root / SHARD).read_bytes()).decode())


KINDS = ("foreign index", "foreign header", "header", "manifest", "index", "recorded header")


@pytest.fixture(scope="module", params=KINDS)
def place(request, tmp_path_factory):
    return _place(request.param, tmp_path_factory.mktemp("malformed") / "m")


def _peak_bytes(field):
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def _reset_peak():
    Path("/proc/self/clear_refs").write_text("5")


def _is_refused(place, raw, what):
    """Loads a changed checkpoint; returns whether it was refused, and fails for anything but that or an exact load."""
    place.put(raw)
    targets = {name: torch.full_like(tensor, 77) for name, tensor in _tensors().items()}
    before = {name: bits(tensor) for name, tensor in targets.items()}
    _reset_peak()
    held, started = _peak_bytes("VmRSS"), time.process_time()
    try:
        load_tensors(place.root, targets)
        is_refused = False
    except CheckpointError:
        is_refused = True
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert time.process_time() - started < MAX_SECONDS, what
    assert _peak_bytes("VmHWM") - held < MAX_BYTES + place.size, what
    expected = before if is_refused else {name: bits(tensor) for name, tensor in _tensors().items()}
    assert {name: bits(tensor) for name, tensor in targets.items()} == expected, f"{what}: refused={is_refused}"
    return is_refused


def _run(place, seed, number):
    num_refused = 0
    for count in range(number):
        raw, notes = mutated(place.text, random_of(f"{seed}/{count}"))
        num_refused += _is_refused(place, raw, f"seed {seed}, number {count}: {notes}: {raw[:2000]}")
    assert number * 0.5 < num_refused


def test_the_documents_as_they_are_load(place):
    assert not _is_refused(place, place.text.encode(), "as it is")


def test_mutated_documents_are_refused_or_load_exactly(place):
    _run(place, seed=0, number=170)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_mutated_documents_are_refused_or_load_exactly(place, seed):
    _run(place, seed, number=170)


# By hand: every member of every document with every odd value.

ODD_PLACES = {
    "foreign index": [["weight_map"], ["weight_map", "a"]],
    "foreign header": [["a"], ["a", "dtype"], ["a", "shape"], ["a", "data_offsets"], ["b", "shape", 0]],
    "header": [["__metadata__"], ["__metadata__", "booster_record"], ["__metadata__", "booster_head_crc32"]],
    "manifest": [
        ["format"],
        ["version"],
        ["kind"],
        ["files"],
        ["files", SHARD],
        ["files", SHARD, "num_bytes"],
        ["files", SHARD, "head_bytes"],
        ["files", SHARD, "head_crc32"],
        ["files", SHARD, "ranges"],
        ["files", SHARD, "ranges", "names"],
        ["files", SHARD, "ranges", "tensor"],
        ["files", SHARD, "ranges", "box"],
        ["files", SHARD, "ranges", "stop"],
        ["files", SHARD, "ranges", "crc32"],
        ["documents"],
        ["documents", INDEX, "num_bytes"],
        ["documents", INDEX, "crc32"],
    ],
    "index": [["weight_map"], ["weight_map", "a"]],
    "recorded header": [["b", "data_offsets"], ["b", "data_offsets", 1]],
}
# A header without metadata is one of another program; and eight other characters are made the right digits by the test.
IS_FINE = {("header", "__metadata__"), ("header", "booster_head_crc32")}


@pytest.mark.parametrize("kind", KINDS)
def test_every_odd_value_is_refused(tmp_path, kind):
    place, num_cases = _place(kind, tmp_path / "m"), 0
    for path in ODD_PLACES[kind]:
        for what, raw in odd_versions(place.text, path):
            is_refused = _is_refused(place, raw, what)
            assert is_refused or (kind, path[-1]) in IS_FINE, what
            num_cases += 1
    assert num_cases >= 30 * len(ODD_PLACES[kind])


# Limits: texts that would take long, or much memory, to find out about.

_MANY = b"[" + b"1," * (20 * 2**20) + b"1]"
ABSURD = {
    "deep": b"[" * (8 * 2**20),
    "deep objects": b'{"a":' * 2**20,
    "quotes": b'"' * (32 * 2**20),
    "backslashes": b'"' + b"\\" * (8 * 2**20),
    "many values": _MANY,
    "many lists": b"[" + b"[]," * (14 * 2**20) + b"1]",
    "digits": b'{"a":' + b"1" * (8 * 2**20) + b"}",
    "spaces": b" " * (32 * 2**20),
    "no text": b"\xff" * (8 * 2**20),
    "many twins": b"{" + b",".join(b'"%d":1' % (n // 2) for n in range(200_000)) + b"}",
}


@pytest.mark.parametrize("raw", ABSURD.values(), ids=ABSURD.keys())
@pytest.mark.parametrize("kind", ["foreign index", "foreign header"])
def test_absurd_texts_are_refused_soon(tmp_path, kind, raw):
    place = _place(kind, tmp_path / "m")
    place.size += 2 * len(raw)  # the text, and the bytes it was read into
    assert _is_refused(place, raw, "absurd")


@pytest.mark.parametrize("declared", [0, 1, 7, 100, 2**31, 100_000_001, 2**63, 2**64 - 1])
def test_wrong_lengths_of_headers(tmp_path, declared):
    save_file(_tensors(), tmp_path / "m.safetensors")
    raw = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(declared.to_bytes(8, "little") + raw[8:])
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        open_checkpoint(Storage(), tmp_path / "m.safetensors", MODEL)


def test_the_detector_finds_other_errors_and_wrong_loads(tmp_path, monkeypatch):
    place = _place("foreign header", tmp_path / "m")
    raw = place.text.replace('"shape":[7]', '"shape":[8]').encode()
    assert _is_refused(place, raw, "control")
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "load_tensors", lambda *_: {}["no such error of ours"])
        with pytest.raises(AssertionError, match="KeyError"):
            _is_refused(place, raw, "control")
        patch.setitem(globals(), "load_tensors", lambda *_: None)
        with pytest.raises(AssertionError, match="refused=False"):
            _is_refused(place, raw, "control")
        patch.setitem(globals(), "load_tensors", lambda *_: torch.ones(2**25).sum().item())
        with pytest.raises(AssertionError, match="control"):
            _is_refused(place, raw, "control")
