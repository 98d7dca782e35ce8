"""Every kind of data source under the plugins, on any number of ranks, with a checkpoint in the middle of an epoch."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import random

import pytest
import torch
import torch.distributed as dist
from data_sources import (
    DRAWN,
    NUMBERS,
    OF_RANKS,
    SAMPLERS,
    STREAMS,
    ShuffledStream,
    is_installed,
    missing_packages,
    web_loader,
    write_web_shards,
)
from harness import distributed, preload, run_ranks
from resume_cases import (
    assert_resume_is_exact,
    fsdp_plugin,
    gemini_plugin,
    hybrid_plugin,
    staged_plugin,
    zero_plugin,
)
from torch.utils.data import DataLoader, IterableDataset, Sampler
from zoo import TRANSFORMERS_MODULES

from booster import Booster
from booster.errors import ConfigError, DesyncError, RankFailedError
from booster.plugins import HybridParallelPlugin, TorchDDPPlugin

preload(*TRANSFORMERS_MODULES, "datasets", "torchdata.stateful_dataloader", "webdataset")

pytestmark = pytest.mark.on_device

SOURCES = SAMPLERS | DRAWN | STREAMS
NAMES = [name for name in (*SOURCES, "webdataset") if name != "batches" and is_installed(name)]

hybrid = functools.partial(functools.partial, HybridParallelPlugin, precision="fp32")
SEQUENCES = {"enable_sequence_parallelism": True}
# Plugin, the ranks that read the same, and the worlds.
LAYOUTS = {
    "ddp": (TorchDDPPlugin, 1, (1, 2, 4)),
    "zero 1": (functools.partial(zero_plugin, 1), 1, (1, 2, 4)),
    "zero 2": (functools.partial(zero_plugin, 2), 1, (1, 2, 4)),
    "gemini": (gemini_plugin, 1, (1, 2, 4)),
    "fsdp": (fsdp_plugin, 1, (1, 2, 4)),
    "hybrid zero": (hybrid(zero_stage=1), 1, (1, 2, 4)),
    "tp": (hybrid(tp_size=2), 2, (2, 4)),
    "tp zero": (hybrid(tp_size=2, zero_stage=2), 2, (2, 4)),
    "pp": (hybrid(pp_size=2, num_microbatches=1), 2, (2, 4)),
    "sp split_gather": (hybrid(tp_size=2, sequence_parallelism_mode="split_gather", **SEQUENCES), 2, (2, 4)),
    "sp all_to_all": (hybrid(sp_size=2, sequence_parallelism_mode="all_to_all", **SEQUENCES), 2, (2, 4)),
    "sp ring_attn": (hybrid(sp_size=2, sequence_parallelism_mode="ring_attn", **SEQUENCES), 2, (2, 4)),
    "tp pp": (hybrid(tp_size=2, pp_size=2, num_microbatches=1), 4, (4,)),
}
WORKERS = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "kept workers": {"num_workers": 2, "persistent_workers": True},
}


@contextlib.contextmanager
def _may_start_workers():
    """The ranks of the harness are daemons, which may not start processes, and these would begin by importing torch."""
    config, method = multiprocessing.current_process()._config, multiprocessing.get_start_method()
    config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        config["daemon"] = True
        multiprocessing.set_start_method(method, force=True)


def _loader(booster, name, folder, **options):
    plugin = booster.plugin
    if name in OF_RANKS:
        return booster.prepare_dataloader(OF_RANKS[name](plugin.dp_rank, plugin.dp_size, **options))
    return booster.prepare_dataloader(
        web_loader(folder, **options) if name == "webdataset" else SOURCES[name](**options)
    )


def _read(booster, batches, num_steps=None):
    """Returns the rank's batches, and what is gathered of every step."""
    own, gathered = [], []
    for batch in batches:
        own.append(torch.as_tensor(batch).view(-1).tolist())
        gathered += booster.gather_for_metrics([str(number) for number in own[-1]])
        if len(own) == num_steps:
            break
    return own, [int(number) for number in gathered]


def _batches(booster, name, loader):
    return booster.join_uneven(loader) if name in OF_RANKS else iter(loader)


def _num_steps(booster):
    return 1 if booster.plugin.dp_size > 2 else 2


def _save_in_an_epoch(layout, names, workers, folder):
    """Returns, by source, three epochs, of which the second is saved after some steps, and the data-parallel rank."""
    booster = Booster(plugin=LAYOUTS[layout][0]())
    found = {}
    with _may_start_workers():
        for name in names:
            loader = _loader(booster, name, folder, **WORKERS[workers])
            first = _read(booster, _batches(booster, name, loader))
            second = _batches(booster, name, loader)
            begun = _read(booster, second, _num_steps(booster))
            booster.save(f"{folder}/{name}", dataloader=loader)
            rest = _read(booster, second)
            third = _read(booster, _batches(booster, name, loader))
            found[name] = booster.plugin.dp_rank, first, begun, rest, third
            del loader, second  # ends kept workers
    return found


def _load_in_an_epoch(layout, names, workers, folder):
    """Returns, by source, the rest of the second epoch and the third one."""
    booster = Booster(plugin=LAYOUTS[layout][0]())
    found = {}
    with _may_start_workers():
        for name in names:
            loader = _loader(booster, name, folder, **WORKERS[workers])
            booster.load(f"{folder}/{name}", dataloader=loader)
            found[name] = tuple(_read(booster, _batches(booster, name, loader)) for _ in range(2))
            del loader
    return found


@functools.cache
def _serial(names):
    """Returns the numbers of three epochs of one process, by source."""
    (found,) = run_ranks(_read_epochs, 1, names)
    return found


def _read_epochs(names):
    booster = Booster(plugin=TorchDDPPlugin())
    loaders = {name: booster.prepare_dataloader(SOURCES[name]()) for name in names if name in SOURCES}
    return {name: [_read(booster, one)[1] for _ in range(3)] for name, one in loaders.items()} | {
        "webdataset": [NUMBERS] * 3
    }


def assert_read_once(ranks, names, num_same):
    """Checks the epochs of `_save_in_an_epoch` against one process."""
    serial = _serial(tuple(names))
    for name in names:
        of_data_ranks = {}
        for dp_rank, *epochs in (found[name] for found in ranks):
            of_data_ranks.setdefault(dp_rank, []).append(epochs)
        assert sorted(of_data_ranks) == list(range(len(ranks) // num_same)), name
        for same in of_data_ranks.values():  # ranks of one tensor, sequence or pipeline group
            assert same == [same[0]] * num_same, name
        for own in zip(*([part[0] for part in same[0]] for same in of_data_ranks.values()), strict=True):
            assert len({len(batches) for batches in own}) == 1, name
        for _, first, begun, rest, third in (found[name] for found in ranks):
            assert [first[1], begun[1] + rest[1], third[1]] == serial[name], name
            assert len(begun[1]) < len(serial[name][1]), name  # it was stopped inside the epoch


def assert_resumed(layout, world_size, names, workers, folder):
    """Saves in one world, and resumes in it, under other plugins, and on other numbers of ranks."""
    if "webdataset" in names:
        write_web_shards(folder)
    ranks = run_ranks(_save_in_an_epoch, world_size, layout, names, workers, folder, timeout=300)
    assert_read_once(ranks, names, LAYOUTS[layout][1])
    same = run_ranks(_load_in_an_epoch, world_size, layout, names, workers, folder, timeout=300)
    for found, resumed in zip(ranks, same, strict=True):
        for name in names:
            assert resumed[name] == found[name][3:], name
    others = [(layout, other) for other in LAYOUTS[layout][2] if other != world_size]
    others += [("ddp", 1)] if ("ddp", 1) not in others else []
    for other, size in others:
        for found in run_ranks(_load_in_an_epoch, size, other, names, workers, folder, timeout=300):
            for name in names:
                num_read = len(ranks[0][name][2][1])
                expected = _serial(tuple(names))[name]
                assert [part[1] for part in found[name]] == [expected[1][num_read:], expected[2]], (name, other, size)


def test_no_source_is_left_out():
    if missing := missing_packages():
        pytest.skip(f"not installed, so that the sources they are for are left out here: {', '.join(missing)}")
    assert {*NAMES, "batches"} == {*SOURCES, "webdataset"}


CASES = [(layout, size) for layout, (*_, sizes) in LAYOUTS.items() for size in sizes]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "world_size"), CASES, ids=str)
def test_an_epoch_is_read_once_and_resumed(tmp_path, layout, world_size):
    assert_resumed(layout, world_size, NAMES, "no workers", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "world_size", "workers"),
    [
        (layout, sizes[-1] if number % 2 or 2 not in sizes else 2, ("workers", "kept workers")[number % 2])
        for number, (layout, (*_, sizes)) in enumerate(LAYOUTS.items())
    ],
    ids=str,
)
def test_an_epoch_is_read_once_by_workers_and_resumed(tmp_path, layout, world_size, workers):
    assert_resumed(layout, world_size, NAMES, workers, str(tmp_path))


@pytest.mark.parametrize("name", ["counting", "stateful stream"])
def test_workers_read_each_sample_once(tmp_path, name):
    assert_resumed("zero 1", 2, [name], "kept workers", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "world_size"), [("ddp", 2), ("fsdp", 4), ("tp", 4), ("pp", 4)], ids=str)
def test_streams_that_divide_themselves_resume_on_their_rank(tmp_path, layout, world_size):
    names = [name for name in OF_RANKS if is_installed(name)]
    folder, num_same = str(tmp_path), LAYOUTS[layout][1]
    ranks = run_ranks(_save_in_an_epoch, world_size, layout, names, "no workers", folder)
    resumed = run_ranks(_load_in_an_epoch, world_size, layout, names, "no workers", folder)
    for name in names:
        for found, again in zip(ranks, resumed, strict=True):
            assert again[name] == found[name][3:], name
        for epoch in zip(*(found[name][1:] for found in ranks), strict=True):
            assert len({len(own) for own, _ in epoch}) == 1, name
            seen = sorted(number for own, _ in epoch for batch in own for number in batch)
            assert len(set(seen)) == len(seen) // num_same, name
            assert all(sorted(gathered) == seen[::num_same] for _, gathered in epoch), name
    with pytest.raises(Exception, match=r"dp_size=\d \(here 1\)"):
        run_ranks(_load_in_an_epoch, 1, "ddp", names, "no workers", folder)


@distributed(world_size=2)
def test_a_stream_that_is_split_for_other_ranks_is_an_error():
    pytest.importorskip("datasets")
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"))
    with pytest.raises(
        ConfigError, match=r"split_dataset_by_node\(rank=[01], world_size=2\) on data-parallel rank 0 of 1"
    ):
        booster.prepare_dataloader(OF_RANKS["Hugging Face's shards by node"](dist.get_rank(), 2))


TRAINED = ["buckets", "weighted", "shuffled stream", "stateful stream", "Hugging Face"]
TRAINERS = {
    "ddp": TorchDDPPlugin,
    "zero 1": functools.partial(zero_plugin, 1),
    "zero 2": functools.partial(zero_plugin, 2),
    "gemini": gemini_plugin,
    "fsdp": fsdp_plugin,
    "tp": hybrid_plugin,
    "tp zero": functools.partial(hybrid_plugin, zero_stage=1),
    "pp": functools.partial(staged_plugin, num_microbatches=1),
}


def _resume_training(path, trainer, name):
    assert_resume_is_exact(path / "c", "fp32", "mid-accumulation", TRAINERS[trainer], SOURCES[name])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", [name for name in TRAINED if name in NAMES])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_training_resumes_bit_for_bit(tmp_path, trainer, name, world_size):
    run_ranks(_resume_training, world_size, tmp_path, trainer, name)


def _boost_with(name):
    booster = Booster(plugin=TorchDDPPlugin())
    model = torch.nn.Linear(2, 2)
    loader = booster.boost(model, dataloader=SOURCES[name]())[3]
    return _read(booster, loader)[1], type(loader).__name__


@pytest.mark.parametrize("name", ["buckets", "scaling loader", "stateful stream"])
def test_boost_divides_them_too(name):
    expected = _serial((name,))[name][0]
    kind = {"buckets": "DistributedDataLoader", "scaling loader": "ScalingLoader"}.get(name, "DistributedStreamLoader")
    assert run_ranks(_boost_with, 2, name) == [(expected, kind)] * 2


class _Unlike(Sampler):  # type: ignore[type-arg]
    """Another order on every rank, whatever is seeded."""

    def __len__(self):
        return len(NUMBERS)

    def __iter__(self):
        return iter(random.SystemRandom().sample(NUMBERS, len(NUMBERS)))


class _UnlikeStream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self):
        return iter(_Unlike())


@distributed(world_size=2)
@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_orders_that_differ_between_ranks_are_an_error_on_all(kind):
    booster = Booster(plugin=TorchDDPPlugin())
    plain = DataLoader(NUMBERS, 2, sampler=_Unlike()) if kind == "sampler" else DataLoader(_UnlikeStream(), 2)
    loader = booster.prepare_dataloader(plain)
    with pytest.raises(
        DesyncError, match="digest" if kind == "sampler" else r"digest .* set dataset\.is_sharded = True"
    ):
        next(iter(loader))


class _Broken(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self):
        if dist.get_rank() == 1:
            raise OSError("no such shard")
        return iter(NUMBERS)


@distributed(world_size=2)
def test_a_stream_that_does_not_start_on_one_rank_is_an_error_on_all():
    booster = Booster(plugin=TorchDDPPlugin())
    with pytest.raises((OSError, RankFailedError), match="no such shard"):
        next(iter(booster.prepare_dataloader(_Broken(), 2)))


def _join(dp_lengths):
    booster = Booster(plugin=TorchDDPPlugin())
    stream = ShuffledStream()
    stream.is_sharded = True
    loader = booster.prepare_dataloader(stream, 2 + dist.get_rank())
    joined = [(loader.state_dict()["samples_consumed"], len(batch)) for batch in booster.join_uneven(loader)]
    scaled = booster.prepare_dataloader(SOURCES["scaling loader"]())
    states = [scaled.state_dict()["samples_consumed"] for _ in booster.join_uneven(scaled)]
    return joined, states


def test_joined_loaders_keep_their_positions():
    for rank, (joined, states) in enumerate(run_ranks(_join, 2, None)):
        assert len(joined) == 8
        assert joined[:3] == [(size * (2 + rank), 2 + rank) for size in (1, 2, 3)]
        assert states == [4, 8, 12, 16, 20, 0]


def test_an_epoch_has_each_sample_once_in_an_order_of_its_own():
    serial = _serial(tuple(name for name in NAMES if name not in DRAWN and name != "subset"))
    for name, (first, second, third) in serial.items():
        assert sorted(first) == sorted(second) == sorted(third) == NUMBERS, name
    for name in ("counting", "buckets", "shuffled stream", "stateful stream"):
        first, second, third = serial[name]
        assert first != second != third != first, name
