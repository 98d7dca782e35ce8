"""Worker processes: same samples, same augmentation, whatever their number and wherever the run was stopped."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from booster.data import prepare_dataloader
from booster.data.worker_seeding import may_draw


class Augmented(Dataset):
    """Sample i is i and three random numbers, one of each kind."""

    opened = False

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return [index, random.random(), float(np.random.rand()), torch.rand(1).item()]


class Batchwise(Augmented):
    """The same, read by whole batches only."""

    def __getitem__(self, index):
        raise AssertionError("__getitems__ is there to be used")

    def __getitems__(self, indices):
        assert isinstance(indices, list)
        return [Augmented.__getitem__(self, index) for index in indices]


def as_rows(samples):
    return [tuple(sample) for sample in samples]


def loader(dataset=None, *, dp_rank=0, dp_size=1, batch_size=2, num_workers=2, **options):
    options = {"shuffle": True, "collate_fn": as_rows} | options
    return prepare_dataloader(
        dataset or Augmented(), batch_size, dp_rank=dp_rank, dp_size=dp_size, num_workers=num_workers, **options
    )


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_what_the_main_process_reads(persistent):
    main, workers = loader(num_workers=0), loader(persistent_workers=persistent)
    for _ in range(3):
        assert [[row[0] for row in batch] for batch in workers] == [[row[0] for row in batch] for batch in main]


@pytest.mark.parametrize("kind", [Augmented, pytest.param(Batchwise, marks=pytest.mark.slow)])
def test_augmentation_does_not_depend_on_the_number_of_workers(kind):
    two, one = loader(kind()), loader(kind(), num_workers=1, persistent_workers=True)
    epochs = [list(two), list(two)]
    assert epochs == [list(one), list(one)]
    rows = [row for epoch in epochs for batch in epoch for row in batch]
    for column in (1, 2, 3):
        assert len({row[column] for row in rows}) == 22  # no two samples, and no two epochs of one, are alike


@pytest.mark.parametrize("kind", [pytest.param(Augmented, marks=pytest.mark.slow), Batchwise])
def test_augmentation_is_the_same_after_going_on_inside_an_epoch(kind):
    unstopped = loader(kind())
    first, second = list(unstopped), list(unstopped)
    stopped = loader(kind())
    for index, _ in enumerate(stopped):
        if index == 2:
            state = stopped.state_dict()
            break
    assert state["samples_consumed"] == 6  # not what workers have read ahead
    resumed = loader(kind(), num_workers=1)
    resumed.load_state_dict(state)
    assert list(resumed) == first[3:]
    assert list(resumed) == second


def test_augmentation_is_that_of_a_serial_run():
    serial = {row[0]: row for batch in loader(batch_size=4) for row in batch}
    ranks = [list(loader(dp_rank=rank, dp_size=2, num_workers=1)) for rank in range(2)]
    whole = [row for parts in zip(*ranks, strict=True) for part in parts for row in part]
    assert whole[:11] == [serial[row[0]] for row in whole[:11]]
    assert len({row[1] for row in whole}) == 12  # the repeated sample is augmented anew


def test_main_process_keeps_its_random_states():
    for num_workers in (0, 2):
        one = loader(range(6), num_workers=num_workers, collate_fn=list)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        assert sum(len(batch) for batch in one) == 6
        assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_main_process_augments_as_workers_do_and_keeps_its_random_states():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert list(loader(num_workers=0)) == list(loader(num_workers=2))
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_draw_different_numbers(num_workers):
    ranks = [list(loader(dp_rank=rank, dp_size=2, num_workers=num_workers)) for rank in range(2)]
    drawn = [{row[3] for batch in batches for row in batch} for batches in ranks]
    assert drawn[0].isdisjoint(drawn[1])


def test_a_collate_function_that_draws_is_seeded_too():
    def draw(samples):
        return torch.rand(1).item()

    ranks = [list(loader(range(8), dp_rank=rank, dp_size=2, num_workers=0, collate_fn=draw)) for rank in range(2)]
    assert len({*ranks[0], *ranks[1]}) == len(ranks[0]) + len(ranks[1])
    assert ranks[0] == list(loader(range(8), dp_rank=0, dp_size=2, num_workers=1, collate_fn=draw))


def test_what_draws_nothing_is_not_seeded():
    tensors = TensorDataset(torch.arange(4))
    for plain in (tensors, Subset(tensors, [0, 1]), ConcatDataset([tensors, tensors]), [1, 2]):
        assert not may_draw(plain, default_collate)
        assert may_draw(plain, list)
    assert may_draw(Augmented(), default_collate)
    assert may_draw(ConcatDataset([tensors, Augmented()]), default_collate)


def test_users_functions_see_the_users_dataset():
    def start(worker_id):
        info = get_worker_info()
        assert type(info.dataset) is Augmented
        info.dataset.opened = worker_id + 1

    def show_opened(samples):
        return get_worker_info().dataset.opened, len(samples)

    dataset = Augmented()
    one = loader(dataset, worker_init_fn=start, collate_fn=show_opened)
    assert one.dataset is dataset
    assert list(one) == [(1, 2), (2, 2), (1, 2), (2, 2), (1, 2), (2, 1)]
    assert dataset.opened is False


def test_worker_start_seeds_differ_by_rank_and_epoch():
    def seeds(samples):
        return get_worker_info().seed

    starts = []
    for rank in range(2):
        one = loader(dp_rank=rank, dp_size=2, num_workers=1, collate_fn=seeds)
        starts += [next(iter(one)), next(iter(one))]
    assert len(set(starts)) == 4


def test_persistent_workers_nested_abandoned_and_resumed():
    def indices(batches):
        return [[row[0] for row in batch] for batch in batches]

    plain = loader(num_workers=0)
    epochs = [indices(plain) for _ in range(5)]
    one = loader(persistent_workers=True, num_workers=1)
    outer = []
    for batch in one:
        outer.append(batch)
        if len(outer) == 2:
            assert indices(one) == epochs[1]
    assert indices(outer) == epochs[0]
    for _ in one:
        break
    assert indices(one) == epochs[3]
    one.load_state_dict(one.state_dict() | {"epoch": 2, "samples_consumed": 4})
    assert indices(one) == epochs[2][2:]
    assert indices(one) == epochs[3]


def test_users_generator_advances_once_an_epoch_also_with_persistent_workers():
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    for generator, persistent in zip(generators, (False, True), strict=True):
        one = loader(num_workers=1, persistent_workers=persistent, generator=generator)
        assert len(list(one)) == len(list(one)) == 6
    assert torch.equal(generators[0].get_state(), generators[1].get_state())
    once = torch.Generator().manual_seed(1)
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_(generator=once)
    assert torch.equal(generators[0].get_state(), once.get_state())


def test_a_workers_error_comes_through():
    class Broken(Augmented):
        def __getitem__(self, index):
            raise OSError("no such picture")

    with pytest.raises(OSError, match="no such picture"):
        next(iter(loader(Broken(), num_workers=1)))
