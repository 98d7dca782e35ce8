"""What loaders say once about an epoch that can't be spread evenly, and how many samples each rank repeats."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from booster.data import DistributedBatchSampler, prepare_dataloader
from booster.logger import get_dist_logger


class Unequal(Sampler):
    """Every rank's slice as it is: some have one more."""

    def __init__(self, dataset, num_replicas, rank, shuffle):
        self.indices = range(rank, len(dataset), num_replicas)

    def __len__(self):
        return len(self.indices)

    def __iter__(self):
        return iter(self.indices)


class Stream(IterableDataset):
    is_sharded = True

    def __iter__(self):
        return iter(range(3))


@pytest.fixture
def said(monkeypatch):
    texts = []
    monkeypatch.setattr(get_dist_logger("booster.data"), "info", lambda text, ranks: texts.append((text, ranks)))
    return texts


def _said_by(said, dataset, dp_size=2, **options):
    said.clear()
    prepare_dataloader(dataset, 2, dp_rank=0, dp_size=dp_size, **options)
    assert all(ranks == [0] for _, ranks in said)
    return [text for text, _ in said]


@pytest.mark.parametrize(
    ("length", "options", "words"),
    [
        (8, {}, None),
        (8, {"distributed_sampler_cls": DistributedSampler}, None),
        (7, {}, "every epoch repeats 1 at its end"),
        (7, {"drop_last": True}, "every epoch drops the last 3 of its order"),
        (7, {"distributed_sampler_cls": DistributedSampler}, "gives rank 0 of 2 4 samples of 7"),
        (7, {"distributed_sampler_cls": Unequal}, "read them with booster.join_uneven(loader)"),
        (6, {"distributed_sampler_cls": Unequal, "drop_last": True}, "of which drop_last=True drops the last 1"),
    ],
)
def test_what_an_epoch_repeats_or_drops_is_said_once(said, length, options, words):
    texts = _said_by(said, torch.arange(length), **options)
    assert len(texts) == (words is not None)
    assert all(words in text for text in texts)


def test_a_dataset_that_splits_itself_is_said_to_count_for_itself(said):
    assert _said_by(said, Stream(), dp_size=1) == []
    (text,) = _said_by(said, Stream(), dp_size=2)
    assert text.startswith("Stream shards itself over 2 ranks, possibly unevenly: if some ranks may get fewer batches")


def test_an_epoch_that_goes_on_otherwise_says_so(said):
    """3 batches of 2 samples leave 5 of 11: for 2 or 3 ranks as many are repeated as in every epoch, for 4 more."""
    one = prepare_dataloader(torch.arange(11), 2, dp_rank=0, dp_size=1)
    batches = iter(one)
    for _ in range(3):
        next(batches)
    state = one.state_dict()
    expected = {2: None, 3: None, 4: "the epoch resumed after 6 samples repeats 3 at its end"}
    for dp_size, words in expected.items():
        several = prepare_dataloader(torch.arange(11), 2, dp_rank=0, dp_size=dp_size)
        said.clear()
        several.load_state_dict(state)
        texts = [text for text, _ in said if "batch of all ranks" not in text]
        assert len(texts) == (words is not None), dp_size
        assert all(words in text for text in texts)


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
def test_repeats_of_the_ranks_are_those_of_the_whole_batch(length, dp_size):
    ranks = [DistributedBatchSampler(length, 2, rank, dp_size) for rank in range(dp_size)]
    position = 0
    while ranks[0].num_batches(position):
        places = [rank.batch_at(position) for rank in ranks]
        repeated = [place.num_repeated_local for place in places]
        assert sum(repeated) == places[0].num_repeated
        # Real samples first, in rank order: a rank that lacks one has only repeats behind it.
        flat = [i < place.num_samples - place.num_repeated_local for place in places for i in range(place.num_samples)]
        assert flat == sorted(flat, reverse=True)
        position = places[0].stop


def test_a_resume_with_another_batch_of_all_ranks_says_so(said):
    state = prepare_dataloader(range(24), 4, dp_rank=0, dp_size=2).state_dict()
    for batch_size, dp_size in ((4, 2), (2, 4), (8, 1)):
        prepare_dataloader(range(24), batch_size, dp_rank=0, dp_size=dp_size).load_state_dict(state)
    assert said == []
    prepare_dataloader(range(24), 4, dp_rank=0, dp_size=3).load_state_dict(state)
    assert len(said) == 1
    assert "12 samples in a batch of all ranks, and the checkpoint had 8" in said[0][0]
    assert said[0][1] == [0]


def test_a_resume_with_the_seed_of_the_checkpoint_says_so(said):
    def make(seed, **options):
        return prepare_dataloader(range(24), 4, dp_rank=0, dp_size=2, seed=seed, **options)

    for options in ({"shuffle": True}, {"shuffle": False}):
        state = make(3, **options).state_dict()
        make(3, **options).load_state_dict(state)
        assert said == []
        loader = make(7, **options)
        loader.load_state_dict(state)
        assert loader.state_dict()["seed"] == 3
        assert [ranks for _, ranks in said] == [[0]]
        assert "continues with seed=3 of the checkpoint, and this loader was made with seed=7" in said[0][0]
        said.clear()
