"""prepare_dataloader and shard_dataloader: what they make of datasets, samplers and plain torch loaders."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from data_sources import active_loader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
)

from booster.data import (
    DistributedBatchSampler,
    DistributedDataLoader,
    prepare_dataloader,
    shard_dataloader,
)
from booster.data.prepare import loader_fingerprint
from booster.errors import ConfigError
from booster.rng_state import default_seed, set_default_seed


class Stream(IterableDataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return iter(self.numbers)


class OwnSampler(DistributedSampler):
    """Takes neither seed nor drop_last."""

    def __init__(self, dataset, num_replicas, rank, shuffle):
        super().__init__(dataset, num_replicas, rank, shuffle)


class OwnLoader(DataLoader):
    def _get_iterator(self):
        return iter(())


@pytest.fixture
def messages(monkeypatch):
    """What loaders tell the user: (message, ranks)."""
    told = []

    class Logger:
        def info(self, msg, ranks=None):
            told.append((msg, ranks))

    monkeypatch.setattr("booster.logger.get_dist_logger", lambda name: Logger())
    return told


def prepare(dataset, batch_size=2, dp_rank=0, dp_size=2, **options):
    return prepare_dataloader(dataset, batch_size, dp_rank=dp_rank, dp_size=dp_size, **options)


def read(iterable):
    return [batch.tolist() for batch in iterable]


def flat(iterable):
    return [index for batch in iterable for index in batch.tolist()]


# what the user is told


def test_repeats_and_drops_are_told_once_a_loader(messages):
    repeating, dropping, even = prepare(range(7)), prepare(range(7), drop_last=True), prepare(range(8))
    for one in (repeating, dropping, even):
        assert len(read(one)) == len(read(one)) == len(one)
    assert [ranks for _, ranks in messages] == [[0], [0]]
    assert messages[0][0].startswith("7 samples, batch_size=2 on 2 ranks: every epoch repeats 1 ")
    assert messages[1][0].startswith(
        "7 samples, batch_size=2 on 2 ranks, drop_last=True: every epoch drops the last 3 "
    )


def test_message_goes_through_the_real_logger(capsys):
    prepare(range(7))
    assert "every epoch repeats 1" in capsys.readouterr().err


# prepare_dataloader


def test_seed_and_drop_last_reach_the_order():
    whole = [flat(prepare(range(8), dp_rank=rank, shuffle=True, seed=5)) for rank in range(2)]
    assert sorted(whole[0] + whole[1]) == list(range(8))
    assert whole[0] != flat(prepare(range(8), shuffle=True, seed=6))
    assert read(prepare(range(7), drop_last=True)) == [[0, 1]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": [0], "shuffle": True}, "sampler=...*prepare_dataloader*DataLoader*dataset, sampler=..."),
        ({"batch_sampler": [[0]]}, "batch_sampler=..."),
        ({"in_order": False}, "in_order=False"),
        ({"num_worker": 2}, "unknown options num_worker:"),
        ({"batch_size": None}, "batch_size=None"),
        ({"dp_rank": 2}, "dp_rank=2 of dp_size=2"),
        ({"dataset": []}, "empty dataset"),
        ({"dataset": iter(range(3))}, "__len__ and __getitem__"),
        ({"dataset": range(3), "drop_last": True}, "leaves no batch"),
        ({"dataset": DataLoader(range(3)), "batch_size": 2}, "has its own batch_size: leave the argument out"),
        ({"dataset": DataLoader(range(3)), "batch_size": None, "num_workers": 2}, "has its own num_workers"),
    ],
)
def test_wrong_arguments(options, words):
    with pytest.raises(ConfigError, match=words.replace("...", r"\.\.\.").replace("*", ".*")):
        prepare(**({"dataset": range(8)} | options))


# the user's own sampler class


@pytest.mark.parametrize("cls", [DistributedSampler, OwnSampler])
def test_own_sampler_is_reshuffled_every_epoch(cls):
    ranks = [prepare(range(12), dp_rank=rank, shuffle=True, seed=7, distributed_sampler_cls=cls) for rank in range(2)]
    epochs = [[flat(one) for one in ranks] for _ in range(3)]
    assert all(sorted(parts[0] + parts[1]) == list(range(12)) for parts in epochs)
    assert epochs[0] != epochs[1]
    reference = cls(range(12), num_replicas=2, rank=1, shuffle=True, **({"seed": 7} if cls is not OwnSampler else {}))
    for epoch in range(3):
        reference.set_epoch(epoch)
        assert epochs[epoch][1] == list(reference)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_own_sampler_goes_on_from_a_state(num_workers):
    def fresh(**options):
        options = {"distributed_sampler_cls": DistributedSampler, "shuffle": True, "num_workers": num_workers} | options
        return prepare(range(14), **options)

    unstopped = fresh()
    epochs = [read(unstopped) for _ in range(3)]
    stopped = fresh()
    assert read(stopped) == epochs[0]
    for index, _ in enumerate(stopped):
        if index == 1:
            state = json.loads(json.dumps(stopped.state_dict()))
            break
    assert (state["epoch"], state["batches_consumed"], state["in_epoch"]) == (1, 2, True)
    resumed = fresh()
    resumed.load_state_dict(state)
    assert [read(resumed), read(resumed)] == [epochs[1][2:], epochs[2]]


def test_own_sampler_says_what_is_last_and_how_long():
    one = prepare(range(10), 2, distributed_sampler_cls=DistributedSampler)
    seen = [(active_loader() is one, one.is_last_batch, one.current_batch_samples) for _ in one]
    assert seen == [(True, False, 2), (True, False, 2), (True, True, 1)]


def test_own_sampler_state_is_for_the_same_ranks():
    def fresh(**options):
        return prepare(range(24), distributed_sampler_cls=DistributedSampler, **options)

    one = fresh()
    start = one.state_dict()
    next(iter(one))
    inside = one.state_dict()
    with pytest.raises(ConfigError, match=r"dp_size=2 \(here 3\)"):
        fresh(dp_size=3).load_state_dict(inside)
    with pytest.raises(ConfigError, match=r"seed=1024 \(here 2\)"):
        fresh(seed=2).load_state_dict(start)
    with pytest.raises(ConfigError, match="without samples_consumed"):
        prepare(range(24)).load_state_dict(inside)
    other = fresh(dp_size=3)
    other.load_state_dict(start)  # between two epochs the number of ranks may change
    assert len(read(other)) == 4


def test_own_sampler_that_does_not_fit():
    with pytest.raises(ConfigError, match="RandomSampler takes no num_replicas, rank, shuffle"):
        prepare(range(8), distributed_sampler_cls=RandomSampler)

    class Endless(DistributedSampler):
        __len__ = None

    with pytest.raises(ConfigError, match="Endless has no length"):
        prepare(range(8), distributed_sampler_cls=Endless)
    with pytest.raises(ConfigError, match="DistributedSampler leaves no batch"):
        prepare(range(3), distributed_sampler_cls=DistributedSampler, drop_last=True)


# iterable datasets


def test_iterable_dataset_may_split_itself():
    with pytest.raises(ConfigError, match="shuffle=True"):
        prepare(Stream(range(4)), dp_size=1, shuffle=True)
    with pytest.raises(ConfigError, match="distributed_sampler_cls"):
        prepare(Stream(range(4)), dp_size=1, distributed_sampler_cls=DistributedSampler)
    with pytest.raises(ConfigError, match="dp_rank=3 of dp_size=1"):
        prepare(Stream(range(4)), dp_rank=3, dp_size=1)
    assert read(prepare(Stream(range(3)), dp_size=1)) == [[0, 1], [2]]
    mine = Stream(range(1, 8, 2))
    mine.is_sharded = True
    assert read(prepare(mine, dp_rank=1)) == [[1, 3], [5, 7]]
    del mine.is_sharded
    assert read(prepare(mine, dp_rank=1)) == [[5, 7]]


def test_iterable_workers_start_differently_on_each_rank():
    def drawn(rank):
        stream = Stream(range(4))
        stream.is_sharded = True
        torch.manual_seed(0)
        one = prepare(stream, dp_rank=rank, num_workers=1, collate_fn=lambda samples: torch.rand(1).item())
        return list(one) + list(one)

    assert len(set(drawn(0) + drawn(1))) == 8
    assert drawn(1) == drawn(1)


# shard_dataloader


def double(samples):
    return torch.tensor(samples) * 2


def test_plain_loader_is_split():
    plain = DataLoader(range(13), batch_size=2, drop_last=True, collate_fn=double)
    ranks = [shard_dataloader(plain, rank, 3) for rank in range(3)]
    assert all(isinstance(one, DistributedDataLoader) and one.dataset is plain.dataset for one in ranks)
    assert [read(one) for one in ranks] == [[[0, 2], [12, 14]], [[4, 6], [16, 18]], [[8, 10], [20, 22]]]


def test_shuffled_loader_is_split_and_reshuffled():
    plain = DataLoader(range(12), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(4))
    ranks = [shard_dataloader(plain, rank, 2) for rank in range(2)]
    epochs = [[index for one in ranks for index in flat(one)] for _ in range(2)]
    assert [Counter(epoch) for epoch in epochs] == [Counter(range(12))] * 2
    assert epochs[0] != epochs[1]
    first = read(shard_dataloader(plain, 0, 2))
    assert first == read(DataLoader(range(12), batch_sampler=DistributedBatchSampler(12, 2, 0, 2, True, 4)))


@pytest.mark.parametrize("is_of_sampler", [False, True])
def test_the_seed_of_the_generator_decides_the_order(is_of_sampler):
    def order(seed, num_draws=0):
        generator = torch.Generator().manual_seed(seed)
        torch.rand(num_draws, generator=generator)  # such as a random_split before it
        data = range(40)
        if is_of_sampler:
            plain = DataLoader(data, batch_size=2, sampler=RandomSampler(data, generator=generator))
        else:
            plain = DataLoader(data, batch_size=2, shuffle=True, generator=generator)
        return [index for rank in range(2) for index in flat(shard_dataloader(plain, rank, 2))]

    assert order(1) == order(1) == order(1, num_draws=3)
    assert order(1) != order(2)
    assert order(2**63 + 5) == order(5)  # as many bits as numpy's generators take


@pytest.mark.parametrize("dataset", [range(40), DataLoader(range(40), batch_size=2, shuffle=True)])
def test_without_a_seed_that_of_the_launch_decides_the_order(dataset):
    def order(seed=None):
        arguments = {} if isinstance(dataset, DataLoader) else {"batch_size": 2, "shuffle": True}
        return flat(prepare_dataloader(dataset, dp_rank=0, dp_size=2, seed=seed, **arguments))

    before = default_seed()
    try:
        without_launch, explicit = order(), order(7)
        assert without_launch == order(1024) != explicit
        set_default_seed(7)
        assert order() == explicit
        assert order(1024) == without_launch
    finally:
        set_default_seed(before)


def test_without_a_generator_the_seed_of_the_launch_decides_the_order():
    def order(seed):
        set_default_seed(seed)
        return flat(shard_dataloader(DataLoader(range(40), batch_size=2, shuffle=True), 0, 2))

    before = default_seed()
    try:
        assert order(1) == order(1) != order(2)
        assert order(1024) == flat(prepare_dataloader(range(40), 2, dp_rank=0, dp_size=2, shuffle=True))
    finally:
        set_default_seed(before)


def test_options_of_the_plain_loader_are_kept():
    def start(worker_id):
        pass

    plain = DataLoader(
        range(12),
        batch_size=3,
        num_workers=1,
        collate_fn=double,
        worker_init_fn=start,
        timeout=30,
        prefetch_factor=3,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    split = shard_dataloader(plain, 1, 2)
    names = (
        "batch_size drop_last num_workers pin_memory collate_fn worker_init_fn timeout prefetch_factor "
        "persistent_workers multiprocessing_context dataset"
    )
    for name in names.split():
        assert getattr(split, name) is getattr(plain, name) or getattr(split, name) == getattr(plain, name)
    assert read(split) == [[6, 8, 10], [18, 20, 22]]


def test_split_loaders_come_back_unchanged():
    ours = prepare(range(8), dp_rank=1)
    own = prepare(range(8), dp_rank=1, distributed_sampler_cls=OwnSampler)
    torchs = DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 1))
    batched = DataLoader(range(8), batch_sampler=BatchSampler(DistributedSampler(range(8), 2, 1), 2, False))
    by_hand = DataLoader(range(8), batch_sampler=DistributedBatchSampler(8, 2, 1, 2))
    for one in (ours, own, torchs, batched, by_hand):
        assert shard_dataloader(one, 1, 2) is one
        with pytest.raises(ConfigError, match="sharded for rank 1 of 2, boosted on rank 0 of 4"):
            shard_dataloader(one, 0, 4)
        with pytest.raises(ConfigError, match="sharded for rank 1 of 2, boosted on rank 0 of 1"):
            shard_dataloader(one, 0, 1)
    unbatched = DataLoader(range(8), batch_size=None)
    assert shard_dataloader(unbatched, 0, 1) is unbatched


@pytest.mark.parametrize(
    ("loader", "facts"),
    [
        (
            DataLoader(range(8), 2, shuffle=True),
            ["to be split", "num_samples=8 shuffle=True seed=1024 batch_size=2 drop_last=False"],
        ),
        (
            DataLoader(Stream([1, 2]), 2),
            ["over a stream, to be split", "dataset='Stream' seed=1024 batch_size=2 drop_last=False"],
        ),
        (
            DataLoader(range(3), sampler=[2, 1]),
            ["to be split by its list", "length=2 seed=1024 batch_size=1 drop_last=False"],
        ),
        (DataLoader(range(3), batch_sampler=[[2, 1]]), ["to be split by its list", "length=1 seed=1024"]),
        (DataLoader(range(3), batch_size=None), ["left as it is", "batch_size=None drop_last=False"]),
        (
            DataLoader(range(8), 3, sampler=DistributedSampler(range(8), 2, 1, drop_last=True)),
            ["split by its DistributedSampler", "num_samples=8 shuffle=True seed=0 drop_last=True"],
        ),
        (DataLoader(range(8), 3, sampler=OwnSampler(range(8), 2, 1, True)), ["split by its OwnSampler", ""]),
    ],
)
def test_what_must_be_alike_on_all_ranks_is_what_a_loader_is_split_by(loader, facts):
    kind, values = facts
    assert loader_fingerprint(loader) == [
        f"a dataloader {kind}",
        *(f"a dataloader with {one}" for one in values.split()),
    ]


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        (DataLoader(range(8), batch_size=None), "batch_size=None"),
        (DataLoader(range(8), in_order=False), "in_order=False"),
        (OwnLoader(range(8)), r"its own _get_iterator \(OwnLoader\)"),
    ],
)
def test_what_cannot_be_split(plain, words):
    with pytest.raises(ConfigError, match=words) as caught:
        shard_dataloader(plain, 0, 2)
    assert "each would read the same data: use plugin.prepare_dataloader" in str(caught.value)


def test_subset_reads_whole_batches():
    part = Subset(list(range(100, 120)), [3, 5, 7, 9])
    assert [read(prepare(part, dp_rank=rank, num_workers=rank)) for rank in range(2)] == [[[103, 105]], [[107, 109]]]


def test_one_rank_reads_the_global_batches_of_several():
    one = shard_dataloader(DataLoader(range(11), batch_size=4, shuffle=True), 0, 1)
    two = [shard_dataloader(DataLoader(range(11), batch_size=2, shuffle=True), rank, 2) for rank in range(2)]
    joined = [torch.cat(parts).tolist() for parts in zip(*two, strict=True)]
    assert [batch.tolist() for batch in one][:2] == joined[:2]
