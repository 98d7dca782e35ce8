"""Gradients in chunks: where they lie, how they are accumulated, reduced and dropped."""

from __future__ import annotations

import pytest
import torch
from gemini_chunk_cases import ALL, SHAPES, Bench

from booster.plugins.gemini.chunk import TensorState
from booster.plugins.gemini.nvme_tier import DiskTier


def test_gradients_take_the_place_of_weights_that_are_not_viewed():
    bench = Bench()
    bench.gather()
    home = bench.chunk.gathered.data_ptr()
    for index in reversed(ALL):
        assert not bench.chunk.is_complete
        bench.receive(index, bench.gradient(index))
        assert bench.shows_weights(range(index))  # of those whose gradients are still to come
    assert bench.chunk.is_complete
    assert bench.num_taken == 1  # the payload
    assert bench.chunk.holds_gradients_in_weights
    assert not bench.chunk.can_be_released
    assert bench.states == {TensorState.READY_FOR_REDUCE}
    bench.reduce()
    assert bench.num_taken == 1
    assert bench.states == {TensorState.FREE}
    assert bench.shows_nothing()
    assert all(torch.equal(sums, bench.gradient(index)) for index, sums in enumerate(bench.sums()))
    assert bench.pool.bytes_in_use == 0
    bench.gather()
    assert bench.chunk.gathered.data_ptr() == home
    assert bench.shows_weights()


def a_view(bench):
    return bench.parameters[0].detach()


def a_pin(bench):
    bench.chunk.pin(bench.slots[:1])
    return bench


def a_graph(bench):
    bench.slots[-1].num_saved += 1
    return bench


def a_storage(bench):
    return bench.chunk.gathered.untyped_storage()


@pytest.mark.parametrize("look", [a_view, a_pin, a_graph, a_storage])
def test_weights_that_somebody_looks_at_stay(look):
    bench = Bench()
    bench.gather()
    holder = look(bench)
    for index in reversed(ALL):
        bench.receive(index, bench.gradient(index))
    assert bench.num_taken == 2
    assert not bench.chunk.holds_gradients_in_weights
    assert bench.chunk.has_all_weights
    assert bench.shows_weights()
    bench.reduce()
    assert bench.states == {TensorState.HOLD}
    assert bench.shows_weights()
    assert all(torch.equal(sums, bench.gradient(index)) for index, sums in enumerate(bench.sums()))
    assert bench.pool.bytes_in_use == bench.layout.num_bytes
    del holder


@pytest.mark.parametrize("look", [a_view, a_pin])
def test_who_begins_to_look_later_finds_all_weights_that_are_left(look):
    """Gradients that were in the payload already move out; those weights that they replaced must be gathered anew."""
    bench = Bench()
    bench.gather()
    bench.receive(3, bench.gradient(3))
    assert bench.chunk.holds_gradients_in_weights
    holder = look(bench)
    for index in (2, 1, 0):
        bench.receive(index, bench.gradient(index))
    assert bench.num_taken == 2
    assert bench.shows_weights([0, 1, 2])
    assert [slot.is_overwritten for slot in bench.slots] == [False, False, False, True]
    assert not bench.chunk.has_all_weights
    bench.reduce()
    assert bench.shows_weights([0, 1, 2])
    assert all(torch.equal(sums, bench.gradient(index)) for index, sums in enumerate(bench.sums()))
    del holder


@pytest.mark.parametrize("look", [a_view, a_pin])
def test_weights_that_somebody_looks_at_stay_while_the_gradients_beside_them_are_reduced(look):
    """Some parameters have no gradient in this backward, and their weights are used in it all the same."""
    bench = Bench()
    bench.gather()
    bench.receive(3, bench.gradient(3))
    assert bench.chunk.holds_gradients_in_weights
    holder = look(bench)
    bench.reduce()
    assert torch.equal(bench.sums()[3], bench.gradient(3))
    assert not any(bool(sums.any()) for sums in bench.sums()[:3])
    if look is a_view:
        assert torch.equal(holder, bench.values[0])
    else:
        assert bench.shows_weights([0])


def test_weights_are_gathered_elsewhere_while_gradients_are_in_their_place():
    bench = Bench()
    bench.gather()
    home = bench.chunk.gathered.data_ptr()
    bench.receive(3, bench.gradient(3))
    bench.gather()
    assert bench.chunk.gathered.data_ptr() != home
    assert bench.shows_weights()
    assert bench.chunk.has_all_weights
    for index in (2, 1, 0):
        bench.receive(index, bench.gradient(index))
    assert bench.shows_weights()
    bench.reduce()
    assert all(torch.equal(sums, bench.gradient(index)) for index, sums in enumerate(bench.sums()))
    bench.release()
    assert bench.pool.bytes_in_use == 0


def test_weights_that_somebody_looks_at_stay_when_all_are_gathered_elsewhere():
    bench = Bench()
    bench.gather()
    bench.receive(3, bench.gradient(3))
    look = a_view(bench)
    bench.gather()
    bench.receive(0, bench.gradient(0))
    assert torch.equal(look, bench.values[0])
    bench.reduce()
    assert torch.equal(look, bench.values[0])


def test_no_buffer_is_lost_when_replaced_weights_are_gathered_again():
    bench = Bench()
    bench.gather()
    bench.receive(3, bench.gradient(3))
    look = a_view(bench)
    bench.receive(0, bench.gradient(0))  # the gradients move out
    bench.gather()
    assert bench.shows_weights()
    bench.reduce()
    del look
    bench.release()
    assert bench.pool.bytes_in_use == 0


def test_gradients_need_no_weights():
    """An embedding's backward never asks for them."""
    bench = Bench()
    for index in ALL:
        bench.receive(index, bench.gradient(index))
    assert bench.chunk.is_complete
    bench.gather()
    assert bench.shows_weights()
    bench.reduce()
    assert bench.shows_weights()
    assert all(torch.equal(sums, bench.gradient(index)) for index, sums in enumerate(bench.sums()))


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_a_gradient_that_arrives_twice_is_added(is_looked_at):
    bench = Bench()
    bench.gather()
    look = a_view(bench) if is_looked_at else None
    for seed in range(3):
        bench.receive(1, bench.gradient(1, seed))
    bench.reduce()
    expected = bench.gradient(1, 0) + bench.gradient(1, 1) + bench.gradient(1, 2)
    assert torch.equal(bench.sums()[1], expected)
    del look


@pytest.mark.parametrize("arriving", [(), (0,), (1, 3), (2,)])
def test_missing_gradients_are_zero(arriving):
    bench = Bench()
    bench.gather()
    for index in arriving:
        bench.receive(index, bench.gradient(index))
    assert not bench.chunk.is_complete
    assert bench.chunk.has_gradients == bool(arriving)
    bench.reduce()
    for index, sums in enumerate(bench.sums()):
        assert torch.equal(sums, bench.gradient(index) if index in arriving else torch.zeros(SHAPES[index]))
    assert [slot.is_used for slot in bench.slots] == [index in arriving for index in ALL]


def test_what_is_not_expected_is_not_waited_for():
    bench = Bench()
    bench.slots[0].is_expected = bench.slots[2].is_expected = False
    bench.chunk.update_expected()
    assert not bench.chunk.is_complete  # nothing has arrived
    bench.receive(1, bench.gradient(1))
    assert not bench.chunk.is_complete
    bench.receive(3, bench.gradient(3))
    assert bench.chunk.is_complete
    bench.receive(0, bench.gradient(0))  # a surprise
    assert bench.chunk.is_complete


@pytest.mark.parametrize("has_tier", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sums_grow_over_backwards_in_a_format_that_holds_them(dtype, has_tier, tmp_path):
    tier = DiskTier(str(tmp_path)) if has_tier else None
    bench = Bench(dtype=dtype, weights_tier=tier, sums_tier=tier)
    expected = [torch.zeros(shape, dtype=bench.chunk.grad_shard.dtype) for shape in SHAPES]
    for seed in range(4):
        bench.gather()
        for index in (3, 1, 0) if seed % 2 else (0, 1, 2, 3):
            gradient = bench.gradient(index, seed)
            expected[index] += gradient
            bench.receive(index, gradient.clone())
        bench.reduce()
        assert all(torch.equal(sums, wanted) for sums, wanted in zip(bench.sums(), expected, strict=True))
        if bench.chunk.is_gathered:
            bench.release()
    assert bench.chunk.grad_shard.dtype is (torch.float32 if dtype.itemsize == 2 else dtype)
    if tier is not None:
        assert bench.chunk.bytes_in_memory == 0
        bench.chunk.grad_shard.drop()
        bench.chunk.weights.drop()
        assert tier.bytes_held == 0
        tier.close()


def test_sparse_gradients_arrive_dense():
    bench = Bench(shapes=((6, 2), (3,)))
    indices = torch.tensor([[1, 4, 1]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(3, 2), (6, 2), check_invariants=True)
    bench.receive(0, sparse)
    bench.receive(0, sparse)
    bench.reduce()
    assert torch.equal(bench.sums()[0], 2 * sparse.to_dense())


def test_a_kept_chunk_never_loses_its_weights():
    bench = Bench(kept=True)
    for _ in range(2):
        for index in ALL:
            bench.receive(index, bench.gradient(index))
        assert not bench.chunk.holds_gradients_in_weights
        bench.reduce()
        assert bench.shows_weights()
        assert bench.states == {TensorState.HOLD}
    assert all(torch.equal(sums, 2 * bench.gradient(index)) for index, sums in enumerate(bench.sums()))
    assert bench.pool.bytes_in_use == 0


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_a_gradient_can_be_read_before_it_is_reduced(is_looked_at):
    bench = Bench()
    bench.gather()
    look = a_view(bench) if is_looked_at else None
    assert bench.chunk.local_gradient(bench.slots[0]) is None
    bench.receive(0, bench.gradient(0))
    bench.parameters[1].grad = bench.gradient(1)
    assert torch.equal(bench.chunk.local_gradient(bench.slots[0]), bench.gradient(0))
    assert torch.equal(bench.chunk.local_gradient(bench.slots[1]), bench.gradient(1))
    assert bench.chunk.local_gradient(bench.slots[2]) is None
    del look


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("when", ["nothing", "arrived in grad", "received", "received elsewhere", "reduced", "both"])
def test_gradients_are_forgotten(when, has_weights, is_kept):
    bench = Bench(kept=is_kept)
    if has_weights and not is_kept:
        bench.gather()
    look = bench.chunk.gathered.detach() if when == "received elsewhere" and has_weights and not is_kept else None
    if when in ("reduced", "both"):
        bench.receive(0, bench.gradient(0))
        bench.reduce()
    if when in ("received", "received elsewhere", "both"):
        bench.receive(1, bench.gradient(1))
    if when == "arrived in grad":
        bench.parameters[2].grad = bench.gradient(2)
    buffer = bench.chunk.drop_gradients()
    if buffer is not None:
        bench.pool.release(buffer)
    assert not bench.chunk.has_gradients
    assert not bench.chunk.has_grad_shard
    assert bench.chunk.grad_shard.bytes_in_memory == 0
    assert all(parameter.grad is None for parameter in bench.parameters)
    assert bench.states == {TensorState.HOLD if bench.chunk.is_gathered else TensorState.FREE}
    assert bench.shows_weights() if bench.chunk.is_gathered else bench.shows_nothing()
    if bench.chunk.is_gathered and not is_kept:
        bench.release()
    del look
    assert bench.pool.bytes_in_use == 0
    bench.gather()
    bench.receive(0, bench.gradient(0, 9))
    bench.reduce()
    assert torch.equal(bench.sums()[0], bench.gradient(0, 9))
    assert not bench.sums()[1].any()
