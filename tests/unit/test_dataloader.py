"""DistributedDataLoader: epochs, positions, states, and what the facade asks during an iteration."""

from __future__ import annotations

import copy
import json
from itertools import islice, product

import pytest
import torch
from data_sources import StatefulStream, active_loader
from torch.utils.data import DataLoader, Dataset

from booster.data import DistributedBatchSampler, prepare_dataloader
from booster.errors import ConfigError


class Numbers(Dataset):
    """Sample i is i; `broken` raises."""

    def __init__(self, length, broken=None):
        self.length = length
        self.broken = broken

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError(f"sample {index} can't be read")
        return index


def loaders(n, batch_size, dp_size, **options):
    options = {"shuffle": True, "seed": 3} | options
    return [prepare_dataloader(Numbers(n), batch_size, dp_rank=r, dp_size=dp_size, **options) for r in range(dp_size)]


def loader(n=10, batch_size=2, **options):
    return loaders(n, batch_size, 1, **options)[0]


def read(iterable):
    return [batch.tolist() for batch in iterable]


def flat(batches):
    return [index for batch in batches for index in batch]


def order(n, epoch, seed=3):
    sampler = DistributedBatchSampler(n, n, 0, 1, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    return list(next(iter(sampler)))


def together(ranks):
    """The global batches, from all ranks' loaders side by side, without the repeats."""
    for parts in zip(*ranks, strict=True):
        whole = flat(read(parts))
        yield whole[: len(whole) - ranks[0].num_repeated_in_batch]


def test_every_iter_is_the_next_epoch():
    one = loader()
    assert [flat(read(one)) for _ in range(3)] == [order(10, epoch) for epoch in range(3)]
    assert len(one) == 5
    assert one.batch_size == 2
    assert one.epoch == 3


def test_set_epoch_is_obeyed_and_harmless():
    one = loader()
    for epoch in (0, 1, 5):
        one.set_epoch(epoch)
        assert flat(read(one)) == order(10, epoch)
    assert flat(read(one)) == order(10, 6)


def test_a_loop_that_sets_the_epoch_of_the_sampler_reads_the_same():
    one, resumed = loader(), loader()
    one.epoch_sampler.set_epoch(7)  # overruled by the loader
    assert len(one.sampler) == 10
    for epoch in (0, 1, 5):
        one.sampler.set_epoch(epoch)
        state = one.state_dict()
        assert flat(read(one)) == order(10, epoch)
    resumed.load_state_dict(state)
    resumed.sampler.set_epoch(5)
    assert flat(read(resumed)) == order(10, 5)
    assert flat(read(copy.deepcopy(resumed))) == order(10, 6)


def test_a_loop_that_sets_the_epoch_of_a_streams_sampler_reads_the_same():
    plain = DataLoader(StatefulStream(), 2)
    one = prepare_dataloader(plain, dp_rank=0, dp_size=1)
    expected = [flat(batch.tolist() for batch in one) for _ in range(3)]
    one = prepare_dataloader(plain, dp_rank=0, dp_size=1)
    for epoch in (2, 0):
        one.sampler.set_epoch(epoch)
        assert flat(batch.tolist() for batch in one) == expected[epoch]


def test_break_goes_to_the_next_epoch_but_the_state_stays_inside():
    one = loader()
    for _ in one:
        break
    state = one.state_dict()
    assert (state["epoch"], state["samples_consumed"], state["in_epoch"]) == (0, 2, True)
    assert flat(read(one)) == order(10, 1)
    two = loader()
    two.load_state_dict(state)
    assert flat(read(two)) == order(10, 0)[2:]
    for _ in one:
        break
    one.set_epoch(3)
    assert (one.state_dict()["epoch"], one.state_dict()["in_epoch"]) == (3, False)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("batch_size", "dp_size"), [(2, 2), (1, 3), (4, 1)])
def test_a_state_from_any_loop_body_goes_on_like_the_unstopped_run(batch_size, dp_size, drop_last):
    def fresh():
        return loaders(11, batch_size, dp_size, drop_last=drop_last)

    unstopped = fresh()
    whole_run = [list(zip(*map(read, unstopped), strict=True)) for _ in range(4)]
    num_batches = len(whole_run[0])
    for stop_epoch, stop_batch in product(range(2), range(num_batches)):
        stopped = fresh()
        for _ in range(stop_epoch):
            assert all(read(one) for one in stopped)
        states = []
        for one in stopped:
            for index, _ in enumerate(one):
                if index == stop_batch:
                    states.append(json.loads(json.dumps(one.state_dict())))
                    break
        assert all(state == states[0] for state in states)
        resumed = fresh()
        for one in resumed:
            one.load_state_dict(states[0])
            assert one.state_dict() == states[0]
        rest = whole_run[stop_epoch][stop_batch + 1 :]
        expected = [rest, *whole_run[stop_epoch + 1 : 3]] if rest else whole_run[stop_epoch + 1 : 3]
        assert [list(zip(*map(read, resumed), strict=True)) for _ in expected] == expected


def test_a_state_goes_on_in_any_world():
    n = 13
    for (b1, w1), (b2, w2) in product([(2, 2), (1, 3), (3, 1), (4, 5)], repeat=2):
        first = loaders(n, b1, w1)
        for stop in range(1, len(first[0]) + 1):
            first = loaders(n, b1, w1)
            side_by_side = together(first)
            seen = flat(islice(side_by_side, stop))
            state = first[0].state_dict()
            second = loaders(n, b2, w2, seed=77)  # the seed is the state's
            for one in second:
                one.load_state_dict(state)
            if len(seen) < n:
                seen += flat(together(second))
            assert seen == order(n, 0)
            assert flat(together(second)) == order(n, 1)


def test_end_of_an_epoch_starts_the_next():
    one = loader()
    states = []
    for _ in one:
        states.append(one.state_dict())
    assert states[-1] == one.state_dict()
    assert (states[-1]["epoch"], states[-1]["samples_consumed"], states[-1]["in_epoch"]) == (1, 0, False)
    two = loader()
    two.load_state_dict(states[-1])
    assert two.epoch == 1
    assert flat(read(two)) == order(10, 1)


def test_dropped_rest_is_not_a_batch_after_loading():
    one = loader(10, 2, drop_last=True)
    for _ in islice(one, 4):
        state = one.state_dict()
    two = loader(10, 4, drop_last=True)  # 8 consumed, 2 left: less than a batch of 4
    two.load_state_dict(state)
    assert two.epoch == 1
    assert flat(read(two)) == order(10, 1)[:8]


def test_set_epoch_keeps_the_middle_that_was_loaded():
    one = loader()
    next(iter(one))
    two = loader()
    two.load_state_dict(one.state_dict())
    two.set_epoch(0)
    assert flat(read(two)) == order(10, 0)[2:]
    two.set_epoch(0)
    assert flat(read(two)) == order(10, 0)


def test_state_says_what_it_is():
    one = loader()
    next(iter(one))
    assert one.state_dict() == {
        "seed": 3,
        "num_samples": 10,
        "shuffle": True,
        "epoch": 0,
        "samples_consumed": 2,
        "in_epoch": True,
        "global_batch_size": 2,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_samples": 11}, "num_samples=11 for a loader with num_samples=10"),
        ({"shuffle": False}, "shuffle=False for a loader with shuffle=True"),
        ({"samples_consumed": -1}, "samples_consumed=-1"),
        ({"epoch": "1"}, "epoch='1'"),
        ({"epoch": None}, "without epoch"),
        ({"generator": "AAAA"}, "with a generator for a loader without one"),
    ],
)
def test_foreign_states_are_refused_and_change_nothing(change, words):
    one = loader()
    state = one.state_dict() | {"epoch": 4} | change
    state = {key: value for key, value in state.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        one.load_state_dict(state)
    assert flat(read(one)) == order(10, 0)


def test_what_is_no_state_epoch_or_generator_is_refused():
    one = prepare_dataloader(range(10), 2, dp_rank=0, dp_size=1)
    for state in (None, 5):
        with pytest.raises(ConfigError, match="pass what a loader's state_dict"):
            one.load_state_dict(state)
    for epoch in (-1, 1.5, "1"):
        with pytest.raises(ConfigError, match="is not the number of an epoch"):
            one.set_epoch(epoch)
    one.set_epoch(torch.tensor(3))
    assert one.epoch == 3
    with pytest.raises(ConfigError, match=r"is not a torch\.Generator"):
        prepare_dataloader(range(10), 2, dp_rank=0, dp_size=1, generator=5)


def test_users_generator_is_part_of_the_state():
    def fresh(seed):
        return loader(generator=torch.Generator().manual_seed(seed))

    one = fresh(1)
    next(iter(one))
    torch.rand(3, generator=one.generator)
    state = json.loads(json.dumps(one.state_dict()))
    expected = [torch.rand(2, generator=one.generator)]
    next(iter(one))
    expected.append(torch.rand(2, generator=one.generator))

    two = fresh(2)
    two.load_state_dict(state)
    next(iter(two))  # continues inside the epoch: draws nothing new
    drawn = [torch.rand(2, generator=two.generator)]
    next(iter(two))
    drawn.append(torch.rand(2, generator=two.generator))
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))
    with pytest.raises(ConfigError, match="without a generator for a loader with one"):
        two.load_state_dict(loader().state_dict())


def test_global_random_state_is_left_alone():
    one = loader()
    before = torch.get_rng_state()
    read(one)
    assert torch.equal(before, torch.get_rng_state())


def test_nested_and_held_iterators():
    one = loader()
    pairs = [(a, flat(read(one))) for a in read(one)]
    assert flat([a for a, _ in pairs]) == order(10, 0)
    assert [inner for _, inner in pairs] == [order(10, epoch) for epoch in range(1, 6)]
    held = iter(one)
    assert next(held).tolist() == order(10, 6)[:2]
    assert flat(read(one)) == order(10, 7)
    assert flat(read(held)) == order(10, 6)[2:]
    with pytest.raises(StopIteration):
        next(held)


def test_failed_sample_is_not_consumed():
    one = prepare_dataloader(Numbers(6, broken=3), 2, dp_rank=0, dp_size=1)
    iterator = iter(one)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(OSError, match="sample 3"):
        next(iterator)
    assert one.state_dict()["samples_consumed"] == 2
    assert next(iterator).tolist() == [4, 5]
    assert one.is_last_batch
    assert one.state_dict()["epoch"] == 1


def test_last_batch_and_repeats_are_known():
    for n, dp_size, batch_size in product((1, 5, 12, 17), (1, 2, 3, 5), (1, 4)):
        ranks = loaders(n, batch_size, dp_size)
        flags, seen = [], []
        for parts in zip(*ranks, strict=True):
            assert [one.current_batch_samples for one in ranks] == [len(part) for part in parts]
            assert len({one.num_repeated_in_batch for one in ranks}) == 1
            flags.append(ranks[0].is_last_batch)
            whole = flat(read(parts))
            seen += whole[: len(whole) - ranks[0].num_repeated_in_batch]
        assert flags == [False] * (len(ranks[0]) - 1) + [True]
        assert seen == order(n, 0)
        assert (ranks[0].is_last_batch, ranks[0].current_batch_samples, ranks[0].num_repeated_in_batch) == (False, 0, 0)


def test_innermost_loader_is_active():
    train, val = loader(6), loader(4)
    assert active_loader() is None
    for _ in train:
        assert active_loader() is train
        for _ in val:
            assert active_loader() is val
        assert active_loader() is train
    assert active_loader() is None


def test_active_ends_with_break_close_and_collection():
    one, two = loader(), loader()
    for _ in one:
        for _ in two:
            break
        assert active_loader() is one
        break
    assert active_loader() is None
    held = iter(one)
    assert active_loader() is None  # nothing was read yet
    next(held)
    assert active_loader() is one
    held.close()
    assert active_loader() is None
    assert list(held) == []
    held = iter(one)
    next(held)
    del held
    assert active_loader() is None


def test_active_is_the_one_that_is_read():
    train, val = loader(6), loader(4)
    endless = iter(val)
    next(endless)
    for _ in train:
        assert active_loader() is train
    assert active_loader() is val
    for _ in zip(train, val, strict=False):
        assert active_loader() is val
    assert next(endless).tolist() == order(4, 0)[2:]


def test_active_ends_with_an_error_in_the_loop():
    def fail():
        for _ in loader():
            raise KeyError("user's own")

    with pytest.raises(KeyError) as caught:
        fail()
    del caught
    assert active_loader() is None


def test_nested_passes_over_one_loader_have_their_own_flags():
    one = loader(4)
    outer = iter(one)
    next(outer)
    next(outer)
    assert one.is_last_batch
    inner = iter(one)
    next(inner)
    assert not one.is_last_batch
    inner.close()
    assert one.is_last_batch


def test_a_state_of_another_kind_of_dataset_is_refused_with_what_to_pass():
    state = prepare_dataloader(Numbers(4), 2, dp_rank=0, dp_size=1).state_dict()
    with pytest.raises(ConfigError, match="the same kind of dataset, map-style or a stream"):
        prepare_dataloader(StatefulStream(), 2, dp_rank=0, dp_size=1).load_state_dict(state)
