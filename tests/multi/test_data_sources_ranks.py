"""Users' samplers, loader classes and streams under the plugins, with a checkpoint in the middle of an epoch."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from data_sources import DRAWN, NUMBERS, SAMPLERS, STREAMS, ShuffledStream, package_of
from harness import distributed, preload, run_ranks
from resume_cases import gemini_plugin, zero_plugin
from torch.utils.data import DataLoader, IterableDataset, Sampler
from zoo import TRANSFORMERS_MODULES

from booster import Booster
from booster.errors import DesyncError, RankFailedError
from booster.plugins import HybridParallelPlugin, TorchDDPPlugin

preload(*TRANSFORMERS_MODULES)
SOURCES = SAMPLERS | DRAWN | STREAMS
NAMES = ["weighted", "buckets", "counting", "scaling loader", "shuffled stream", "stateful stream"]
PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero": functools.partial(zero_plugin, 1),
    "gemini": gemini_plugin,
    "tp": functools.partial(HybridParallelPlugin, tp_size=2, precision="fp32"),
    "pp": functools.partial(HybridParallelPlugin, pp_size=2, num_microbatches=1, precision="fp32"),
}


def _read(booster, loader, num_steps=None):
    """Returns the rank's batches, and what is gathered of every step."""
    own, gathered = [], []
    for batch in loader:
        own.append(batch.tolist())
        gathered += booster.gather_for_metrics([str(number) for number in batch.tolist()])
        if len(own) == num_steps:
            break
    return own, [int(number) for number in gathered]


def _save_in_an_epoch(plugin, names, folder):
    booster = Booster(plugin=PLUGINS[plugin]())
    found = {}
    for name in names:
        loader = booster.prepare_dataloader(SOURCES[name]())
        first = _read(booster, loader)
        begun = _read(booster, loader, 2)
        booster.save(f"{folder}/{name}", dataloader=loader)
        unstopped = booster.prepare_dataloader(SOURCES[name]())
        _read(booster, unstopped)
        found[name] = first, begun, _read(booster, unstopped), booster.plugin.dp_rank
    return found


def _load_in_an_epoch(plugin, names, folder):
    booster = Booster(plugin=PLUGINS[plugin]())
    found = {}
    for name in names:
        loader = booster.prepare_dataloader(SOURCES[name]())
        booster.load(f"{folder}/{name}", dataloader=loader)
        found[name] = _read(booster, loader)
    return found


CASES = [("ddp", 3), ("zero", 2), ("gemini", 2), ("tp", 4), ("pp", 4)]


@pytest.mark.parametrize(("plugin", "world_size"), CASES, ids=str)
def test_an_epoch_is_read_once_and_resumed(tmp_path, plugin, world_size):
    names = NAMES
    serial = _serial(names)
    ranks = run_ranks(_save_in_an_epoch, world_size, plugin, names, str(tmp_path))
    for name in names:
        whole, second = serial[name]
        for first, begun, unstopped, _ in (found[name] for found in ranks):
            assert first[1] == whole, name
            assert unstopped[1] == second, name
            assert begun[0] == unstopped[0][:2], name
        of_data_ranks = {}
        for found in ranks:  # ranks of one tensor or pipeline group read the same
            of_data_ranks.setdefault(found[name][3], []).append(found[name][:3])
        assert all(one == same[0] for same in of_data_ranks.values() for one in same)
        assert len(of_data_ranks) == (world_size if plugin in ("ddp", "zero", "gemini") else world_size // 2)
    same = run_ranks(_load_in_an_epoch, world_size, plugin, names, str(tmp_path))
    other = run_ranks(_load_in_an_epoch, 1, "ddp", names, str(tmp_path))
    for name in names:
        for found, resumed in zip(ranks, same, strict=True):
            assert resumed[name][0] == found[name][2][0][2:], name
        num_read = len(ranks[0][name][1][1])
        assert other[0][name][1] == serial[name][1][num_read:], name


def _serial(names):
    """Returns the numbers of two epochs of one process."""
    (found,) = run_ranks(_read_epochs, 1, names)
    return found


def _read_epochs(names):
    booster = Booster(plugin=TorchDDPPlugin())
    loaders = {name: booster.prepare_dataloader(SOURCES[name]()) for name in names}
    return {name: (_read(booster, one)[1], _read(booster, one)[1]) for name, one in loaders.items()}


def _boost_with(name):
    booster = Booster(plugin=TorchDDPPlugin())
    model = torch.nn.Linear(2, 2)
    loader = booster.boost(model, dataloader=SOURCES[name]())[3]
    return _read(booster, loader)[1], type(loader).__name__


@pytest.mark.parametrize("name", ["buckets", "scaling loader", "stateful stream"])
def test_boost_divides_them_too(name):
    expected = _serial([name])[name][0]
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
    with pytest.raises(DesyncError, match="digest"):
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


def test_the_union_is_the_dataset():
    for whole, second in _serial(["counting", "buckets", "shuffled stream", "stateful stream"]).values():
        assert sorted(whole) == sorted(second) == NUMBERS
        assert whole != second
    assert torch.equal(torch.tensor(_serial(["stream"])["stream"][0]), torch.tensor(NUMBERS))


# The ranks of the harness are daemons, which may not start the workers of a loader.
WITH_WORKERS = """
import sys
sys.path.insert(0, sys.argv[1])
from data_sources import NUMBERS, SAMPLERS, STREAMS
from booster import Booster, launch_from_torch

launch_from_torch(verbose=False)
booster = Booster(plugin="torch_ddp")


def read(loader, num_steps=None):
    seen = []
    for step, batch in enumerate(loader, start=1):
        seen += booster.gather_for_metrics(batch).tolist()
        if step == num_steps:
            break
    return seen


for name in sys.argv[2:]:
    for workers in (0, 2):
        make = lambda workers: booster.prepare_dataloader((SAMPLERS | STREAMS)[name](num_workers=workers))
        loader, begun, resumed = make(workers), make(workers), make(2 - workers)
        whole = read(loader)
        assert sorted(whole) == NUMBERS, (name, workers, whole)
        first = read(begun, 2)
        resumed.load_state_dict(begun.state_dict())
        assert first + read(resumed) == whole, (name, workers)
booster.print("each sample once")
"""


@pytest.mark.parametrize(
    "names", [["counting", "stateful stream"], ["Hugging Face", "Hugging Face shuffled"]], ids=" and ".join
)
def test_workers_read_each_sample_once(names, tmp_path):
    if package_of(names[0]) is not None:
        pytest.importorskip(package_of(names[0]))
    (tmp_path / "train.py").write_text(WITH_WORKERS)
    cases = str(Path(__file__).parents[1] / "cases")
    command = [sys.executable, "-m", "booster", "run", "--nproc-per-node", "2", "train.py", cases, *names]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each sample once" in done.stdout
