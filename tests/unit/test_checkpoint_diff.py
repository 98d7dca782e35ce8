"""What differs between two checkpoints, against comparisons that hold everything in memory."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch

from booster.checkpoint_io.layout import MODEL
from booster.checkpoint_io.loading.reader import open_checkpoint
from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.tools import diff
from booster.checkpoint_io.tools.diff import Comparison, compare_elements, compare_tensors, compare_values
from booster.errors import CheckpointError

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("left", "right", "num_differing", "max_difference"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), 0, 0.0),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0]), 1, 0.5),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0, 0.0),
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 3.0]), 1, 2.0),
        (torch.tensor([NAN]), torch.tensor([1.0]), 1, INF),
        (torch.tensor([INF, -INF]), torch.tensor([INF, INF]), 1, INF),
        (torch.tensor([INF]), torch.tensor([1.0]), 1, INF),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1, 1.0),
        (torch.tensor([2**62]), torch.tensor([2**62 + 1]), 1, 1.0),
        (torch.tensor([2**63 + 1], dtype=torch.uint64), torch.tensor([2**63], dtype=torch.uint64), 1, 1.0),
        (torch.tensor([3], dtype=torch.uint16), torch.tensor([5], dtype=torch.uint16), 1, 2.0),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([2.0]).to(torch.float8_e4m3fn), 1, 1.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), 1, 1.0),
        (torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.5]).bfloat16(), 0, 0.0),
        (torch.tensor([1.001]), torch.tensor([1.001]).bfloat16(), 1, 0.001),
        (torch.tensor(3.0), torch.tensor(4.0), 1, 1.0),
        (torch.empty(0, 3), torch.empty(0, 3), 0, 0.0),
    ],
)
def test_elements(left, right, num_differing, max_difference):
    found = compare_elements(left, right)
    assert (found.num_elements, found.num_differing) == (left.numel(), num_differing)
    assert found.max_difference == pytest.approx(max_difference, rel=0.02)


def test_a_tolerance_counts_less_but_hides_no_difference():
    found = compare_elements(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.0, 1.25, 2.0]), tolerance=0.25)
    assert (found.num_differing, found.max_difference) == (1, 1.0)


def stored(path, tensors):
    safetensors.torch.save_file(tensors, path)
    return open_checkpoint(Storage(), path, MODEL)


def random_tensors(generator, names):
    formats = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    tensors = {}
    for name in names:
        shape = [generator.randrange(5) for _ in range(generator.randrange(4))]
        tensors[name] = torch.randint(0, 9, shape).to(generator.choice(formats))
    return tensors


@pytest.mark.parametrize("seed", range(8))
def test_part_by_part_finds_what_a_comparison_of_wholes_finds(tmp_path, monkeypatch, seed):
    generator = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(diff, "BATCH_BYTES", 48)
    monkeypatch.setattr(diff, "CHUNK_ELEMENTS", 5)
    left = random_tensors(generator, "abcdefgh")
    right = {name: tensor.clone() for name, tensor in left.items()} | random_tensors(generator, "ghi")
    del right["a"]
    for name in "bc":
        if right[name].numel():
            right[name].view(-1)[generator.randrange(right[name].numel())] += 3
    with stored(tmp_path / "l.safetensors", left) as first, stored(tmp_path / "r.safetensors", right) as second:
        found = compare_tensors(first, second)
    common = [name for name in left if name in right]
    same_shape = [name for name in common if left[name].shape == right[name].shape]
    wrong = {
        name: (left[name].double() - right[name].double()).abs()
        for name in same_shape
        if not torch.equal(left[name].double(), right[name].double())
    }
    assert found.num_common == len(common)
    assert sorted(found.only_left) == ["a"]
    assert sorted(found.only_right) == ["i"]
    assert set(found.shapes) == set(common) - set(same_shape)
    assert set(found.dtypes) == {name for name in same_shape if left[name].dtype != right[name].dtype}
    assert {name: (part.num_differing, part.max_difference) for name, part in found.elements.items()} == {
        name: (int((difference > 0).sum()), float(difference.max())) for name, difference in wrong.items()
    }
    assert all(part.num_elements == left[name].numel() for name, part in found.elements.items())
    assert found.max_difference == max((float(difference.max()) for difference in wrong.values()), default=0.0)
    assert found != Comparison(num_common=found.num_common)


def test_equal_checkpoints_are_equal(tmp_path):
    tensors = {"w": torch.randn(7, 3), "n": torch.tensor([NAN, 1.0]), "s": torch.tensor(2), "e": torch.empty(0, 2)}
    with stored(tmp_path / "l.safetensors", tensors) as first, stored(tmp_path / "r.safetensors", tensors) as second:
        found = compare_tensors(first, second)
    assert found == Comparison(num_common=4)
    assert (found.num_common, found.max_difference) == (4, 0.0)


def test_only_bounded_parts_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(diff, "BATCH_BYTES", 4096)
    sizes = []
    real = diff.read_slices

    def recording(checkpoint, wanted):
        sizes.append(sum(part.tensor.nbytes for _, part in wanted))
        real(checkpoint, wanted)

    monkeypatch.setattr(diff, "read_slices", recording)
    tensors = {f"w{index}": torch.randn(700 * index) for index in range(6)}
    with stored(tmp_path / "l.safetensors", tensors) as first, stored(tmp_path / "r.safetensors", tensors) as second:
        assert compare_tensors(first, second) == Comparison(num_common=6)
    assert max(sizes) <= 4096
    assert sum(sizes) == 2 * sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    ("left", "right", "lines"),
    [
        ({"a": 1, "b": (1, 2)}, {"b": (1, 2), "a": 1}, []),
        ({"a": NAN}, {"a": NAN}, []),
        ({"a": torch.tensor([1.0])}, {"a": torch.tensor([1.0])}, []),
        ({"lr": 0.1}, {"lr": 0.2}, ["lr: 0.1 != 0.2"]),
        ({"g": [{"lr": 1}]}, {"g": [{"lr": 2}]}, ["g[0].lr: 1 != 2"]),
        ({"a": 1}, {"b": 1}, ["a: only in the first", "b: only in the second"]),
        ({"a": 1}, {"a": True}, ["a: 1 != True"]),
        ({"a": 1}, {"a": 1.0}, ["a: 1 != 1.0"]),
        ({"a": [1]}, {"a": (1,)}, ["a: [1] != (1,)"]),
        ({"a": [1]}, {"a": [1, 2]}, ["a: [1] != [1, 2]"]),
        ({"a": None}, {"a": {}}, ["a: None != {}"]),
        ({"a": torch.tensor([1.0])}, {"a": torch.tensor([2.0])}, ["a: tensor([1.]) != tensor([2.])"]),
    ],
)
def test_plain_values(left, right, lines):
    assert list(compare_values(left, right, "")) == lines


def test_long_values_are_cut():
    (line,) = compare_values({"a": "x" * 500}, {"a": "y"}, "")
    assert len(line) < 120


def test_a_file_that_is_cut_while_it_is_compared_is_named(tmp_path):
    tensors = {"w": torch.randn(1000)}
    with stored(tmp_path / "l.safetensors", tensors) as first, stored(tmp_path / "r.safetensors", tensors) as second:
        path = Path(tmp_path / "r.safetensors")
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 8)
        with pytest.raises(CheckpointError, match=r"r\.safetensors"):
            compare_tensors(first, second)
