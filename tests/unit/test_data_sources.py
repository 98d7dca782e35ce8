"""Users' samplers, batch samplers, loader classes and streams: ranks together read what one process reads."""

from __future__ import annotations

import copy
import json
import random
from itertools import islice

import numpy as np
import pytest
import torch
from data_sources import (
    BATCH_SIZE,
    DRAWN,
    NUM_SAMPLES,
    NUMBERS,
    SAMPLERS,
    STREAMS,
    Buckets,
    NamedLoader,
    ScalingLoader,
    SharedEpoch,
    StatefulStream,
    Stream,
    active_loader,
    own_numbers,
    package_of,
    web_loader,
    write_web_shards,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from booster.data import DistributedDataLoader, prepare_dataloader
from booster.errors import ConfigError

SOURCES = SAMPLERS | DRAWN | STREAMS


def ranks_of(name, dp_size, **options):
    if (package := package_of(name)) is not None:
        pytest.importorskip(package)
    return [prepare_dataloader(SOURCES[name](**options), dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]


def steps(loaders):
    """The ranks' batches of each step, without repeats; every rank must have a batch in every step."""
    passes = [iter(one) for one in loaders]
    while True:
        batches = []
        for one in passes:
            try:
                batch = next(one)
            except StopIteration:
                continue
            batches.append(own_numbers(batch, one.position.num_repeated_local))
        if not batches:
            return
        assert len(batches) == len(loaders)
        yield batches


def flat(ranks_steps):
    return [number for step in ranks_steps for batch in step for number in batch]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dp_size", [2, 3])
@pytest.mark.parametrize("name", SOURCES)
def test_ranks_together_read_what_one_process_reads(name, dp_size, num_workers):
    serial = ranks_of(name, 1)
    several = ranks_of(name, dp_size, num_workers=num_workers)
    for _ in range(2):
        expected = flat(steps(serial))
        assert flat(steps(several)) == expected
        if name not in DRAWN and name not in ("subset", "batches"):
            assert sorted(expected) == NUMBERS


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SOURCES)
def test_a_position_goes_on_bit_for_bit_and_on_other_ranks(name, num_workers):
    unstopped = ranks_of(name, 2)
    epochs = [list(steps(unstopped)) for _ in range(3)]
    num_steps = len(epochs[1])
    for stop in sorted({1, num_steps // 2, num_steps - 1, num_steps} - {0}):
        stopped = ranks_of(name, 2, num_workers=num_workers)
        assert list(steps(stopped)) == epochs[0]
        assert list(islice(steps(stopped), stop)) == epochs[1][:stop]
        states = [json.loads(json.dumps(one.state_dict())) for one in stopped]
        assert states[0] == states[1]
        rest = epochs[1][stop:]
        for dp_size in (2, 1, 3):
            resumed = ranks_of(name, dp_size, num_workers=num_workers)
            for one in resumed:
                one.load_state_dict(states[0])
                assert one.state_dict()["epoch"] == (1 if rest else 2)
            found = list(steps(resumed)) if rest else []
            if dp_size == 2:
                assert found == rest
            assert flat(found) == flat(rest)
            assert flat(steps(resumed)) == flat(epochs[2])


@pytest.mark.parametrize("name", ["buckets", "weighted", "shuffled stream", "stateful stream"])
def test_persistent_workers_and_breaks(name):
    plain = ranks_of(name, 2)
    epochs = [list(steps(plain)) for _ in range(4)]
    several = ranks_of(name, 2, num_workers=2, persistent_workers=True)
    assert list(steps(several)) == epochs[0]
    assert list(islice(steps(several), 2)) == epochs[1][:2]
    states = [one.state_dict() for one in several]
    assert list(steps(several)) == epochs[2]
    for one, state in zip(several, states, strict=True):
        one.load_state_dict(state)
    assert list(steps(several)) == epochs[1][2:]
    assert list(steps(several)) == epochs[2]
    assert list(steps(several)) == epochs[3]


@pytest.mark.parametrize("name", SOURCES)
def test_random_states_of_the_main_process_are_kept(name):
    (one,) = ranks_of(name, 1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert len(flat(steps([one]))) > 5
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves its file open
def test_webdataset(tmp_path):
    pytest.importorskip("webdataset")
    write_web_shards(str(tmp_path))
    ranks = [prepare_dataloader(web_loader(str(tmp_path), num_workers=2), dp_rank=rank, dp_size=2) for rank in range(2)]
    assert flat(steps(ranks)) == NUMBERS
    assert len(list(islice(steps(ranks), 2))) == 2
    state = ranks[0].state_dict()
    (resumed,) = (prepare_dataloader(web_loader(str(tmp_path)), dp_rank=0, dp_size=1),)
    resumed.load_state_dict(state)
    assert flat(steps([resumed])) == NUMBERS[8:]


# Samplers.


def test_the_seed_decides_what_a_sampler_draws():
    def order(seed, generator=None):
        sampler = WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES, generator=generator)
        loader = DataLoader(NUMBERS, BATCH_SIZE, sampler=sampler)
        return flat(steps([prepare_dataloader(loader, dp_rank=0, dp_size=1, seed=seed)]))

    torch.manual_seed(1)
    first = order(3)
    torch.manual_seed(2)
    assert order(3) == first != order(4)
    assert order(None, torch.Generator().manual_seed(3)) != order(None, torch.Generator().manual_seed(4))


def test_a_samplers_own_generator_matters_by_its_seeding():
    def order(seed):
        buckets = Buckets()
        buckets.rng = np.random.default_rng(seed)
        loader = DataLoader(NUMBERS, batch_sampler=buckets)
        return flat(steps([prepare_dataloader(loader, dp_rank=0, dp_size=1)]))

    assert order(1) == order(1) != order(2)


def test_batches_are_dealt_out_and_counted():
    batches = [[0, 1], [2], [3, 4, 5], [6, 7, 8, 9], [10]]
    ranks = [
        prepare_dataloader(DataLoader(NUMBERS, batch_sampler=batches), dp_rank=rank, dp_size=3) for rank in range(3)
    ]
    assert [len(one) for one in ranks] == [2, 2, 2]
    assert [[batch.tolist() for batch in one] for one in ranks] == [
        [batches[0], batches[3]],
        [batches[1], batches[4]],
        [batches[2], batches[0]],
    ]
    for index, _ in enumerate(zip(*ranks, strict=True)):
        assert [one.num_repeated_in_batch for one in ranks] == ([0, 0, 0], [2, 2, 2])[index]
        assert [one.is_last_batch for one in ranks] == [index == 1] * 3
        assert ranks[2].current_batch_samples == (3, 2)[index]
    dropping = BatchSampler(SequentialSampler(NUMBERS), 5, True)
    dropping = type("Own", (BatchSampler,), {})(dropping.sampler, 5, True)
    ranks = [
        prepare_dataloader(DataLoader(NUMBERS, batch_sampler=dropping), dp_rank=rank, dp_size=3) for rank in range(3)
    ]
    assert flat(steps(ranks)) == NUMBERS[:15]  # of four batches three


@pytest.mark.parametrize(
    ("length", "yielded", "words"),
    [(3, 4, "more than the 3"), (3, 0, "none of the 3"), (None, 3, "has no length, and may be endless")],
)
def test_what_a_sampler_promises_is_checked(length, yielded, words):
    class Own(Sampler):
        def __iter__(self):
            return iter(NUMBERS[:yielded])

        if length is not None:

            def __len__(self):
                return length

    with pytest.raises(ConfigError, match=words):
        list(prepare_dataloader(DataLoader(NUMBERS, sampler=Own()), dp_rank=0, dp_size=1))


def test_an_order_that_cannot_be_drawn_again_is_refused_when_it_is_resumed():
    class Own(Sampler):
        def set_epoch(self, epoch):
            pass

        def __len__(self):
            return NUM_SAMPLES

        def __iter__(self):
            return iter(random.SystemRandom().sample(NUMBERS, NUM_SAMPLES))

    one = prepare_dataloader(DataLoader(NUMBERS, BATCH_SIZE, sampler=Own()), dp_rank=0, dp_size=1)
    next(iter(one))
    other = prepare_dataloader(DataLoader(NUMBERS, BATCH_SIZE, sampler=Own()), dp_rank=0, dp_size=1)
    with pytest.raises(ConfigError, match="a Own that now gives another order"):
        other.load_state_dict(one.state_dict())
    plain = prepare_dataloader(DataLoader(NUMBERS, BATCH_SIZE, sampler=NUMBERS), dp_rank=0, dp_size=1)
    with pytest.raises(ConfigError, match="sampler='Own' for a loader with sampler='list'"):
        plain.load_state_dict(one.state_dict())


def test_samples_of_a_users_sampler_are_augmented_alike_on_any_ranks():
    class Augmented:
        def __len__(self):
            return NUM_SAMPLES

        def __getitem__(self, index):
            return [index, torch.rand(1).item()]

    def rows(dp_size, num_workers):
        loaders = []
        for rank in range(dp_size):
            sampler = WeightedRandomSampler([1.0] * NUM_SAMPLES, 18)
            plain = DataLoader(Augmented(), 3, sampler=sampler, num_workers=num_workers, collate_fn=list)
            loaders.append(prepare_dataloader(plain, dp_rank=rank, dp_size=dp_size))
        return [row for parts in zip(*loaders, strict=True) for part in parts for row in part]

    assert rows(1, 1) == rows(2, 2) == rows(3, 1)


# DataLoader classes.


def test_a_loaders_class_and_attributes_are_kept():
    plain = ScalingLoader(NUMBERS, BATCH_SIZE, scale=3)
    plain.note = ["of the user"]
    loader = prepare_dataloader(plain, dp_rank=1, dp_size=2)
    assert isinstance(loader, ScalingLoader)
    assert isinstance(loader, DistributedDataLoader)
    assert (loader.doubled(), loader.note, len(loader)) == (6, ["of the user"], 6)
    assert loader.note is plain.note
    seen = [(batch.tolist(), active_loader() is loader, loader.is_last_batch) for batch in loader]
    assert seen[0] == ([6, 9], True, False)
    assert seen[-1] == ([66, 0][:1], True, True) or seen[-1][2]
    assert [batch.tolist() for batch in islice(plain, 2)] == [[0, 3], [6, 9]]  # it is not changed
    named = prepare_dataloader(NamedLoader("train"), dp_rank=0, dp_size=2)
    assert (
        named.name,
        type(named).__name__,
        type(named) is type(prepare_dataloader(NamedLoader("b"), dp_rank=1, dp_size=2)),
    ) == (
        "train",
        "NamedLoader",
        True,
    )
    kept = DataLoader(NUMBERS, 4)
    kept.note = 1
    assert prepare_dataloader(kept, dp_rank=0, dp_size=2).note == 1


def test_a_class_that_does_not_read_through_torch_is_refused():
    class Own(DataLoader):
        def __iter__(self):
            return iter([torch.tensor(NUMBERS)])

    with pytest.raises(ConfigError, match=r"Own\.__iter__ does not take its batches from super\(\)\.__iter__\(\)"):
        list(prepare_dataloader(Own(NUMBERS), dp_rank=0, dp_size=2))


# Streams.


def test_the_state_of_a_stream_spares_reading_again():
    one = prepare_dataloader(StatefulStream(), 4, dp_rank=0, dp_size=1)
    list(islice(iter(one), 3))
    state = one.state_dict()
    assert (state["samples_consumed"], state["stream_state"]) == (12, {"position": 12})
    stream = StatefulStream()
    other = prepare_dataloader(stream, 4, dp_rank=0, dp_size=1)
    other.load_state_dict(state)
    assert len(list(other)) == 3
    assert stream.num_read == NUM_SAMPLES - 12


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [0, 1, 5, 12, 13])
def test_the_end_of_a_stream(length, drop_last, dp_size):
    class Short(IterableDataset):
        def __iter__(self):
            return iter(NUMBERS[:length])

    ranks = [
        prepare_dataloader(Short(), 2, dp_rank=rank, dp_size=dp_size, drop_last=drop_last) for rank in range(dp_size)
    ]
    whole = length - length % (2 * dp_size) if drop_last else length
    passes = [iter(one) for one in ranks]
    lasts, seen = [], []
    for _ in range(-(-whole // (2 * dp_size))):
        batches = [next(one) for one in passes]
        assert len({len(batch) for batch in batches}) == 1
        assert len({one.num_repeated_in_batch for one in ranks}) == 1
        assert sum(one.position.num_repeated_local for one in passes) == ranks[0].num_repeated_in_batch
        lasts.append({one.position.is_last for one in passes})
        for batch, one in zip(batches, passes, strict=True):
            seen += own_numbers(batch, one.position.num_repeated_local)
    assert all(next(one, None) is None for one in passes)
    assert seen == NUMBERS[:whole]
    assert lasts == [{False}] * (len(lasts) - 1) + [{True}] * bool(lasts)
    assert [one.epoch for one in ranks] == [1 if lasts else 0] * dp_size


def test_the_length_of_a_streams_loader_is_that_of_its_dataset():
    assert [len(one) for one in ranks_of("sized stream", 3)] == [4, 4, 4]
    with pytest.raises(TypeError, match="Stream has no length"):
        len(ranks_of("stream", 2)[0])


def test_a_stream_that_shards_itself_resumes_on_its_own_rank():
    def fresh(rank, dp_size=2, **options):
        stream = Stream()
        stream.is_sharded = True
        return prepare_dataloader(stream, BATCH_SIZE, dp_rank=rank, dp_size=dp_size, **options)

    one = fresh(1, num_workers=2)
    assert flat([[batch.tolist()] for batch in one]) == NUMBERS
    start = one.state_dict()
    assert len(list(islice(one, 4))) == 4
    inside = one.state_dict()
    resumed = fresh(1)
    resumed.load_state_dict(inside)
    assert flat([[batch.tolist()] for batch in resumed]) == NUMBERS[8:]
    with pytest.raises(ConfigError, match=r"dp_rank=1 \(here 0\)"):
        fresh(0).load_state_dict(inside)
    with pytest.raises(ConfigError, match=r"dp_size=2 \(here 3\)"):
        fresh(1, 3).load_state_dict(inside)
    fresh(0, 3).load_state_dict(start)
    with pytest.raises(ConfigError, match="is_sharded=True"):
        prepare_dataloader(Stream(), 2, dp_rank=1, dp_size=2).load_state_dict(inside)


def test_a_shorter_stream_cannot_be_resumed():
    (one,) = ranks_of("stream", 1)
    list(islice(iter(one), 8))
    state = one.state_dict()

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(10))

    other = prepare_dataloader(Stream(), 2, dp_rank=0, dp_size=1)
    other.load_state_dict(state)
    with pytest.raises(ConfigError, match="after 16 samples of Stream, which now has 10 only"):
        list(other)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_function_of_a_stream_draws_other_numbers_on_each_rank(num_workers):
    class Numbers(IterableDataset):
        def __iter__(self):
            yield from range(8)

    def draw(samples):
        return torch.rand(1).item()

    options = {"dp_size": 2, "num_workers": num_workers, "collate_fn": draw}
    before = torch.get_rng_state()
    drawn = [list(prepare_dataloader(Numbers(), 2, dp_rank=rank, **options)) for rank in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert len({*drawn[0], *drawn[1]}) == 4
    main = prepare_dataloader(Numbers(), 2, dp_rank=1, dp_size=2, collate_fn=draw)
    assert list(main) == drawn[1]


def test_a_stream_may_return_its_own_state_object():
    class Live(IterableDataset):
        def __init__(self):
            self.state = {"place": {"file": {"next": 0}}}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = copy.deepcopy(state)

        def __iter__(self):
            place = self.state["place"]["file"]
            first, place["next"] = place["next"], 0
            for number in range(first, 23):
                place["next"] = number + 1
                yield number

    loaders = [prepare_dataloader(Live(), 2, dp_rank=rank, dp_size=2) for rank in range(2)]
    passes = [iter(one) for one in loaders]
    read = [number for _ in range(2) for one in passes for number in next(one).tolist()]
    states = [one.state_dict() for one in loaders]
    resumed = [prepare_dataloader(Live(), 2, dp_rank=rank, dp_size=2) for rank in range(2)]
    for one, state in zip(resumed, states, strict=True):
        one.load_state_dict(state)
    read += [number for batches in zip(*resumed, strict=True) for batch in batches for number in batch.tolist()]
    assert sorted(set(read)) == list(range(23))


def test_a_sampler_may_yield_tuples_and_arrays():
    class Places(Sampler):
        def __len__(self):
            return 4

        def __iter__(self):
            yield from [(0, 1), (1, np.int64(2)), (torch.tensor(2), 3), (0, 0)]

    class Matrix:
        def __len__(self):
            return 12

        def __getitem__(self, place):
            assert type(place) is tuple
            return int(np.arange(12).reshape(3, 4)[place])

    (one,) = (prepare_dataloader(DataLoader(Matrix(), 2, sampler=Places()), dp_rank=0, dp_size=1),)
    assert [batch.tolist() for batch in one] == [[1, 6], [11, 0]]


def test_an_error_of_a_stream_comes_through_and_is_not_counted():
    class Broken(IterableDataset):
        def __iter__(self):
            yield from range(5)
            raise OSError("the line is cut")

    for num_workers in (0, 1):
        one = prepare_dataloader(Broken(), 2, dp_rank=0, dp_size=1, num_workers=num_workers)
        batches = iter(one)
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(OSError, match="the line is cut"):
            list(batches)
        assert one.state_dict()["samples_consumed"] in (2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("context", [None, "spawn"])
def test_workers_set_an_epoch_that_they_share(context):
    options = {} if context is None else {"multiprocessing_context": context}
    one = prepare_dataloader(SharedEpoch(), 1, dp_rank=0, dp_size=1, num_workers=2, persistent_workers=True, **options)
    for epoch in range(2 if context else 3):
        assert [batch.item() for batch in one] == [epoch] * 8
