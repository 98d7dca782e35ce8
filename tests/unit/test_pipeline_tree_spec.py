"""Trees of tensors come apart and together again, in the same process and by way of bytes."""

from __future__ import annotations

import enum
import math
import sys
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.pipeline_parallel.tree_spec import TensorLeaf, TreeSpec, flatten

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Plain:
    states: torch.Tensor
    scale: float = 1.0
    note: str = field(default="", init=False)

    def __post_init__(self):
        self.extra = 7


@dataclass(frozen=True, slots=True)
class Frozen:
    states: torch.Tensor


class Names(dict):
    pass


class Color(enum.IntEnum):
    RED = 1


def x(*shape):
    return torch.arange(float(math.prod(shape))).view(shape)


TREES = {
    "tensor": x(2, 3),
    "scalar": x(),
    "empty": x(0, 3),
    "values": (None, True, 1, 1.0, -0.0, math.inf, "a\ud800ä", 2**80),
    "nested": [x(1), (x(2), {"a": x(3), 1: [], None: ()}), ((),)],
    "shape": torch.Size([1, 2]),
    "namedtuple": Pair(x(2), {"k": Pair(1, None)}),
    "dataclass": Plain(x(2), 0.5),
    "frozen": Frozen(x(2)),
    "mappings": OrderedDict(b=x(1), a=Names(c=x(2))),
    "model output": BaseModelOutputWithPast(last_hidden_state=x(2), hidden_states=(x(1), x(2))),
    "top": torch.return_types.max((x(1), torch.tensor([1]))),
    "strided": x(4, 4).t()[::2],
}


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and list(one) != list(other):
        return False
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one) and same(*(_attributes(tree) for tree in (one, other)))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return same(_attributes(one), _attributes(other))
    return repr(one) == repr(other)


def _attributes(tree):
    names = {*getattr(tree, "__dataclass_fields__", ()), *getattr(tree, "__dict__", ())}
    return [(name, getattr(tree, name)) for name in sorted(names)]


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_built_again(name):
    tensors, form = flatten(TREES[name])
    assert same(form.build(tensors), TREES[name])
    decoded = TreeSpec.decode(form.encode())
    assert decoded == form
    assert hash(decoded) == hash(form)
    assert decoded.encode() == form.encode()
    assert same(decoded.build(tensors), TREES[name])
    assert [(one.shape, one.dtype) for one in form.tensors] == [(tuple(one.shape), one.dtype) for one in tensors]


def test_forms_of_different_trees_differ():
    forms = [flatten(tree)[1] for tree in [*TREES.values(), True, 1, 1.0, 0.0, -0.0, "1", (), [], {}, None, x(2, 2)]]
    assert len(set(forms)) == len({form.encode() for form in forms}) == len(forms)
    assert flatten(math.nan)[1] == flatten(math.nan)[1]
    assert flatten(x(2))[1] != flatten(x(2).double())[1]
    assert flatten(x(2))[1] != flatten(x(2).requires_grad_())[1]


def test_a_form_knows_what_is_differentiable():
    _, form = flatten([x(2).requires_grad_(), x(3), torch.tensor([1], dtype=torch.int8)])
    assert form.tensors == (
        TensorLeaf((2,), torch.float32, True),
        TensorLeaf((3,), torch.float32, False),
        TensorLeaf((1,), torch.int8, False),
    )
    assert TreeSpec.decode(form.encode()).tensors == form.tensors


def test_one_tensor_in_two_places_travels_once():
    shared = x(2)
    tensors, form = flatten({"a": shared, "b": [shared, x(2)]})
    assert len(tensors) == 2
    built = form.build([x(2), x(2)])
    assert built["a"] is built["b"][0]
    assert built["a"] is not built["b"][1]
    tensors, form = flatten(BaseModelOutputWithPast(last_hidden_state=shared))
    output = form.build(tensors)
    assert output.last_hidden_state is output["last_hidden_state"] is output[0] is shared
    assert len(tensors) == 1


def test_a_number_of_tensors_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="a tree of 1 tensors can't be built from 2"):
        flatten(x(2))[1].build([x(2), x(2)])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ((x(1), DynamicCache()), r"DynamicCache \(at \[1\] of its output\).*use_cache=False"),
        ({"a": Plain({1, 2})}, r"builtins\.set \(at \['a'\]\.states of its output\)"),
        ([Color.RED], "Color"),
        ({(1, 2): x(1)}, "with a key of type tuple"),
        (x(2).to_sparse(), r"layout torch\.sparse_coo"),
        ([defaultdict(list, a=[object()])], r"builtins\.object \(at \[0\]\['a'\]\[0\] of its output\)"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else None,
)
def test_what_cannot_travel_is_refused(tree, message):
    with pytest.raises(ConfigError, match=message):
        flatten(tree)


def test_a_class_that_others_cannot_find_is_refused():
    @dataclass
    class Hidden:
        states: torch.Tensor

    with pytest.raises(ConfigError, match=r"Hidden, which.*define the class at the top of a module"):
        flatten(Hidden(x(1)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not describe a tree"),
        ("{}", "does not describe a tree"),
        ('[["tensor",0],[]]', "does not describe a tree"),
        ('[["float","x"],[]]', "does not describe a tree"),
        ('[["int",true],[]]', "does not describe a tree"),
        ('[["what"],[]]', "does not describe a tree"),
        ('[["tensor",0],[["Tensor",[1],false]]]', "does not describe a tree"),
        ('[["tuple","this:Zen",[]],[]]', r"this:Zen, which this process has not imported \(no such name"),
        ('[["tuple","os:getcwd",[]],[]]', "os:getcwd, which this process has not imported .it found <built-in"),
        ('[["tuple","subprocess:Popen",[]],[]]', "subprocess:Popen is a tuple, but here it is not"),
        ('[["dataclass","subprocess:Popen",[],[]],[]]', "subprocess:Popen is a dataclass, but here it is not"),
        ('[["list","builtins:dict",[]],[]]', "builtins:dict is a list, but here it is not"),
    ],
)
def test_bytes_that_are_no_form_are_refused(text, message):
    import subprocess  # noqa: F401 - that it is imported must not help

    with pytest.raises(ConfigError, match=message):
        TreeSpec.decode(text.encode())
    assert "this" not in sys.modules


def test_model_outputs_stay_model_outputs():
    tensors, form = flatten(BaseModelOutputWithPast(last_hidden_state=x(2)))
    output = TreeSpec.decode(form.encode()).build(tensors)
    assert isinstance(output, ModelOutput)
    assert output.to_tuple() == (tensors[0],)
    assert output.past_key_values is None
