"""Batches are split into microbatches; what came of them is joined."""

from __future__ import annotations

import itertools
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.pipeline_parallel.microbatch import batch_size, join_outputs, split_batch

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    ids: torch.Tensor
    names: list


def make_batch(size):
    ids = torch.arange(size * 3).view(size, 3)
    return {
        "scale": torch.tensor(2.0),
        "input": BatchEncoding({"input_ids": ids, "position_ids": torch.arange(3)[None]}),
        "pair": Pair(ids.double(), [ids.bool(), "text"]),
        "record": Record(ids + 1, [f"name {index}" for index in range(size)]),
        "output": CausalLMOutput(logits=ids.float()),
        "values": (True, None, 0.5, ["a"] * (size + 1)),
    }


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, (dict, BatchEncoding)):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif isinstance(one, Record):
        assert_same(vars(one), vars(other))
    else:
        assert one == other


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("argument", ["num_microbatches", "microbatch_size"])
def test_split_then_joined_is_the_batch(size, number, argument):
    batch = make_batch(size)
    parts = split_batch(batch, **{"num_microbatches": None, "microbatch_size": None, argument: number})
    counts = [part.num_samples for part in parts]
    assert sum(counts) == size
    if argument == "num_microbatches":
        assert len(parts) == min(size, number)
        assert max(counts) - min(counts) <= 1
    else:
        assert counts[:-1] == [number] * (len(parts) - 1)
        assert 1 <= counts[-1] <= number
    assert [batch_size(part.batch) for part in parts] == counts
    assert [len(part.batch["record"].names) for part in parts] == counts
    assert_same(join_outputs([part.batch for part in parts], counts), batch)
    assert_same(batch, make_batch(size))  # the batch itself has not changed
    for one, other in itertools.combinations(parts, 2):
        has_equal_shapes = one.num_samples == other.num_samples
        has_equal_names = one.batch["record"].names == other.batch["record"].names
        assert (one.signature == other.signature) == (has_equal_shapes and has_equal_names)


def test_microbatches_are_views_and_what_is_whole_is_shared():
    batch = make_batch(6)
    parts = split_batch(batch, num_microbatches=3, microbatch_size=None)
    for part in parts:
        inputs = part.batch["input"]
        assert (
            inputs["input_ids"].untyped_storage().data_ptr() == batch["input"]["input_ids"].untyped_storage().data_ptr()
        )
        assert inputs["position_ids"] is batch["input"]["position_ids"]
        assert part.batch["scale"] is batch["scale"]
        assert part.batch["values"] is batch["values"]
    assert split_batch(batch, num_microbatches=1, microbatch_size=None)[0].batch is batch


def test_signatures_tell_shapes_dtypes_and_values_apart():
    ids = torch.zeros(4, 3)
    batches = [
        ids,
        [ids],
        (ids,),
        {"a": ids},
        {"b": ids},
        {"a": ids.double()},
        {"a": torch.zeros(4, 2)},
        {"a": ids, "f": True},
        {"a": ids, "f": 1},
        {"a": ids, "f": "x" * 100},
        {"a": ids, "f": "x" * 99 + "y"},
        {"a": ids, "f": {"x"}},
    ]
    signatures = [split_batch(batch, num_microbatches=1, microbatch_size=None)[0].signature for batch in batches]
    assert len(set(signatures)) == len(batches)
    again = [split_batch(batch, num_microbatches=1, microbatch_size=None)[0].signature for batch in batches]
    assert again == signatures


def test_signatures_are_the_same_in_every_process():
    """Neither addresses nor the order of a set may be in them."""
    first, second = (
        split_batch([torch.ones(2), value, {"b", "a"}], num_microbatches=1, microbatch_size=None)[0].signature
        for value in ([object(), lambda: None], [object(), lambda: None])
    )
    assert first == second
    assert "0x" not in repr(first)
    assert """("'a'", "'b'")""" in repr(first)


@pytest.mark.parametrize("batch", [{"a": torch.tensor(1)}, ["text"], None])
def test_a_batch_without_samples_is_refused(batch):
    with pytest.raises(ConfigError, match="holds no tensor with a dimension"):
        split_batch(batch, num_microbatches=2, microbatch_size=None)


def test_an_empty_batch_is_refused():
    with pytest.raises(ConfigError, match="a batch without samples"):
        split_batch(torch.zeros(0, 3), num_microbatches=2, microbatch_size=None)


def test_scalars_become_their_mean_by_samples():
    losses = [torch.tensor(1.0), torch.tensor(4.0)]
    assert join_outputs(losses, [2, 1]).item() == 2.0
    halves = [torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(4.0, dtype=torch.bfloat16)]
    joined = join_outputs(halves, [2, 1])
    assert joined.dtype == torch.bfloat16
    assert joined.item() == 2.0
    assert join_outputs([torch.tensor(1), torch.tensor(1)], [2, 1]).item() == 1
    assert [value.item() for value in join_outputs([torch.tensor(1), torch.tensor(2)], [2, 1])] == [1, 2]


def test_an_output_is_joined_by_what_is_in_it():
    first = CausalLMOutput(loss=torch.tensor(1.0), logits=torch.zeros(2, 3), hidden_states=(torch.ones(2, 1),))
    second = CausalLMOutput(loss=torch.tensor(4.0), logits=torch.ones(1, 3), hidden_states=(torch.zeros(1, 1),))
    joined = join_outputs([first, second], [2, 1])
    assert type(joined) is CausalLMOutput
    assert joined.loss.item() == joined["loss"].item() == 2.0
    assert joined.logits.tolist() == [[0.0] * 3] * 2 + [[1.0] * 3]
    assert joined.hidden_states[0].tolist() == [[1.0], [1.0], [0.0]]
    assert first.logits.shape == (2, 3)
    assert join_outputs([first], [2]) is first


def test_what_does_not_fit_together_becomes_a_list():
    one, other = torch.zeros(2, 3), torch.zeros(2, 4)
    assert join_outputs([one, other], [2, 2])[1] is other
    assert join_outputs([{"a": 1}, {"b": 1}], [1, 1]) == [{"a": 1}, {"b": 1}]
    assert join_outputs([(1, 2), (1, 2, 3)], [1, 1]) == [(1, 2), (1, 2, 3)]
    assert join_outputs([{"a": 1, "b": 2}, {"a": 1, "b": 3}], [1, 1]) == {"a": 1, "b": [2, 3]}
    assert join_outputs([None, one], [2, 2])[0] is None
    table = torch.arange(5)
    assert torch.equal(join_outputs([table, table.clone()], [2, 2]), table)
    assert len(join_outputs([table, table + 1], [2, 2])) == 2


def test_a_tensor_with_its_own_concatenation_is_left_to_it():
    class Marked(torch.Tensor):
        pass

    joined = join_outputs([torch.zeros(2, 3).as_subclass(Marked), torch.ones(1, 3).as_subclass(Marked)], [2, 1])
    assert type(joined) is Marked
    assert joined.shape == (3, 3)


def test_gradients_go_through_the_split():
    whole = torch.ones(3, 2, requires_grad=True)
    parts = split_batch({"x": whole}, num_microbatches=2, microbatch_size=None)
    (parts[0].batch["x"].sum() * 2 + parts[1].batch["x"].sum()).backward()
    assert whole.grad.tolist() == [[2.0, 2.0], [2.0, 2.0], [1.0, 1.0]]


def test_a_forward_may_change_its_microbatch_in_place():
    table = torch.randn(9, 2, requires_grad=True)
    parts = split_batch({"ids": torch.arange(8).view(4, 2)}, num_microbatches=2, microbatch_size=None)
    outputs = []
    for part in parts:
        part.batch["ids"].masked_fill_(part.batch["ids"] == 100, 0)  # autograd counts it as a change
        outputs.append(torch.nn.functional.embedding(part.batch["ids"], table).sum())
    outputs[0].backward()  # of the first, after the second was changed
    assert table.grad[:4].eq(1).all()
