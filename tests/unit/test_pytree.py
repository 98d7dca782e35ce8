"""The walk reaches every tensor of a nested structure and leaves all the rest alone."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from booster.pytree import iter_tensors, map_tensors

Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    x: torch.Tensor
    name: str
    inner: Any = None
    derived: Any = field(init=False, default=None)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    size: int


def double(tensor):
    return tensor.double()


def ones():
    return torch.ones(2)


@pytest.mark.parametrize("make", [list, tuple, OrderedDict.fromkeys])
def test_plain_containers_keep_their_type(make):
    tree = make(["a", "b"]) if make is OrderedDict.fromkeys else make([ones(), 3, "a", None, ones()])
    if isinstance(tree, dict):
        tree["a"] = ones()
    mapped = map_tensors(double, tree)
    assert type(mapped) is type(tree)
    values = list(mapped.values()) if isinstance(mapped, dict) else mapped
    originals = list(tree.values()) if isinstance(tree, dict) else tree
    for value, original in zip(values, originals, strict=True):
        if isinstance(original, torch.Tensor):
            assert value.dtype == torch.float64
            assert original.dtype == torch.float32
        else:
            assert value is original


def test_nested_to_any_depth():
    tree = {"a": [({"b": Pair(ones(), [ones()])},)]}
    mapped = map_tensors(double, tree)
    pair = mapped["a"][0][0]["b"]
    assert isinstance(pair, Pair)
    assert pair.left.dtype == pair.right[0].dtype == torch.float64
    assert tree["a"][0][0]["b"].left.dtype == torch.float32


def test_a_tensor_itself_and_parameters():
    assert map_tensors(double, ones()).dtype == torch.float64
    assert map_tensors(double, torch.nn.Parameter(ones())).dtype == torch.float64


def test_dataclasses_with_fields_that_init_does_not_take():
    batch = Batch(ones(), "n", inner=[ones()])
    batch.derived = ones()
    mapped = map_tensors(double, batch)
    assert isinstance(mapped, Batch)
    assert (mapped.x.dtype, mapped.inner[0].dtype, mapped.derived.dtype) == (torch.float64,) * 3
    assert mapped.name == "n"
    assert batch.derived.dtype == torch.float32


def test_frozen_dataclass_with_slots():
    mapped = map_tensors(double, Frozen(ones(), 4))
    assert mapped.x.dtype == torch.float64
    assert mapped.size == 4


def test_mappings_keep_what_their_class_adds():
    counts = defaultdict(list, {"x": ones()})
    mapped = map_tensors(double, counts)
    assert mapped["new"] == []
    assert "new" not in counts
    wrapped = map_tensors(double, UserDict(x=ones()))
    assert isinstance(wrapped, UserDict)
    assert wrapped["x"].dtype == torch.float64


def test_iteration_has_the_order_of_the_map():
    tree = {
        "b": Pair(ones(), [ones(), "a"]),
        "a": Batch(ones(), "n", inner=UserDict(x=ones())),
        "c": (3, Frozen(ones(), 1)),
    }
    visited = []
    map_tensors(lambda tensor: visited.append(tensor) or tensor, tree)
    found = list(iter_tensors(tree))
    assert len(found) == 5
    assert all(one is other for one, other in zip(found, visited, strict=True))
    shared = ones()
    assert len(list(iter_tensors([shared, shared]))) == 2
    assert list(iter_tensors(SimpleNamespace(x=ones()))) == []


def test_packed_sequence():
    mapped = map_tensors(lambda t: t.double() if t.is_floating_point() else t, pack_sequence([ones(), torch.ones(1)]))
    assert mapped.data.dtype == torch.float64
    assert mapped.batch_sizes.tolist() == [2, 1]


def test_what_holds_no_tensor_is_returned_itself():
    for tree in [
        {"a": 1},
        [1, [2]],
        (1, 2),
        Pair(1, 2),
        "text",
        None,
        SimpleNamespace(x=ones()),
        Batch,
        torch.Size([2]),
    ]:
        assert map_tensors(double, tree) is tree


def test_a_function_that_changes_nothing_returns_the_same_containers():
    tree = {"a": [ones(), Batch(ones(), "n")]}
    assert map_tensors(lambda tensor: tensor, tree) is tree


def test_transformers_outputs():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.CausalLMOutput(loss=None, logits=ones(), hidden_states=(ones(), ones()))
    mapped = map_tensors(double, output)
    assert isinstance(mapped, outputs.CausalLMOutput)
    assert mapped.logits.dtype == mapped["logits"].dtype == mapped[0].dtype == torch.float64
    assert mapped.hidden_states[1].dtype == torch.float64
    assert mapped.loss is None
    assert output.logits.dtype == torch.float32
