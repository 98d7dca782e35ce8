"""DistributedBatchSampler: who reads what, from where, against a naive twin and over all small sizes."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from itertools import product

import pytest
import torch

from booster.data import DistributedBatchSampler
from booster.data.worker_seeding import SampleBatch, derive_seed
from booster.errors import ConfigError

SIZES = list(product(range(1, 24), range(1, 6), range(1, 5)))


def naive_global_batches(order, batch_size, dp_size, drop_last):
    """The definition: cut the order; give up the odd end, or fill it up from the start until it can be shared out."""
    whole = batch_size * dp_size
    batches = [order[i : i + whole] for i in range(0, len(order), whole)]
    if len(batches[-1]) < whole:
        if drop_last:
            batches.pop()
        else:
            refill = 0
            batches[-1] = list(batches[-1])
            while len(batches[-1]) % dp_size:
                batches[-1].append(order[refill % len(order)])
                refill += 1
    return batches


def naive_rank_batches(order, batch_size, dp_rank, dp_size, drop_last):
    result = []
    for batch in naive_global_batches(order, batch_size, dp_size, drop_last):
        share = len(batch) // dp_size
        result.append(batch[dp_rank * share : (dp_rank + 1) * share])
    return result


def samplers(n, batch_size, dp_size, **options):
    return [DistributedBatchSampler(n, batch_size, rank, dp_size, **options) for rank in range(dp_size)]


def serial_order(n, seed, epoch, shuffle=True):
    sampler = DistributedBatchSampler(n, n, 0, 1, shuffle=shuffle, seed=seed)
    sampler.set_epoch(epoch)
    return list(next(iter(sampler)))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_together_read_the_dataset_once(shuffle, drop_last):
    for n, dp_size, batch_size in SIZES:
        if drop_last and n < dp_size * batch_size:
            continue
        ranks = samplers(n, batch_size, dp_size, shuffle=shuffle, seed=5, drop_last=drop_last)
        read = [list(sampler) for sampler in ranks]
        shapes = {tuple(len(batch) for batch in batches) for batches in read}
        assert len(shapes) == 1
        assert all(1 <= size <= batch_size for size in next(iter(shapes)))
        assert {len(sampler) for sampler in ranks} == {len(read[0])}
        counts = Counter(index for batches in read for batch in batches for index in batch)
        assert set(counts) <= set(range(n))
        repeated = sum(count - 1 for count in counts.values())
        assert {sampler.num_repeated for sampler in ranks} == {repeated}
        assert {sampler.num_dropped for sampler in ranks} == {n - len(counts)}
        assert repeated == 0 if drop_last else n == len(counts)
        order = serial_order(n, 5, 0, shuffle)
        for rank, batches in enumerate(read):
            assert batches == naive_rank_batches(order, batch_size, rank, dp_size, drop_last)


@pytest.mark.parametrize("drop_last", [False, True])
def test_global_batches_are_those_of_a_serial_run(drop_last):
    for n, dp_size, batch_size in SIZES:
        if drop_last and n < dp_size * batch_size:
            continue
        ranks = samplers(n, batch_size, dp_size, shuffle=True, drop_last=drop_last)
        serial = DistributedBatchSampler(n, batch_size * dp_size, 0, 1, shuffle=True, drop_last=drop_last)
        for parts, batch in zip(zip(*ranks, strict=True), serial, strict=True):
            together = [index for part in parts for index in part]
            assert together[: len(batch)] == batch
            assert len(together) - len(batch) in (0, ranks[0].num_repeated)


def test_places_say_what_the_batches_are():
    for n, dp_size, batch_size in SIZES:
        ranks = samplers(n, batch_size, dp_size, shuffle=True)
        position, real = 0, 0
        for parts in zip(*ranks, strict=True):
            place = ranks[0].batch_at(position)
            assert {len(part) for part in parts} == {place.num_samples}
            real += place.num_samples * dp_size - place.num_repeated
            assert place.stop == real
            assert place.is_last == (real == n)
            position = place.stop
        assert position == n


@pytest.mark.parametrize("drop_last", [False, True])
def test_any_position_goes_on_with_the_rest_for_any_world(drop_last):
    for n, dp_size, batch_size in product((1, 2, 7, 12, 23), (1, 2, 3, 5), (1, 2, 4)):
        if drop_last and n < dp_size * batch_size:
            continue
        order = serial_order(n, 1024, 3)
        for position in range(n):
            ranks = samplers(n, batch_size, dp_size, shuffle=True, drop_last=drop_last)
            for sampler in ranks:
                sampler.start_at(3, position)
            together = [i for parts in zip(*ranks, strict=True) for part in parts for i in part]
            rest = order[position:]
            whole = len(rest) - len(rest) % (dp_size * batch_size) if drop_last else len(rest)
            assert together[:whole] == rest[:whole]
            assert len(together) - whole < dp_size
            assert not (drop_last and len(together) > whole)
            # Repeats come from the start of the epoch, never of the rest.
            assert together[whole:] == [order[i % n] for i in range(len(together) - whole)]
            assert ranks[0].num_batches(position) == len(list(ranks[0]))


def test_dataset_smaller_than_the_world():
    assert [list(sampler) for sampler in samplers(2, 1, 5)] == [[[0]], [[1]], [[0]], [[1]], [[0]]]
    assert samplers(2, 1, 5)[0].num_repeated == 3


def test_orders_differ_by_seed_and_epoch_and_are_equal_on_all_ranks():
    def order(seed, epoch):
        return tuple(serial_order(50, seed, epoch))

    # In particular (0, 1) and (1, 0), which a seed of `seed + epoch` would make equal.
    assert len({order(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16
    assert order(3, 2) == order(3, 2)
    assert sorted(order(3, 2)) == list(range(50))
    assert serial_order(9, 3, 7, shuffle=False) == list(range(9))


def test_order_is_pinned():
    # A saved position is only worth something if later versions cut the same order.
    assert serial_order(8, 1024, 0) == [7, 4, 5, 3, 6, 1, 2, 0]
    assert derive_seed("a", 1) == derive_seed("a", 1) < 2**63


def test_iterating_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    list(DistributedBatchSampler(10, 2, 0, 2, shuffle=True))
    assert torch.equal(before, torch.get_rng_state())


def test_two_iterators_keep_their_own_epoch():
    sampler = DistributedBatchSampler(10, 2, 0, 1, shuffle=True)
    first = iter(sampler)
    sampler.set_epoch(1)
    second = iter(sampler)
    mixed = [(a, b) for a, b in zip(first, second, strict=True)]
    assert [i for a, _ in mixed for i in a] == serial_order(10, 1024, 0)
    assert [i for _, b in mixed for i in b] == serial_order(10, 1024, 1)


def test_batches_carry_their_stream():
    ranks = samplers(11, 2, 2, shuffle=True, seed=9)
    seeds = [batch.seed_of(k) for sampler in ranks for batch in sampler for k in range(len(batch))]
    assert len(set(seeds)) == len(seeds) == 12
    serial = DistributedBatchSampler(11, 4, 0, 1, shuffle=True, seed=9)
    by_sample = {index: batch.seed_of(k) for batch in serial for k, index in enumerate(batch)}
    for sampler in ranks:
        for batch in list(sampler)[:-1]:
            assert [batch.seed_of(k) for k in range(len(batch))] == [by_sample[index] for index in batch]


def test_batch_survives_the_way_to_a_worker():
    batch = SampleBatch([3, 1], stream="7/2", start=40)
    for twin in (pickle.loads(pickle.dumps(batch)), copy.copy(batch)):
        assert twin == [3, 1]
        assert twin.seed_of(1) == batch.seed_of(1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_samples": 0}, "empty dataset"),
        ({"dp_rank": 2}, "dp_rank=2 of dp_size=2"),
        ({"dp_rank": -1}, "dp_rank=-1"),
        ({"dp_size": 0, "dp_rank": 0}, "dp_size=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 1.5}, "batch_size=1.5"),
        ({"num_samples": 7, "drop_last": True}, "7 samples are less than a global batch of 8"),
    ],
)
def test_wrong_arguments(arguments, words):
    right = {"num_samples": 10, "batch_size": 4, "dp_rank": 0, "dp_size": 2}
    with pytest.raises(ConfigError, match=words):
        DistributedBatchSampler(**(right | arguments))
