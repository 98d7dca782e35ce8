"""Lifecycle of a chunk: gathered, used, released, its gradients collected reduced and dropped."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from gemini_chunk_cases import ALL, CPU, SHAPES, Bench
from harness import distributed

from booster.plugins.gemini.chunk import TensorState, placeholder
from booster.plugins.gemini.nvme_tier import DiskTier

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool]


ACTIONS = ["gather", "release", "pin", "unpin", "look", "look away", *["gradient"] * 4, "reduce"]


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


def test_a_kept_weight_keeps_its_values():
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


def test_a_kept_chunk_stays_and_its_part_is_a_part_of_it():
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


def test_bytes_in_memory_are_those_of_parts_and_kept_weights(tmp_path):
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
    assert kept.chunk.bytes_in_memory == 4 * numel  # its shard is a part of it
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
        bench.pool.release(buffer)
    if chunk.can_be_released:
        bench.release()
    assert bench.pool.bytes_in_use == 0


def of_ranks(layout, flat_parts):
    flat = torch.cat(flat_parts)
    return [flat[place.start : place.stop].view(place.shape) for place in layout.regions]


@distributed(world_size=[2, 3])
def test_every_rank_gets_all_weights_from_parts():
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
    shards = [torch.empty(bench.chunk.grad_shard.numel) for _ in range(size)]
    dist.all_gather(shards, bench.chunk.grad_shard.as_tensor())
    for index, sums in enumerate(of_ranks(bench.layout, shards)):
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
    shards = [torch.empty(bench.chunk.grad_shard.numel) for _ in range(size)]
    dist.all_gather(shards, bench.chunk.grad_shard.as_tensor().clone())
    for index, sums in enumerate(of_ranks(bench.layout, shards)):
        terms = [bench.gradient(index, 10 * seed + other).float() for seed in range(2) for other in range(size)]
        torch.testing.assert_close(sums, torch.stack(terms).sum(0), rtol=1e-6, atol=1e-5)
    tier.close()
