"""Shards of parameters come together at their owners and go back, bit for bit, by one all-to-all each way."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from harness import distributed

from booster.comm import all_to_all, all_to_all_single, count_communication, transport, use_shared_memory
from booster.core.param_redistribution import assign_owners
from booster.device import current_device
from booster.errors import RankFailedError
from booster.plugins.torch_fsdp.shard_update import RowRedistribution, row_range

pytestmark = pytest.mark.on_device

WAYS = pytest.mark.parametrize("uses_memory", [True, False], ids=["shared memory", "gloo"])
SHAPES = [(1,), (5,), (7, 3), (2, 3, 4), (0, 3), (), (33, 10), (4, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.uint8]


@contextmanager
def going_by_memory(is_on):
    use_shared_memory(is_on)
    try:
        if current_device().type == "cpu":
            assert transport() == ("shared memory" if is_on and dist.get_world_size() > 1 else "gloo")
        yield
    finally:
        use_shared_memory(None)


@dataclass
class Member:
    name: str
    shape: tuple
    dtype: torch.dtype

    @property
    def numel(self):
        return math.prod(self.shape)


def mixed_members():
    return [Member(f"p{index}", shape, DTYPES[index % len(DTYPES)]) for index, shape in enumerate(SHAPES)]


def owners_of(members, world_size):
    return assign_owners([member.numel * member.dtype.itemsize for member in members], world_size)


def exchange_of(members, owners, group=None):
    return RowRedistribution([member.shape for member in members], owners, group)


def whole_of(member, draw=0, dtype=None):
    """The same numbers on every rank, of which all bits differ."""
    generator = torch.Generator().manual_seed(1000 * draw + len(member.name) + int(member.name[1:]))
    numbers = torch.randn(member.numel, generator=generator, dtype=torch.float64)
    return (numbers * 50 + 128).to(current_device(), dtype or member.dtype).view(member.shape)


def shards_of(members, draw=0, dtype=None, indices=None):
    shards = {}
    for index in range(len(members)) if indices is None else indices:
        start, stop = row_range(members[index].shape, dist.get_rank(), dist.get_world_size())
        shards[index] = whole_of(members[index], draw, dtype).reshape(-1)[start:stop].clone()
    return shards


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[key], tensor)


def wire_bytes(members, owners, indices=None, dtype=None):
    """Bytes of this rank's rows of others' parameters, and of others' rows of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    out = back = 0
    for index in range(len(members)) if indices is None else indices:
        itemsize = (dtype or members[index].dtype).itemsize
        start, stop = row_range(members[index].shape, rank, size)
        if owners[index] == rank:
            back += (members[index].numel - (stop - start)) * itemsize
        else:
            out += (stop - start) * itemsize
    return out, back


@distributed([1, 2, 3, 4])
@WAYS
def test_there_and_back(world_size, uses_memory):
    with going_by_memory(uses_memory):
        members = mixed_members()
        owners = owners_of(members, world_size)
        exchange = exchange_of(members, owners)
        mine = {index for index, owner in enumerate(owners) if owner == dist.get_rank()}
        shards = shards_of(members)
        out, back = wire_bytes(members, owners)
        with count_communication() as count:
            wholes = exchange.to_owners(shards)
        assert_same(wholes, {index: whole_of(members[index]) for index in mine})
        assert_same(shards, shards_of(members))
        assert count.calls == (Counter(all_to_all=1) if world_size > 1 else Counter())
        assert (count.sent["all_to_all"], count.received["all_to_all"]) == (out, back)

        changed = {index: whole_of(members[index], draw=1) for index in mine}
        addresses = {index: shard.data_ptr() for index, shard in shards.items()}
        with count_communication() as count:
            exchange.from_owners(changed, shards)
        assert_same(shards, shards_of(members, draw=1))
        assert addresses == {index: shard.data_ptr() for index, shard in shards.items()}
        assert count.calls == (Counter(all_to_all=1) if world_size > 1 else Counter())
        assert (count.sent["all_to_all"], count.received["all_to_all"]) == (back, out)


@distributed([2, 3, 4])
@WAYS
def test_subsets_and_other_dtypes(world_size, uses_memory):
    with going_by_memory(uses_memory):
        members = mixed_members()
        owners = owners_of(members, world_size)
        exchange = exchange_of(members, owners)
        for indices in ([6, 2], [1], [4], [], [7, 0, 3]):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                shards = shards_of(members, 2, dtype, indices)
                with count_communication() as count:
                    wholes = exchange.to_owners(shards)
                mine = [index for index in indices if owners[index] == dist.get_rank()]
                assert_same(wholes, {index: whole_of(members[index], 2, dtype) for index in mine})
                out, back = wire_bytes(members, owners, indices, dtype)
                assert (count.sent["all_to_all"], count.received["all_to_all"]) == (out, back)
                assert count.calls["all_to_all"] == int(indices != [4] and indices != [])
                exchange.from_owners({index: -whole for index, whole in wholes.items()}, shards)
                for index, before in shards_of(members, 2, dtype, indices).items():
                    assert torch.equal(shards[index], -before)


@distributed([2, 3, 4])
@WAYS
def test_a_rank_may_own_nothing_and_one_everything(world_size, uses_memory):
    with going_by_memory(uses_memory):
        members = mixed_members()
        for owner in (0, world_size - 1):
            exchange = exchange_of(members, [owner] * len(members))
            shards = shards_of(members)
            wholes = exchange.to_owners(shards)
            is_owner = dist.get_rank() == owner
            assert_same(wholes, dict(enumerate(map(whole_of, members))) if is_owner else {})
            exchange.from_owners({index: whole_of(members[index], draw=3) for index in wholes}, shards)
            assert_same(shards, shards_of(members, draw=3))


@distributed([2])
def test_rows_that_lie_at_their_owner_are_not_sent():
    members = [Member("p0", (1, 5), torch.float32), Member("p1", (0,), torch.int64)]
    exchange = exchange_of(members, [0, 1])
    with count_communication() as count:
        wholes = exchange.to_owners(shards_of(members))
        exchange.from_owners(wholes, shards_of(members))
    assert count.calls == Counter()
    assert_same(wholes, {dist.get_rank(): whole_of(members[dist.get_rank()])})


@distributed([4])
@WAYS
def test_groups_exchange_among_themselves(uses_memory):
    with going_by_memory(uses_memory):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = groups[dist.get_rank() % 2]
        place, draw = dist.get_rank(group), dist.get_rank() % 2
        members = mixed_members()
        owners = owners_of(members, 2)
        exchange = exchange_of(members, owners, group)
        shards = {
            index: whole_of(member, draw).reshape(-1)[slice(*row_range(member.shape, place, 2))]
            for index, member in enumerate(members)
        }
        wholes = exchange.to_owners(shards)
        mine = [index for index, owner in enumerate(owners) if owner == place]
        assert_same(wholes, {index: whole_of(members[index], draw) for index in mine})


@distributed([2, 3])
def test_parameters_may_be_given_and_need_no_certain_layout_when_whole(world_size):
    member = Member("p0", (7, 3), torch.float32)
    exchange = exchange_of([member], [1])
    shards = {0: torch.nn.Parameter(shards_of([member])[0])}
    wholes = exchange.to_owners(shards)
    transposed = {index: torch.nn.Parameter((2 * whole).t().contiguous().t()) for index, whole in wholes.items()}
    exchange.from_owners(transposed, shards)
    assert torch.equal(shards[0].detach(), 2 * shards_of([member])[0])


@distributed([2])
def test_memory_of_a_rank_is_what_it_sends_and_twice_what_it_owns():
    """No tensor is as large as a whole that belongs to another rank."""

    class SeesSizes(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.largest = max(self.largest, out.untyped_storage().nbytes())
            return out

    with going_by_memory(False):
        member = Member("p0", (4096, 4), torch.float32)
        exchange = exchange_of([member], [0])
        shards = shards_of([member])
        with SeesSizes() as seen:
            wholes = exchange.to_owners(shards)
            exchange.from_owners(wholes, shards)
        whole_bytes = 4 * member.numel
        assert seen.largest == (whole_bytes if dist.get_rank() == 0 else whole_bytes // 2)


# The collective below


def sizes_between(world_size, largest):
    """sizes[r][s]: elements from rank r to rank s, some none and one the largest."""
    return [
        [(largest * (1 + (3 * giver + taker) % 4) // 4) * ((giver + taker) % 3 > 0) for taker in range(world_size)]
        for giver in range(world_size)
    ]


def elements(giver, taker, numel, dtype):
    generator = torch.Generator().manual_seed(10 * giver + taker)
    return torch.randn(numel, generator=generator).mul(100).to(current_device(), dtype)


@distributed([1, 2, 3, 4])
@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_uneven_parts(world_size, uses_memory, dtype):
    with going_by_memory(uses_memory):
        rank = dist.get_rank()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(all_to_all, "_ROUND_BUFFER_BYTES", 4096)  # several rounds, the last one short
            for largest in (0, 1, 7, 1024, 5003):
                sizes = sizes_between(world_size, largest)
                gives, takes = sizes[rank], [row[rank] for row in sizes]
                payload = torch.cat([elements(rank, taker, numel, dtype) for taker, numel in enumerate(gives)])
                output = torch.zeros(sum(takes), dtype=dtype, device=current_device())
                with count_communication() as count:
                    all_to_all_single(
                        output,
                        payload,
                        output_sizes=takes,
                        payload_sizes=gives,
                        largest_size=max(map(max, sizes)),
                    )
                assert torch.equal(
                    output, torch.cat([elements(giver, rank, numel, dtype) for giver, numel in enumerate(takes)])
                )
                if world_size > 1:
                    assert count.calls == Counter(all_to_all=1)
                    assert count.sent["all_to_all"] == (sum(gives) - gives[rank]) * dtype.itemsize
                    assert count.received["all_to_all"] == (sum(takes) - takes[rank]) * dtype.itemsize
                else:
                    assert count.calls == Counter()


@distributed([2])
def test_uneven_parts_beside_others_in_one_group():
    """Numbers of calls stay in step however many rounds one takes."""
    rank = dist.get_rank()
    for _ in range(2):
        output = torch.empty(3 if rank == 0 else 1_000_000, device=current_device())
        gives = [0, 1_000_000] if rank == 0 else [3, 0]
        takes = [0, 3] if rank == 0 else [1_000_000, 0]
        all_to_all_single(
            output,
            torch.full((sum(gives),), float(rank), device=current_device()),
            output_sizes=takes,
            payload_sizes=gives,
            largest_size=1_000_000,
        )
        assert output.unique().tolist() == [1.0 - rank]
        even = torch.empty(4, device=current_device())
        all_to_all_single(even, torch.arange(4.0, device=current_device()) + 4 * rank)
        assert even.tolist() == ([0, 1, 4, 5] if rank == 0 else [2, 3, 6, 7])


@distributed([2])
def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent():
    four, three = torch.empty(4), torch.empty(3)
    for output, payload, output_sizes, payload_sizes, largest in [
        (four, four, [1, 2], [2, 2], 2),
        (four, four, [2, 2], [4, 0], 3),
        (four, three, [2, 2], [1, 1, 1], 2),
        (four, four, [2, 2], [5, -1], 5),
        (four.view(2, 2), four, [1, 1], [2, 2], 2),
        (torch.empty(8)[::2], four, [2, 2], [2, 2], 2),
        (four, four.double(), [2, 2], [2, 2], 2),
    ]:
        with pytest.raises(AssertionError, match="is not 2 flat shards of"):
            all_to_all_single(
                output, payload, output_sizes=output_sizes, payload_sizes=payload_sizes, largest_size=largest
            )
    with pytest.raises(AssertionError, match="go together"):
        all_to_all_single(four, four, output_sizes=[2, 2])
    dist.barrier()


@distributed([2], fresh=True, device="cpu")  # NCCL does not look
def test_ranks_that_tell_different_largest_sizes_are_told_so():
    largest = 2 + dist.get_rank()
    with pytest.raises(RankFailedError, match="ranks are in different calls"):
        all_to_all_single(
            torch.empty(4), torch.empty(4), output_sizes=[2, 2], payload_sizes=[2, 2], largest_size=largest
        )
