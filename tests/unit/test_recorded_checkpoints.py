"""Checkpoints with a manifest, or with a record of their own: what vouches for what, and what is missed when lost."""

from __future__ import annotations

import json
import shutil
import threading
import time
import zlib

import pytest
import torch
from oracles.malformed import with_seal
from stored_tensors import load_tensors, save_tensors

from booster.checkpoint_io.formats.manifest import RangeRecord
from booster.checkpoint_io.formats.safetensors import encode_header, parse_header
from booster.checkpoint_io.formats.tensor_files import (
    HEAD_KEY,
    RECORD_KEY,
    completed_head,
    embedded_record,
    with_placeholder,
)
from booster.checkpoint_io.layout import MODEL, OPTIMIZER
from booster.checkpoint_io.loading.fill import verify_ranges
from booster.checkpoint_io.loading.load import match_names
from booster.checkpoint_io.loading.reader import open_checkpoint
from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError
from booster.interface import TensorSlice, TensorSpec

INDEX, MANIFEST = "model.safetensors.index.json", "model.safetensors.manifest.json"
SHARD = "model-00001-of-00002.safetensors"


def _tensors(value=1.0):
    return {"a": torch.full((6,), value), "b": torch.full((2, 4), value)}


@pytest.fixture
def directory(tmp_path):
    save_tensors(tmp_path / "m", _tensors(), shard_bytes=40)
    return tmp_path / "m"


def _names(path, **options):
    with open_checkpoint(Storage(), path, MODEL, **options) as stored:
        return sorted(stored.specs)


def _refused(path, match, **options):
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(Storage(), path, MODEL, **options)


def test_everything_by_any_of_its_names(directory):
    for name in ("", INDEX, MANIFEST):
        with open_checkpoint(Storage(), directory / name, MODEL) as stored:
            assert sorted(stored.specs) == ["a", "b"]
            assert stored.manifest is not None
            assert stored.path == directory / MANIFEST


def test_one_shard_is_vouched_for_as_well(directory):
    path = directory / SHARD
    with open_checkpoint(Storage(), path, MODEL) as stored:
        assert list(stored.specs) == ["a"]
        verify_ranges(stored, 0, 1)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with (
        open_checkpoint(Storage(), path, MODEL) as stored,
        pytest.raises(CheckpointError, match="elements 0 to 6 of 'a'"),
    ):
        verify_ranges(stored, 0, 1)


def test_a_lost_manifest_is_missed(directory):
    (directory / MANIFEST).unlink()
    for path in (directory, directory / INDEX, directory / SHARD):
        _refused(path, f"{SHARD} was saved with the manifest '{MANIFEST}'")
    assert _names(directory, requires_manifest=False) == ["a", "b"]
    assert _names(directory / SHARD, requires_manifest=False) == ["a"]


def test_a_lost_index_a_stale_shard_and_a_stale_index(directory):
    shutil.copy(directory / SHARD, directory / "model-00007-of-00009.safetensors")
    assert _names(directory) == ["a", "b"]
    _refused(directory / "model-00007-of-00009.safetensors", "a leftover of another save")
    (directory / INDEX).unlink()
    _refused(directory, INDEX)


def test_an_index_that_the_manifest_does_not_know(tmp_path):
    save_tensors(tmp_path / "m", _tensors(), shard_bytes=10_000)
    assert _names(tmp_path / "m") == ["a", "b"]
    (tmp_path / "m" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys("ab", "model.safetensors")}))
    _refused(tmp_path / "m", f"{INDEX} is not recorded")


def _edited(directory, edit):
    path = directory / MANIFEST
    document = json.loads(path.read_bytes())
    edit(document)
    path.write_bytes(with_seal(json.dumps(document, separators=(",", ":")).encode()))


def test_a_manifest_of_another_kind_or_without_a_file(directory):
    _edited(directory, lambda document: document.update(kind="optimizer"))
    _refused(directory, "manifest of a 'optimizer', not of a model")
    _edited(directory, lambda document: document.update(kind="model"))
    _edited(directory, lambda document: document["files"].pop(SHARD))
    _refused(directory, f"names files that {MANIFEST} does not: '{SHARD}'")


def test_ranges_that_leave_something_out(directory):
    _edited(directory, lambda document: document["files"][SHARD]["ranges"].update(stop=[5]))
    _refused(directory, rf"{SHARD} and its manifest do not match: .*'a'")


def test_an_optimizer_needs_its_groups_in_the_manifest(directory):
    with pytest.raises(CheckpointError, match="holds no optimizer checkpoint"):
        open_checkpoint(Storage(), directory, OPTIMIZER)


def test_documents_are_compared_when_asked_for(directory):
    def record(document):
        document["documents"]["config.json"] = {"num_bytes": 2, "crc32": f"{zlib.crc32(b'{}'):08x}"}

    _edited(directory, record)
    with open_checkpoint(Storage(), directory, MODEL) as stored:
        verify_ranges(stored, 0, 1)  # its owner may have edited a config: no part of a load
        for content, match in ((None, "No such file"), (b"[]", "config.json differs from its checksum")):
            if content is not None:
                (directory / "config.json").write_bytes(content)
            with pytest.raises(CheckpointError, match=match):
                stored.check_documents()
        (directory / "config.json").write_bytes(b"{}")
        stored.check_documents()


def test_a_file_carries_its_own_record():
    ranges = [RangeRecord(name=name, box=None, span=(0, 4), crc32=0) for name in ('a"\\\u00e9', "b")]
    specs = {part.name: TensorSpec(shape=(4,), dtype=torch.float32) for part in ranges}
    metadata = with_placeholder({"format": "pt", "note": '"booster_head_crc32":"00000000"'}, ranges)
    head, _ = encode_header(specs, metadata, alignment=4096)
    done = completed_head(head, [0x12, 0xFFFFFFFF])
    assert len(done) == len(head)
    _, found = parse_header(done[8:], 32, "x")
    assert found["note"] == metadata["note"]
    record = embedded_record(done, len(done) + 32, found, specs, "x")
    assert [part.crc32 for part in record.ranges] == [0x12, 0xFFFFFFFF]
    assert (record.num_bytes, record.head_bytes) == (len(done) + 32, len(done))


@pytest.mark.parametrize("lost", [RECORD_KEY, HEAD_KEY])
def test_half_a_record_is_damage(lost):
    metadata = with_placeholder({}, [])
    metadata.pop(lost)
    head, _ = encode_header({}, metadata)
    with pytest.raises(CheckpointError, match="x is damaged: the checksum of its header"):
        embedded_record(head, len(head), metadata, {}, "x")


# Other processes.


def test_late_files_are_waited_for(tmp_path, directory):
    late = tmp_path / "late"

    def appear():
        time.sleep(0.1)
        late.mkdir()
        for name in (MANIFEST, INDEX, *(path.name for path in directory.glob("*.safetensors"))):
            time.sleep(0.03)
            shutil.copy(directory / name, late / name)

    thread = threading.Thread(target=appear)
    thread.start()
    try:
        assert _names(late, timeout_seconds=30.0) == ["a", "b"]
    finally:
        thread.join()


def test_the_timeout_ends_the_wait_and_damage_is_not_waited_for(tmp_path, directory):
    started = time.monotonic()
    _refused(tmp_path / "nowhere", "does not exist", timeout_seconds=0.2)
    assert time.monotonic() - started > 0.2
    (directory / INDEX).write_bytes(b"")
    _refused(directory, "differs from its checksum", timeout_seconds=1000.0)


class CommittingStorage(Storage):
    """Lets another save finish in between: before the n-th file is opened."""

    def __init__(self, at, commit):
        self._at, self._commit = at, commit

    def open_regular(self, path, *, inside=None):
        """Opens, once the other save is through."""
        self._at -= 1
        if self._at == 0:
            self._commit()
        return super().open_regular(path, inside=inside)


@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize("shard_bytes", [40, 10_000])
def test_a_save_while_a_checkpoint_is_opened(directory, at, shard_bytes):
    storage = CommittingStorage(at, lambda: save_tensors(directory, _tensors(2.0), shard_bytes=shard_bytes))
    tensors = _tensors(0.0)
    load_tensors(directory, tensors, storage=storage)
    values = {float(value) for tensor in tensors.values() for value in tensor.reshape(-1)}
    assert values in ({1.0}, {2.0})


def test_a_checkpoint_that_changes_for_ever(directory):
    class Restless(Storage):
        def read_file(self, path, *, max_bytes, inside=None):
            if path.name == MANIFEST:
                _edited(directory, lambda document: document["facts"].update(now=time.monotonic_ns()))
            return super().read_file(path, max_bytes=max_bytes, inside=inside)

    with pytest.raises(CheckpointError, match="changed repeatedly"):
        open_checkpoint(Restless(), directory, MODEL)


# Names over several ranks.


def test_names_of_other_ranks_and_several_slices_of_one_tensor():
    spec = TensorSpec(shape=(4,), dtype=torch.float32)
    halves = [
        TensorSlice(
            name=name,
            dtype=torch.float32,
            global_shape=(4,),
            box=((0, 4),),
            span=span,
            tensor=torch.zeros(2),
            primary=True,
        )
        for name in ("mine", "lost")
        for span in ((0, 2), (2, 4))
    ]
    stored = dict.fromkeys(("mine", "theirs", "unclaimed"), spec)
    match = match_names(stored, halves, {}, {"mine", "theirs", "lost"})
    assert match.sources == {"mine": "mine"}
    assert match.missing == ["lost"]
    assert match.unexpected == ["unclaimed"]
    assert match_names(stored, halves, {}).unexpected == ["theirs", "unclaimed"]
