"""The life of a chunk: gathered, used, released, its gradients collected where there is room, summed and forgotten."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn

from booster.plugins.gemini.chunk import Chunk, TensorState, placeholder
from booster.plugins.gemini.chunk_layout import ChunkLayout, ParamRegion, unit_numel
from booster.plugins.gemini.nvme_tier import DiskTier
from booster.plugins.sharding.buffer_pool import BufferPool

SHAPES = ((3, 5), (7,), (), (2, 2, 2))
ALL = range(len(SHAPES))
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool]
ACTIONS = ["gather", "release", "pin", "unpin", "look", "look away", *["gradient"] * 4, "reduce"]


def make_layout(shapes=SHAPES, dtype=torch.float32, num_shards=1, trains=True):
    stops = list(accumulate(math.prod(shape) for shape in shapes))
    places = [
        ParamRegion(index, shape, stops[index] - math.prod(shape), stops[index]) for index, shape in enumerate(shapes)
    ]
    unit = unit_numel(dtype, num_shards)
    numel = math.ceil(max(1, stops[-1]) / unit) * unit
    return ChunkLayout(dtype=dtype, trains=trains, numel=numel, num_shards=num_shards, regions=tuple(places))


class Bench:
    """A chunk with its pool; what its weights must be is in `values`."""

    def __init__(
        self, shapes=SHAPES, dtype=torch.float32, *, weights_tier=None, sums_tier=None, kept=False, group=None
    ):
        is_distributed = dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        self.layout = make_layout(shapes, dtype, size)
        generator = torch.Generator().manual_seed(1)
        self.values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        self.parameters = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
        named = [(f"p{index}", parameter) for index, parameter in enumerate(self.parameters)]
        sum_dtype = torch.float32 if dtype.itemsize == 2 else dtype
        self.chunk = Chunk(
            0, self.layout, named, rank=rank, group=None, device=CPU, sum_dtype=sum_dtype, sum_device=CPU
        )
        full = torch.full((self.layout.numel,), 77.0).to(dtype)
        full[: self.layout.used_numel] = torch.cat([value.flatten() for value in self.values])
        if kept:
            self.chunk.keep_gathered(full)
        else:
            self.chunk.weights.allocate(weights_tier)
            self.chunk.weights.store(full[self.layout.shard_range(rank)])
            for slot in self.chunk.params:
                slot.unbind()
        self.sums_tier = sums_tier
        self.pool = BufferPool(CPU)
        self.num_taken = 0

    @property
    def slots(self):
        return self.chunk.params

    @property
    def states(self):
        return {slot.state for slot in self.slots}

    def take(self, num_bytes):
        self.num_taken += 1
        buffer = self.pool.take(num_bytes)
        buffer.memory.fill_(0xFF)  # nan
        return buffer

    def gather(self):
        replaced = self.chunk.start_gather(
            None if self.chunk.is_kept_gathered else self.take(self.layout.num_bytes), self.take
        )
        self.chunk.finish_gather()
        if replaced is not None:
            self.pool.give_back(replaced)

    def release(self):
        self.pool.give_back(self.chunk.release())

    def receive(self, index, gradient):
        self.parameters[index].grad = gradient
        self.chunk.on_grad_ready(self.slots[index], self.take)
        assert self.parameters[index].grad is None

    def reduce(self):
        if self.chunk.grad_shard.tensor is None and not self.chunk.grad_shard.is_offloaded:
            self.chunk.grad_shard.allocate(self.sums_tier)
        self.chunk.start_reduce(self.take)
        assert self.chunk.is_reducing
        for buffer in self.chunk.finish_reduce():
            self.pool.give_back(buffer)
        assert not self.chunk.is_reducing

    def gradient(self, index, seed=0):
        generator = torch.Generator().manual_seed(100 * seed + index)
        return torch.randn(self.layout.regions[index].shape, generator=generator).to(self.layout.dtype)

    def sums(self):
        """Returns this rank's sums of each parameter; the waste must be zero."""
        flat = self.chunk.grad_shard.as_tensor().clone()
        assert not flat[self.layout.used_numel :].any()
        return [flat[place.start : place.stop].view(place.shape) for place in self.layout.regions]

    def shows_weights(self, indices=ALL):
        return all(torch.equal(self.parameters[index], self.values[index]) for index in indices)

    def shows_nothing(self):
        return all(bool(parameter.isnan().all()) for parameter in self.parameters)


# Weights.


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_placeholder_has_shape_and_format_and_takes_no_memory(dtype):
    shown = placeholder(dtype, CPU).expand(100, 200)
    assert (shown.shape, shown.dtype) == ((100, 200), dtype)
    assert shown.untyped_storage().nbytes() == dtype.itemsize
    assert bool(shown.isnan().all()) if dtype.is_floating_point or dtype.is_complex else not shown.any()
    with pytest.raises(RuntimeError, match="single memory location"):
        shown.copy_(torch.ones(100, 200))


def test_weights_come_and_go():
    bench = Bench()
    chunk = bench.chunk
    assert not chunk.is_gathered
    assert bench.shows_nothing()
    chunk.start_gather(bench.take(bench.layout.num_bytes), bench.take)
    assert (chunk.is_gathering, chunk.is_gathered, chunk.can_be_released) == (True, False, False)
    chunk.finish_gather()
    assert (chunk.is_gathering, chunk.is_gathered, chunk.has_all_weights) == (False, True, True)
    assert bench.shows_weights()
    assert bench.states == {TensorState.HOLD}
    bench.release()
    assert not chunk.is_gathered
    assert bench.shows_nothing()
    assert bench.states == {TensorState.FREE}
    assert [parameter.shape for parameter in bench.parameters] == [torch.Size(shape) for shape in SHAPES]
    assert bench.pool.bytes_in_use == 0
    bench.gather()
    assert bench.shows_weights()
    assert bench.pool.bytes_held == bench.layout.num_bytes  # the same buffer


def test_whoever_keeps_a_weight_keeps_its_values():
    bench = Bench()
    bench.gather()
    kept = bench.parameters[0].detach()
    bench.release()
    for _ in range(3):
        bench.gather()
        assert bench.shows_weights()
        bench.chunk.gathered.zero_()
        bench.release()
    assert torch.equal(kept, bench.values[0])


def test_what_a_module_uses_is_not_released():
    bench = Bench()
    chunk, slots = bench.chunk, bench.slots
    bench.gather()
    chunk.pin(slots[:2])
    chunk.pin(slots[1:2])
    assert [slot.state for slot in slots] == [TensorState.COMPUTE] * 2 + [TensorState.HOLD] * 2
    assert not chunk.can_be_released
    chunk.unpin(slots[:2])
    assert [slot.state for slot in slots[:2]] == [TensorState.HOLD, TensorState.COMPUTE]
    assert not chunk.can_be_released
    chunk.unpin(slots[1:2])
    assert bench.states == {TensorState.HOLD}
    assert chunk.can_be_released


def test_a_kept_chunk_stays_and_its_piece_is_a_part_of_it():
    bench = Bench(kept=True)
    assert bench.shows_weights()
    assert not bench.chunk.can_be_released
    bench.gather()  # for the sake of other ranks
    assert bench.shows_weights()
    bench.chunk.weights.tensor[0] = 5.0  # an optimizer's update
    assert bench.parameters[0].flatten()[0] == 5.0
    assert bench.num_taken == 0


def test_offloaded_weights_are_read_when_they_are_gathered(tmp_path):
    tier = DiskTier(str(tmp_path))
    bench = Bench(weights_tier=tier)
    assert bench.chunk.bytes_in_memory == 0
    for _ in range(3):
        bench.gather()
        assert bench.shows_weights()
        bench.release()
    tier.close()


def test_a_parameter_that_was_given_up_is_left_alone():
    bench = Bench()
    gone, slot = bench.parameters[1], bench.slots[1]
    gone.data = torch.ones(7)
    bench.chunk.remove(slot)
    bench.chunk.update_expected()
    bench.gather()
    assert bench.shows_weights([0, 2, 3])
    assert torch.equal(gone, torch.ones(7))
    for index, one in enumerate(bench.slots):
        one.parameter.grad = torch.full(one.region.shape, float(index))
        bench.chunk.on_grad_ready(one, bench.take)
    assert bench.chunk.is_complete
    bench.reduce()
    flat = bench.chunk.grad_shard.as_tensor()
    assert all(bool((one.view_in(flat) == index).all()) for index, one in enumerate(bench.slots))


# Gradients.


def test_gradients_take_the_place_of_weights_that_nobody_looks_at():
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


# Forgetting.


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
        bench.pool.give_back(buffer)
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


# Memory.


def test_bytes_in_memory_are_those_of_pieces_and_kept_weights(tmp_path):
    bench = Bench(dtype=torch.bfloat16)
    numel = bench.layout.numel
    assert bench.chunk.bytes_in_memory == 2 * numel
    bench.gather()
    assert bench.chunk.bytes_in_memory == 2 * numel  # the payload is the pool's
    bench.receive(0, bench.gradient(0))
    bench.reduce()
    assert bench.chunk.bytes_in_memory == (2 + 4) * numel
    bench.chunk.drop_gradients()
    assert bench.chunk.bytes_in_memory == 2 * numel
    kept = Bench(kept=True)
    assert kept.chunk.bytes_in_memory == 4 * numel  # its piece is a part of it
    tier = DiskTier(str(tmp_path))
    offloaded = Bench(weights_tier=tier, sums_tier=tier)
    offloaded.receive(0, offloaded.gradient(0))
    offloaded.reduce()
    assert offloaded.chunk.bytes_in_memory == 0
    assert tier.bytes_held == 2 * 4 * numel
    tier.close()


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 150))])
def test_whatever_happens_gradients_are_summed_and_weights_are_the_weights(seed):
    """Random gatherings, releases, pins, looks, gradients, reductions and ends of windows against a plain sum."""
    generator = random.Random(seed)
    bench = Bench()
    chunk = bench.chunk
    waiting, reduced, looks, pins = {}, {}, [], []

    def add(sums, index, value):
        sums[index] = sums[index] + value if index in sums else value

    for step in range(40):
        action = generator.choice(ACTIONS)
        index = generator.randrange(len(SHAPES))
        slot = bench.slots[index]
        if action == "gather" and not chunk.has_all_weights and not chunk.num_pins:
            if chunk.gathered is not None and not chunk.holds_gradients_in_weights:
                bench.release()
            bench.gather()
            assert bench.shows_weights()
        elif action == "release" and chunk.can_be_released:
            bench.release()
        elif action == "pin" and chunk.is_gathered and not slot.is_overwritten:
            chunk.pin([slot])
            pins.append(slot)
        elif action == "unpin" and pins:
            chunk.unpin([pins.pop()])
        elif action == "look" and chunk.is_gathered and not slot.is_overwritten:
            looks.append((slot.parameter.detach(), bench.values[index]))
        elif action == "look away" and looks:
            looks.pop(generator.randrange(len(looks)))
        elif action == "gradient":
            bench.receive(index, bench.gradient(index, step))
            add(waiting, index, bench.gradient(index, step))
        elif action == "reduce" and chunk.has_gradients:
            bench.reduce()
            for number, value in waiting.items():
                add(reduced, number, value)
            waiting.clear()
            for number, sums in enumerate(bench.sums()):
                torch.testing.assert_close(sums, reduced.get(number, torch.zeros(SHAPES[number])))
        assert all(torch.equal(look, value) for look, value in looks)
        shown = [i for i, one in enumerate(bench.slots) if chunk.is_gathered and not one.is_overwritten]
        assert bench.shows_weights(shown)
        assert all(not pinned.is_overwritten for pinned in pins)
    looks.clear()
    chunk.unpin(pins)
    chunk.num_pins = 0
    buffer = chunk.drop_gradients()
    if buffer is not None:
        bench.pool.give_back(buffer)
    if chunk.can_be_released:
        bench.release()
    assert bench.pool.bytes_in_use == 0


# Several ranks.


def of_ranks(layout, flat_pieces):
    flat = torch.cat(flat_pieces)
    return [flat[place.start : place.stop].view(place.shape) for place in layout.regions]


@distributed(world_size=[2, 3])
def test_every_rank_gets_all_weights_from_pieces():
    bench = Bench()
    assert bench.chunk.weights.numel == bench.layout.numel // dist.get_world_size()
    for _ in range(3):
        bench.gather()
        assert bench.shows_weights()
        bench.release()
    assert bench.pool.bytes_held == bench.layout.num_bytes


@distributed(world_size=[2, 3])
def test_who_has_the_weights_takes_part_for_the_others():
    bench = Bench()
    bench.gather()
    if dist.get_rank() == 0:
        bench.release()
        bench.gather()
    else:
        bench.chunk.start_gather(None, bench.take)
        bench.chunk.finish_gather()
        assert bench.num_taken == 1
    assert bench.shows_weights()


@distributed(world_size=[2, 3])
def test_ranks_may_have_weights_and_gradients_in_different_places():
    """Rank 0 has gradients in place of its weights and needs these again; the others look at theirs, or have none."""
    bench = Bench()
    rank, size = dist.get_rank(), dist.get_world_size()
    bench.gather()
    look = bench.chunk.gathered.detach() if rank == 1 else None
    arriving = {0: (3, 1), 1: (0, 1, 2, 3)}.get(rank, ())
    for index in arriving:
        bench.receive(index, bench.gradient(index, rank))
    if rank == 0:
        assert bench.chunk.holds_gradients_in_weights
        bench.gather()
    else:
        bench.chunk.start_gather(None, bench.take)
        bench.chunk.finish_gather()
    assert bench.shows_weights()
    bench.reduce()
    pieces = [torch.empty(bench.chunk.grad_shard.numel) for _ in range(size)]
    dist.all_gather(pieces, bench.chunk.grad_shard.as_tensor())
    for index, sums in enumerate(of_ranks(bench.layout, pieces)):
        expected = bench.gradient(index, 1)
        if index in (1, 3):
            expected = expected + bench.gradient(index, 0)
        torch.testing.assert_close(sums, expected)
    del look


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(world_size=[2, 3])
def test_sums_are_over_ranks_and_backwards(dtype, tmp_path):
    rank, size = dist.get_rank(), dist.get_world_size()
    tier = DiskTier(str(tmp_path / str(rank)))
    bench = Bench(dtype=dtype, weights_tier=tier, sums_tier=tier)
    for seed in range(2):
        bench.gather()
        for index in ALL:
            bench.receive(index, bench.gradient(index, 10 * seed + rank))
        bench.reduce()
    pieces = [torch.empty(bench.chunk.grad_shard.numel) for _ in range(size)]
    dist.all_gather(pieces, bench.chunk.grad_shard.as_tensor().clone())
    for index, sums in enumerate(of_ranks(bench.layout, pieces)):
        terms = [bench.gradient(index, 10 * seed + other).float() for seed in range(2) for other in range(size)]
        torch.testing.assert_close(sums, torch.stack(terms).sum(0), rtol=1e-6, atol=1e-5)
    tier.close()
