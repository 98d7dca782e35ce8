"""`join_uneven` ends all ranks' loops together, and `gather_for_metrics` joins whatever numbers of rows they have."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from data_sources import active_loader
from harness import distributed, run_ranks
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from booster import Booster
from booster.comm import count_communication
from booster.data import prepare_dataloader
from booster.data.dataloader import active_position
from booster.device import current_device
from booster.errors import ConfigError, DesyncError, RankFailedError
from booster.logger import get_dist_logger
from booster.plugins import HybridParallelPlugin, TorchDDPPlugin

pytestmark = pytest.mark.on_device


def _booster():
    return Booster(plugin=TorchDDPPlugin())


def _said(monkeypatch):
    """Returns a list that what rank 0 logs about data comes into."""
    said = []

    def note(text, ranks=None):
        assert ranks == [0]
        if dist.get_rank() == 0:
            said.append(text)

    for level in ("info", "warning"):
        monkeypatch.setattr(get_dist_logger("booster.data"), level, note)
    return said


# A common stop.


class Stream(IterableDataset):
    is_sharded = True

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


SOURCES = {
    "list": lambda length: list(range(length)),
    "generator": lambda length: (i for i in range(length)),
    "torch loader": lambda length: DataLoader(torch.arange(length), batch_size=None),
    "stream": lambda length: prepare_dataloader(
        Stream(length), None, dp_rank=dist.get_rank(), dp_size=dist.get_world_size()
    ),
    "own loader": lambda length: prepare_dataloader(torch.arange(length), 1, dp_rank=0, dp_size=1),
}
LENGTHS = [(3,), (0,), (4, 4), (4, 3), (0, 2), (1, 5), (0, 0), (5, 2, 2), (3, 4, 1, 3), (1, 0, 1, 1)]


def _walk_all(lengths):
    return {source: _walk(source, lengths) for source in SOURCES}


def _walk(source, lengths):
    """Returns the batches, whether each was the last one, and what was logged; of each of two epochs the same."""
    with pytest.MonkeyPatch.context() as patch:
        said = _said(patch)
        booster = _booster()
        epochs = []
        for _ in range(2):
            if source == "own loader" and lengths[dist.get_rank()] == 0:
                mine = []  # such a loader can't be made
            else:
                mine = SOURCES[source](lengths[dist.get_rank()])
            said.clear()
            batches, lasts = [], []
            for batch in booster.join_uneven(mine):
                batches.append(int(batch))
                lasts.append(active_position().is_last)
            assert active_position() is None
            epochs.append((batches, lasts, list(said)))
    assert epochs[0] == epochs[1]
    return epochs[0]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_all_ranks_stop_after_the_last_batch_that_each_has(lengths):
    results = run_ranks(_walk_all, len(lengths), lengths)
    common = min(lengths)
    short = [str(rank) for rank, length in enumerate(lengths) if length == common]
    ranks = f"{'rank' if len(short) == 1 else 'ranks'} {', '.join(short)}"
    end = f"after {common} batches on each rank: {ranks} had no more" if common else f"before the first batch: {ranks}"
    for source in SOURCES:
        for found in results:
            batches, lasts, _ = found[source]
            assert batches == list(range(common)), source
            assert lasts == [i == common - 1 for i in range(common)], source
        texts = [text for text in results[0][source][2] if "join_uneven() ends" in text]
        assert len(texts) == (len(set(lengths)) > 1), source
        assert all(f"join_uneven() ends {end}" in text for text in texts), source


def test_a_loop_in_one_process_is_left_as_it_is():
    booster = Booster(device="cpu")
    assert list(booster.join_uneven(iter("abc"))) == ["a", "b", "c"]
    assert [active_position().is_last for _ in booster.join_uneven(range(3))] == [False, False, True]


def _cost_of_a_batch():
    booster = _booster()
    with count_communication() as count:
        joined = booster.join_uneven(range(3))
        assert list(joined) == [0, 1, 2]
        assert next(joined, None) is None  # an iterator that has ended stays so, without asking others
    return count.calls


def test_a_batch_costs_one_sum():
    for calls in run_ranks(_cost_of_a_batch, 2):
        assert dict(calls) == {"all_reduce": 3}


def _accumulate(lengths):
    """Returns after which batches a step ended, and the weight."""
    booster = _booster()
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ended = []
    mine = ((i + dist.get_rank()) * _ones(1, 2) for i in range(lengths[dist.get_rank()]))
    for index, batch in enumerate(booster.join_uneven(mine)):
        with booster.accumulate(model, optimizer, steps=2) as is_last:
            booster.backward(model(batch).sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        if is_last:
            ended.append(index)
    return ended, model.unwrap().weight.detach().clone()


def test_the_last_common_batch_ends_a_step():
    torch.manual_seed(0)
    expected = nn.Linear(2, 1, bias=False).weight.detach().clone()
    for means in ((0.5, 1.5), (2.5,)):  # of the microbatches of a step; batch i of rank r is full of i + r
        expected -= 0.1 * sum(means) / len(means)
    for ended, weight in run_ranks(_accumulate, 2, (3, 5)):
        assert ended == [1, 2]
        torch.testing.assert_close(weight, expected)


def _fail_on_rank_1(kind, error_class):
    def batches():
        yield 0
        yield 1
        if dist.get_rank() == 1:
            raise error_class("the disk is gone")
        yield 2
        yield 3

    class Exhausted:
        def __iter__(self):
            return next(iter([]))

    seen = []
    others = {"no iterable": 7, "exhausted": Exhausted()}
    mine = others[kind] if kind in others and dist.get_rank() == 1 else batches()
    joined = _booster().join_uneven(mine)
    with pytest.raises((error_class, ConfigError, RankFailedError)) as caught:
        seen.extend(joined)
    dist.barrier()  # the group is whole, and all ranks have come out together
    return seen, type(caught.value).__name__, str(caught.value)


def test_an_iterator_that_fails_on_one_rank_fails_on_all():
    """Behind the batches that all had."""
    results = run_ranks(_fail_on_rank_1, 3, "raises", OSError)
    assert all(seen == [0, 1] for seen, _, _ in results)
    assert results[1][1:] == ("OSError", "the disk is gone")
    for rank in (0, 2):
        assert results[rank][1] == RankFailedError.__name__
        assert results[rank][2] == f"rank 1 failed, so rank {rank} stops too: OSError: the disk is gone"
    results = run_ranks(_fail_on_rank_1, 2, "raises", ConfigError)
    assert [name for _, name, _ in results] == ["ConfigError", "ConfigError"]


def test_what_is_no_iterable_on_one_rank_is_an_error_on_all():
    results = run_ranks(_fail_on_rank_1, 2, "no iterable", OSError)
    assert [name for _, name, _ in results] == ["ConfigError", "ConfigError"]
    assert "join_uneven() was given a int, which is not iterable: give it" in results[1][2]


def test_an_iterable_that_raises_stop_iteration_at_its_start_is_no_end():
    results = run_ranks(_fail_on_rank_1, 2, "exhausted", RuntimeError)
    assert [name for _, name, _ in results] == ["RankFailedError", "RuntimeError"]
    assert "Exhausted.__iter__ raised StopIteration" in results[1][2]


@distributed(world_size=2)
def test_what_was_read_from_is_let_go():
    ended = []

    def batches(length):
        try:
            yield from range(length)
        finally:
            ended.append(length)

    booster = _booster()
    assert len(list(booster.join_uneven(batches(2 + 3 * dist.get_rank())))) == 2
    assert ended == [2 + 3 * dist.get_rank()]
    for _ in booster.join_uneven(batches(7)):
        break
    assert ended[1:] == [7]
    assert active_position() is None
    lines = iter(["a", "b", "c"])
    weak = weakref.ref(booster.join_uneven(lines))
    assert weak() is None


@distributed(world_size=2)
def test_a_loader_of_ours_keeps_its_own_position():
    """It is not read ahead, and a pass that ends early for all has ended for its state, too."""
    rank = dist.get_rank()
    loader = prepare_dataloader(torch.arange(4 + 2 * rank), 2, dp_rank=0, dp_size=1)
    states = [
        (loader.state_dict()["samples_consumed"], active_loader() is loader) for _ in _booster().join_uneven(loader)
    ]
    assert states == [(2, True), (0, True)]
    assert loader.state_dict()["epoch"] == 1
    assert next(iter(loader)).tolist() == [0, 1]


@distributed(world_size=2)
def test_loops_within_loops():
    booster, rank = _booster(), dist.get_rank()
    seen = []
    for _ in range(2):
        for batch in booster.join_uneven(range(2 + rank)):
            inner = [(i, active_position().is_last) for i in booster.join_uneven(iter(range(3 - rank)))]
            seen.append((batch, active_position().is_last, len(inner), inner[-1][1]))
    assert seen == [(0, False, 2, True), (1, True, 2, True)] * 2
    assert [a + b for a, b in booster.join_uneven(zip(range(3), booster.join_uneven([5] * (3 - rank)), strict=False))]


def _pipeline_batches(arguments):
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **arguments))
    # Ranks that share a batch read the same: by data part, of which the second has more.
    mine = iter(booster.join_uneven([torch.full((1,), float(i)) for i in range(3 + booster.plugin.dp_rank)]))
    return [float(batch) for batch in mine]


@pytest.mark.parametrize("arguments", [{"tp_size": 2}, {"pp_size": 2, "num_microbatches": 1}], ids=str)
def test_ranks_that_share_batches_take_part(arguments):
    assert run_ranks(_pipeline_batches, 4, arguments) == [[0.0, 1.0, 2.0]] * 4


# Metrics.


def _rows(rank, num_rows, dtype, row_shape=(3,)):
    count = num_rows * int(torch.tensor(row_shape).prod()) if row_shape else num_rows
    values = torch.arange(count, device=current_device()).reshape(num_rows, *row_shape) + 10 * rank
    return (values % 2 == 0) if dtype is torch.bool else values.to(dtype)


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int64)
DTYPES += (torch.complex64, torch.float8_e5m2)
COUNTS = [(3, 3), (3, 1), (0, 2), (2, 0), (0, 0), (1, 0, 4), (7, 0, 2, 7)]


def _gather_all(counts):
    booster, rank = _booster(), dist.get_rank()
    for dtype in DTYPES:
        for row_shape in ((), (3,), (2, 1), (0,)):
            expected = torch.cat([_rows(r, count, dtype, row_shape).float() for r, count in enumerate(counts)])
            found = booster.gather_for_metrics(_rows(rank, counts[rank], dtype, row_shape))
            assert found.dtype is dtype
            assert torch.equal(found.float(), expected), (dtype, row_shape)
    nested = booster.gather_for_metrics(
        {
            "rows": [_rows(rank, counts[rank], torch.int64).t().contiguous().t(), "text"],
            "rank": torch.tensor(rank, dtype=torch.int32, device=current_device()),
            "loss": torch.tensor([float(rank)], requires_grad=True, device=current_device()),
        }
    )
    assert nested["rows"][1] == "text"
    assert torch.equal(nested["rows"][0], torch.cat([_rows(r, n, torch.int64) for r, n in enumerate(counts)]))
    assert nested["rank"].tolist() == nested["loss"].tolist() == list(range(len(counts)))
    assert not nested["loss"].requires_grad


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_of_any_number_and_type_are_joined(counts):
    run_ranks(_gather_all, len(counts), counts)


@distributed(world_size=3)
def test_a_rank_without_a_batch_brings_an_empty_tensor():
    rank = dist.get_rank()
    mine = _ones(0) if rank == 1 else rank * _ones(1, 2, dtype=torch.int64)
    assert _booster().gather_for_metrics(mine).tolist() == [[0, 0], [2, 2]]


def _ones(*shape, dtype=None):
    return torch.ones(*shape, dtype=dtype, device=current_device())


def _gather_different(case):
    rank = dist.get_rank()
    data = {
        "rows": _ones(2, 3 + (rank == 1)),
        "dtype": _ones(2, dtype=torch.float16 if rank == 1 else torch.float32),
        "structure": [_ones(1)] * (1 + (rank == 1)),
        "no tensor": {} if rank == 1 else {"accuracy": _ones(1)},
        "kind": ["a"] if rank == 1 else _ones(0),
        "objects": [range(2)] if rank == 1 else ["a"],
        "sparse": torch.ones(2, 2).to_sparse() if rank == 1 else _ones(2, 2),
    }[case]
    booster = _booster()
    with pytest.raises((DesyncError, ConfigError)) as caught:
        booster.gather_for_metrics(data)
    assert booster.gather_for_metrics(_ones(rank)).numel() == 3  # the ranks are still together
    return type(caught.value).__name__, str(caught.value)


DESYNC_WORDS = {
    "rows": "ranks 0, 2 passed float32 with rows of shape (3,), rank 1 passed float32 with rows of shape (4,)",
    "dtype": "ranks 0, 2 passed float32 with rows of shape (), rank 1 passed float16",
    "kind": "ranks 0, 2 passed float32 with rows of shape (), rank 1 passed a list without tensors",
    "structure": "different numbers of tensors and lists: ranks 0, 2 passed 1, rank 1 passed 2",
}


def _gather_all_different():
    return {case: _gather_different(case) for case in (*DESYNC_WORDS, "no tensor", "objects", "sparse")}


def test_what_can_not_be_joined_is_an_error_on_all_ranks():
    results = run_ranks(_gather_all_different, 3)
    for case, words in DESYNC_WORDS.items():
        assert len({found[case] for found in results}) == 1
        name, text = results[0][case]
        assert (name, words in text) == ("DesyncError", True), text
    assert "cannot send a list's objects: object 0 is a builtins.range" in results[1]["objects"][1]
    for case in ("no tensor", "sparse"):
        assert [found[case][0] for found in results] == ["ConfigError"] * 3
        assert results[0][case][1].startswith("rank 1 failed, so rank 0 stops too: gather_for_metrics() was given a")


def _other_call():
    booster = _booster()
    call, given = (booster.boost, nn.Linear(1, 1)) if dist.get_rank() == 0 else (booster.gather_for_metrics, _ones(1))
    with pytest.raises(DesyncError) as caught:
        call(given)
    return str(caught.value)


def test_a_rank_that_gathers_while_another_boosts_is_told():
    for text in run_ranks(_other_call, 2):
        assert "gather_for_metrics()" in text
        assert "boost()" in text


def _gather_each_sample(length, batch_size):
    booster = _booster()
    return [_each_sample(booster, length, batch_size, joins) for joins in ("no", "loader", "generator")]


def _each_sample(booster, length, batch_size, joins):
    loader = booster.prepare_dataloader(torch.arange(length), batch_size)
    if joins == "loader":
        batches = booster.join_uneven(loader)
    elif joins == "generator":  # reads ahead: the repeats are those of the batch in hand all the same
        batches = booster.join_uneven(batch * 1 for batch in loader)
    else:
        batches = loader
    return torch.cat([booster.gather_for_metrics(batch) for batch in batches]).tolist()


@pytest.mark.parametrize(("length", "batch_size", "world_size"), [(11, 2, 2), (11, 2, 3), (5, 4, 4), (1, 3, 3)])
def test_repeats_of_our_loaders_are_left_out(length, batch_size, world_size):
    """As they are, joined, and read ahead."""
    for gathered in run_ranks(_gather_each_sample, world_size, length, batch_size):
        assert gathered == [list(range(length))] * 3


OBJECTS = [0, "a text", [1] * 5, [], {"span": (2, 3)}, None, float("inf"), True, b"raw", {7: [1.5, "\ud800"]}]


def _object_of(index):
    return [index, OBJECTS[index % len(OBJECTS)]]


def _gather_objects(length, batch_size, num_workers):
    booster = _booster()
    loader = booster.prepare_dataloader(torch.arange(length), batch_size, num_workers=num_workers)
    gathered = [
        booster.gather_for_metrics({"texts": [_object_of(i) for i in batch.tolist()], "ids": [batch, "left as it is"]})
        for batch in loader
    ]
    assert all(found["ids"][1] == "left as it is" for found in gathered)
    assert [i for found in gathered for i, _ in found["texts"]] == torch.cat([f["ids"][0] for f in gathered]).tolist()
    return [one for found in gathered for one in found["texts"]]


@pytest.mark.parametrize(("length", "batch_size", "world_size"), [(11, 2, 2), (13, 3, 4), (1, 3, 3), (5, 2, 1)])
def test_objects_of_each_sample_are_gathered_once(length, batch_size, world_size):
    for gathered in run_ranks(_gather_objects, world_size, length, batch_size, 0):
        assert gathered == [_object_of(i) for i in range(length)]


@distributed(world_size=3)
def test_a_rank_without_samples_brings_an_empty_list():
    rank, booster = dist.get_rank(), _booster()
    assert booster.gather_for_metrics([] if rank == 1 else ["x", rank]) == ["x", 0, "x", 2]
    assert booster.gather_for_metrics([]) == []
    equal = booster.gather_for_metrics([["same"]])
    assert equal == [["same"]] * 3
    equal[0].append("own")  # ranks' equal objects are different ones
    assert equal[1] == ["same"]


def _gather_own_tail(lengths):
    """The ranks' own loaders of their own data, with another number of samples in the last batch of each."""
    booster, rank = _booster(), dist.get_rank()
    mine = torch.arange(lengths[rank], device=current_device()) + 100 * rank
    num_batches = max(-(-length // 3) for length in lengths)
    batches = [*mine.split(3), *[_ones(0)] * num_batches][:num_batches]
    return torch.cat([booster.gather_for_metrics(batch) for batch in batches]).sort().values.tolist()


@pytest.mark.parametrize("lengths", [(7, 5), (4, 9, 1), (3, 3)], ids=str)
def test_an_evaluation_over_uneven_parts_sees_each_sample_once(lengths):
    expected = [100 * rank + i for rank, length in enumerate(lengths) for i in range(length)]
    for gathered in run_ranks(_gather_own_tail, len(lengths), lengths):
        assert gathered == expected


def _cost_of_gathering(counts):
    booster = _booster()
    mine = _ones(counts[dist.get_rank()])
    booster.gather_for_metrics(mine)
    with count_communication() as count:
        booster.gather_for_metrics([mine, mine])
    return dict(count.calls)


def test_gathering_costs_one_small_message_and_one_of_each_tensor():
    assert run_ranks(_cost_of_gathering, 2, (3, 3)) == [{"all_gather": 3}] * 2
