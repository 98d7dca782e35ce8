"""Manifests: what they record, every damage to them, and the proof that ranges cover all tensors."""

from __future__ import annotations

import json
import math
import random
import time
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import naive_byte_runs as naive

from booster.checkpoint_io.formats.manifest import (
    DocumentRecord,
    FileRecord,
    Manifest,
    RangeRecord,
    check_ranges_cover,
    decode_ranges,
    encode_ranges,
)
from booster.checkpoint_io.planning.coverage import CoverageLimitError, check_coverage, contains
from booster.checkpoint_io.planning.slices import PlanTable, full_box
from booster.errors import CheckpointError
from booster.interface import TensorSpec

RANGES = (
    RangeRecord(name="a.weight", box=None, span=(0, 12), crc32=0),
    RangeRecord(name="b", box=((0, 3), (1, 2)), span=(0, 4), crc32=2**32 - 1),
    RangeRecord(name="b", box=((0, 3), (1, 2)), span=(4, 6), crc32=7),
    RangeRecord(name="\u00fcml\u00e4ut \u2028 \"'\\", box=(), span=(0, 1), crc32=0x01020304),
)
MANIFEST = Manifest(
    kind="model",
    files={
        "model-00001-of-00002.safetensors": FileRecord(num_bytes=4200, head_bytes=4096, head_crc32=5, ranges=RANGES),
        "model-00002-of-00002.safetensors": FileRecord(num_bytes=4096, head_bytes=4096, head_crc32=6, ranges=()),
    },
    documents={
        "config.json": DocumentRecord(num_bytes=10, crc32=3),
        "sub/x.json": DocumentRecord(num_bytes=0, crc32=0),
    },
    metadata={"plugin": "zero", "world_size": 4, "versions": {"torch": "2.13"}, "loss": 0.25, "none": [None, True]},
)


def sealed(document):
    """Returns a manifest's bytes whatever the document holds, with the right checksum."""
    rest = {key: value for key, value in document.items() if key != "crc32"}
    body = json.dumps(rest, separators=(",", ":")).encode()[:-1]
    return body + b',"crc32":"%08x"}' % zlib.crc32(body)


# What is written is read


def test_a_manifest_comes_through_its_bytes():
    raw = MANIFEST.encode()
    assert Manifest.parse(raw, "m") == MANIFEST
    document = json.loads(raw)
    assert list(document)[-1] == "crc32"
    assert int(document["crc32"], 16) == zlib.crc32(raw[: raw.rindex(b',"crc32":')])
    assert Manifest.parse(Manifest(kind="x", files={}).encode(), "m") == Manifest(kind="x", files={})


@pytest.mark.parametrize("seed", range(30))
def test_random_ranges_come_through_their_form(seed):
    source = random.Random(seed)
    ranges = []
    for number in range(source.randint(0, 30)):
        shape = naive.random_shape(source)
        for _, box, span in naive.random_partition(source, shape, 3):
            box = None if box == full_box(shape) else box
            ranges.append(RangeRecord(name=f"t{number}", box=box, span=span, crc32=source.getrandbits(32)))
    form = json.loads(json.dumps(encode_ranges(ranges)))
    assert decode_ranges(form, "m") == tuple(ranges)


def test_the_length_does_not_depend_on_the_checksums():
    lengths = set()
    for crc in (0, 1, 0xFFFF, 2**32 - 1):
        lengths.add(len(json.dumps(encode_ranges([replace(part, crc32=crc) for part in RANGES]))))
    assert len(lengths) == 1


def test_a_manifest_that_could_not_be_read_is_not_written():
    for facts in ({"a": float("nan")}, {"a": object()}, {"a": 2**80}, {"a": "\ud800"}, {"a": [[[[[[[]]]]]]]}):
        with pytest.raises(CheckpointError, match="facts"):
            replace(MANIFEST, metadata=facts).encode()
    deep = {"a": {"b": {"c": {"d": {"e": []}}}}}
    assert Manifest.parse(replace(MANIFEST, metadata=deep).encode(), "m").metadata == deep
    bad = FileRecord(num_bytes=1, head_bytes=1, head_crc32=0, ranges=(replace(RANGES[0], name="\ud800"),))
    with pytest.raises(CheckpointError, match="Unicode"):
        replace(MANIFEST, files={"a.safetensors": bad}).encode()
    large = tuple(replace(RANGES[0], name=f"{number}" * 2**20) for number in range(10, 50))
    with pytest.raises(CheckpointError, match="fewer, larger files"):
        replace(MANIFEST, files={"a.safetensors": replace(bad, ranges=large)}).encode()


# Damage


def test_every_flipped_bit_is_found():
    raw = MANIFEST.encode()
    for position in range(len(raw)):
        for bit in range(8):
            damaged = bytearray(raw)
            damaged[position] ^= 1 << bit
            with pytest.raises(CheckpointError):
                Manifest.parse(bytes(damaged), "m")


def test_every_cut_is_found():
    raw = MANIFEST.encode()
    for length in range(len(raw)):
        with pytest.raises(CheckpointError):
            Manifest.parse(raw[:length], "m")
    for more in (b"\n", b"\0", b"}", raw):
        with pytest.raises(CheckpointError):
            Manifest.parse(raw + more, "m")


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_are_no_manifest(seed):
    source = random.Random(seed)
    for _ in range(50):
        noise = source.randbytes(source.randint(0, 200))
        for raw in (noise, noise + b',"crc32":"%08x"}' % zlib.crc32(noise)):
            with pytest.raises(CheckpointError):
                Manifest.parse(raw, "m")


VALUES = [
    None,
    True,
    -1,
    0,
    2**62,
    2**63 - 1,
    1.5,
    "",
    "x",
    "0" * 32,
    "g" * 8,
    " 1234567",
    [],
    [0],
    [[]],
    [-1],
    {},
    {"a": 1},
]


def mutated(source, value):
    """Returns the value with one place of it changed: replaced, removed, doubled, or another key added."""
    if isinstance(value, dict) and value and source.random() < 0.9:
        key = source.choice(list(value))
        changed = dict(value)
        action = source.choice(["into", "into", "into", "remove", "rename"])
        if action == "into":
            changed[key] = mutated(source, value[key])
        else:
            moved = changed.pop(key)
            if action == "rename":
                changed[source.choice(["", "x", "../x", key + "x"])] = moved
        return changed
    if isinstance(value, list) and value and source.random() < 0.9:
        place = source.randrange(len(value))
        action = source.choice([[], [value[place]] * 2, [mutated(source, value[place])]])
        return [*value[:place], *action, *value[place + 1 :]]
    return source.choice(VALUES)


@pytest.mark.parametrize("seed", range(40))
def test_a_changed_document_is_refused_or_read(seed):
    source = random.Random(seed)
    document = json.loads(MANIFEST.encode())
    for _ in range(50):
        key = source.choice(list(document))
        try:
            found = Manifest.parse(sealed({**document, key: mutated(source, document[key])}), "m")
        except CheckpointError:
            continue
        assert Manifest.parse(found.encode(), "m") == found


BAD_NAMES = [
    "",
    ".",
    "..",
    "../x",
    "/x",
    "a/../x",
    "a//b",
    "a/",
    ".hidden",
    "C:x",
    "a\\b",
    "x\0",
    "x\n",
    "x" * 256,
    "a*",
    "\u202ex",
]


@pytest.mark.parametrize("name", [*BAD_NAMES, "sub/x.safetensors"])
def test_files_elsewhere_are_refused(name):
    document = json.loads(MANIFEST.encode())
    document["files"] = {name: document["files"]["model-00002-of-00002.safetensors"]}
    with pytest.raises(CheckpointError, match="only files in its own directory"):
        Manifest.parse(sealed(document), "m")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_documents_elsewhere_are_refused(name):
    document = json.loads(MANIFEST.encode())
    document["documents"] = {name: {"num_bytes": 1, "crc32": "00000000"}}
    with pytest.raises(CheckpointError, match="only files in its own directory"):
        Manifest.parse(sealed(document), "m")


def test_other_documents_are_refused():
    document = json.loads(MANIFEST.encode())
    cases = {
        "is not a manifest of this library": {**document, "format": "other"},
        "update torch-booster": {**document, "version": 2},
        "members are missing or unknown": {**document, "more": 1},
        "wrong type": {**document, "facts": []},
        "files or documents are not a JSON object": {**document, "files": []},
    }
    for reason, changed in cases.items():
        with pytest.raises(CheckpointError, match=reason):
            Manifest.parse(sealed(changed), "m")
    body = b'{"a":1,"a":2'
    with pytest.raises(CheckpointError, match="twice"):
        Manifest.parse(body + b',"crc32":"%08x"}' % zlib.crc32(body), "m")
    body = b'{"a":' + b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(CheckpointError, match="nested"):
        Manifest.parse(body + b',"crc32":"%08x"}' % zlib.crc32(body), "m")
    with pytest.raises(CheckpointError, match="at most"):
        Manifest.parse(b" " * (64 * 2**20 + 1), "m")


def test_ranges_of_another_form_are_refused():
    form = encode_ranges(RANGES)
    changes = [
        {"tensor": [0, 1, 1, 3]},
        {"tensor": [0, 1, 1, True]},
        {"tensor": [0, 1, 1]},
        {"box": [-2, 0, 0, 1]},
        {"box": [-1, 0, 0, 2]},
        {"boxes": [[0, 3, 1], []]},
        {"boxes": [[0, 3, 1, -2], []]},
        {"boxes": [[0, 3, 1, 2**62], []]},
        {"start": [0, 0, 4, 0.0]},
        {"stop": [12, 4, 6, -1]},
        {"names": ["a", "b", 3]},
        {"names": "abc"},
        {"crc32": form["crc32"][:-1]},
        {"crc32": form["crc32"][:-1] + "g"},
        {"crc32": form["crc32"][:-1] + "F"},
        {"crc32": form["crc32"][:-2] + "  "},
        {"crc32": None},
    ]
    for change in changes:
        with pytest.raises(CheckpointError, match="holds malformed checksums"):
            decode_ranges({**form, **change}, "m")
    for value in (None, [], {}, {**form, "more": []}):
        with pytest.raises(CheckpointError):
            decode_ranges(value, "m")


# Tiling


def tiling_case(source, num_tensors=4):
    specs, ranges = {}, []
    for number in range(num_tensors):
        shape = naive.random_shape(source)
        specs[f"t{number}"] = TensorSpec(shape=shape, dtype=torch.float32)
        for _, box, span in naive.random_partition(source, shape, 4):
            box = None if box == full_box(shape) and source.random() < 0.5 else box
            ranges.append(RangeRecord(name=f"t{number}", box=box, span=span, crc32=0))
    source.shuffle(ranges)
    return specs, ranges


def counts(specs, ranges):
    found = {name: np.zeros(math.prod(spec.shape), dtype=int) for name, spec in specs.items()}
    for part in ranges:
        shape = specs[part.name].shape
        found[part.name][naive.elements(shape, part.box or full_box(shape), part.span)] += 1
    return found


@pytest.mark.parametrize("seed", range(150))
def test_ranges_tile_or_a_wrong_element_is_named(seed):
    source = random.Random(seed)
    specs, ranges = tiling_case(source)
    check_ranges_cover(specs, ranges)
    full = [part for part in ranges if part.span[0] < part.span[1]]
    if not full:
        pytest.skip("nothing but empty tensors")
    chosen = source.choice(full)
    start, stop = chosen.span
    rest = [part for part in ranges if part is not chosen]
    damaged = source.choice(
        [
            rest,
            [*ranges, chosen],
            [*rest, replace(chosen, span=(start + 1, stop))],
            [*rest, replace(chosen, span=(start, stop - 1))],
            [*ranges, replace(chosen, box=full_box(specs[chosen.name].shape), span=(0, 1))],
        ]
    )
    with pytest.raises(CheckpointError) as caught:
        check_ranges_cover(specs, damaged)
    assert f"{chosen.name!r}" in str(caught.value)


@pytest.mark.parametrize("seed", range(200))
def test_boxes_tile_or_the_first_wrong_element_is_named(seed):
    """Any boxes at all, not only a tiling with one fault, against counting every element."""
    source = random.Random(seed)
    shape = tuple(source.randint(1, 4) for _ in range(source.randint(1, 4)))
    boxes = naive.random_boxes(source, shape, source.randint(0, 6))
    for _ in range(source.choice([0, 1, 1, 2, 3])):
        place = source.randrange(len(boxes))
        boxes[place] = tuple(
            (offset := source.randint(0, size - 1), source.randint(1, size - offset)) for size in shape
        )
    boxes = list(dict.fromkeys(boxes))
    held = counts(
        {"t": TensorSpec(shape=shape, dtype=torch.uint8)},
        [RangeRecord(name="t", box=box, span=(0, math.prod(length for _, length in box)), crc32=0) for box in boxes],
    )["t"]
    rows = np.arange(len(boxes))
    volumes = np.array([math.prod(length for _, length in box) for box in boxes])
    fault = check_coverage([shape], boxes, PlanTable(tensor=rows * 0, box=rows, start=rows * 0, stop=volumes))
    wrong = np.flatnonzero(held != 1)
    if not len(wrong):
        assert fault is None
        return
    assert np.ravel_multi_index(fault.index, shape) == wrong[0]
    assert fault.num_covers == held[wrong[0]]


def test_a_pinwheel_tiles():
    boxes = [((0, 1), (0, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 2), (0, 1)), ((1, 1), (1, 1))]
    spec = {"a": TensorSpec(shape=(3, 3), dtype=torch.float32)}
    ranges = [RangeRecord(name="a", box=box, span=(0, box[0][1] * box[1][1]), crc32=0) for box in boxes]
    check_ranges_cover(spec, ranges)
    with pytest.raises(CheckpointError, match=r"element \(1, 1\) of 'a', of shape \(3, 3\), has no checksum"):
        check_ranges_cover(spec, ranges[:-1])


def test_gaps_do_not_make_up_for_overlaps():
    spec = {"a": TensorSpec(shape=(4, 4), dtype=torch.float32)}
    rows = [RangeRecord(name="a", box=((first, 2), (0, 4)), span=(0, 8), crc32=0) for first in (0, 1)]
    with pytest.raises(CheckpointError, match=r"element \(1, 0\) of 'a', of shape \(4, 4\), has more than one"):
        check_ranges_cover(spec, rows)
    spans = [RangeRecord(name="a", box=None, span=span, crc32=0) for span in ((0, 8), (4, 12))]
    with pytest.raises(CheckpointError, match=r"element \(1, 0\) of 'a', of shape \(4, 4\), has more than one"):
        check_ranges_cover(spec, spans)


def test_tensors_without_elements_need_no_ranges():
    specs = {
        "none": TensorSpec(shape=(0, 2**40), dtype=torch.float32),
        "scalar": TensorSpec(shape=(), dtype=torch.float32),
    }
    scalar = RangeRecord(name="scalar", box=None, span=(0, 1), crc32=0)
    check_ranges_cover(specs, [scalar])
    check_ranges_cover(specs, [scalar, RangeRecord(name="none", box=None, span=(0, 0), crc32=0)])
    check_ranges_cover({}, [])
    with pytest.raises(CheckpointError, match=r"element \(\) of 'scalar'"):
        check_ranges_cover(specs, [])


def test_ranges_that_fit_no_tensor():
    specs = {"a": TensorSpec(shape=(3, 4), dtype=torch.float32)}
    whole = RangeRecord(name="a", box=None, span=(0, 12), crc32=0)
    check_ranges_cover(specs, [whole])
    cases = [
        (replace(whole, name="b"), "no file holds it"),
        (replace(whole, box=((0, 3),)), "is out of bounds of 'a'"),
        (replace(whole, box=((0, 3), (1, 4))), "is out of bounds of 'a'"),
        (replace(whole, box=((0, 2**61), (0, 2**61))), "is out of bounds of 'a'"),
        (replace(whole, box=((-1, 3), (0, 4))), "is out of bounds of 'a'"),
        (replace(whole, span=(0, 13)), "elements 0 to 13 are out of bounds of box"),
        (replace(whole, span=(12, 0)), "elements 12 to 0 are out of bounds of box"),
        (replace(whole, box=((0, 3), (0, 2))), "elements 0 to 12 are out of bounds of box"),
    ]
    for part, reason in cases:
        with pytest.raises(CheckpointError, match=reason):
            check_ranges_cover(specs, [part])
    with pytest.raises(CheckpointError, match="no file can hold"):
        check_ranges_cover({"a": TensorSpec(shape=(2**40, 2**40), dtype=torch.float32)}, [])


def test_what_is_too_finely_cut_to_check_is_refused():
    shape = (2,) * 30
    specs = {"a": TensorSpec(shape=shape, dtype=torch.float32)}
    box = ((0, 1),) * 30
    with pytest.raises(CheckpointError, match="sharded along 30 dimensions"):
        check_ranges_cover(specs, [RangeRecord(name="a", box=box, span=(0, 1), crc32=0)])
    rows = np.arange(2**18)
    boxes = [((int(row), 1),) for row in rows]
    with pytest.raises(CoverageLimitError):
        check_coverage([(2**18,)], boxes, PlanTable(tensor=rows * 0, box=rows, start=rows * 0, stop=rows * 0 + 1))


def test_contains():
    box = ((1, 2), (0, 3))
    assert contains(box, (1, 5), (1, 1))
    assert contains(box, (1, 5), (2, 1))
    for index in ((1, 0), (2, 2), (0, 1), (3, 0), (1, 3)):
        assert not contains(box, (1, 5), index)


# Speed, in processor seconds because others use the processors too

NUM_TENSORS = 100_000


@pytest.mark.slow
def test_a_hundred_thousand_tensors():
    specs = {
        f"layers.{number}.w": TensorSpec(shape=(number % 7 + 1, 8), dtype=torch.float32)
        for number in range(NUM_TENSORS)
    }
    whole, split = [], []
    for name, spec in specs.items():
        rows = spec.shape[0]
        whole.append(RangeRecord(name=name, box=None, span=(0, rows * 8), crc32=1))
        split.append(RangeRecord(name=name, box=((0, rows), (0, 3)), span=(0, rows * 3), crc32=1))
        split.append(RangeRecord(name=name, box=((0, rows), (3, 5)), span=(0, 2), crc32=2))
        split.append(RangeRecord(name=name, box=((0, rows), (3, 5)), span=(2, rows * 5), crc32=3))
    for ranges in (whole, split):
        begin = time.process_time()
        check_ranges_cover(specs, ranges)
        assert time.process_time() - begin < 2.0
    file = FileRecord(num_bytes=10, head_bytes=5, head_crc32=0, ranges=tuple(whole))
    manifest = Manifest(kind="model", files={"a.safetensors": file})
    begin = time.process_time()
    found = Manifest.parse(manifest.encode(), "m")
    assert time.process_time() - begin < 3.0
    assert found == manifest
