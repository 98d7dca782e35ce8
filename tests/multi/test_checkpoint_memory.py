"""Memory that a save or a load takes on top of the state itself: bounded, however large the state is.

Counted by the kernel, as the most pages that a process had (VmHWM), in processes that give freed memory back at once;
no timing and no sampling, so nothing is missed however short it lives.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from safetensors.torch import load_file, save_file
from sliced_model import LAYOUTS, SlicedModel, logical_values
from torch import nn

MIB = 2**20
# 64 MiB and one staging buffer.
BOUND_BYTES = 80 * MIB
SMALL = {"odd": (1021, 1013), "wide": (4096, 6144), "bias": (777,), "tall": (6144, 1024)}  # 124 MiB, the largest 96
LARGE = {"odd": (1021, 1013), "huge": (16384, 12288), "bias": (777,), "wide": (8192, 7168)}  # 996 MiB, the largest 768
# More than the bound is held by each of two ranks that divide it in fp32, or hold all of it in 16 bits.
TWICE = SMALL | {"wider": (4096, 8192)}
CONVERSIONS = [
    {"held": torch.bfloat16, "stored": torch.float32},  # the save converts, and the load back
    {"held": torch.bfloat16, "loads_into": torch.float32},
]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


@pytest.fixture
def folder(tmp_path):
    """A folder whose files do not stay until pytest clears its old ones away."""
    yield tmp_path
    shutil.rmtree(tmp_path)


class Peak:
    """Counts the memory that this process takes from now on."""

    def __init__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts at what is resident now
        self._start = _status_bytes("VmRSS")

    def extra(self):
        """Returns the most bytes there were above those at the start."""
        return _status_bytes("VmHWM") - self._start


def _status_bytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _give_memory_back():
    """Has glibc return what is freed to the kernel at once: what it keeps would hide the next allocation."""
    trim_threshold, mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    assert libc.mallopt(mmap_threshold, 256 * 1024)
    assert libc.mallopt(trim_threshold, MIB)


def _extra(action):
    dist.barrier()
    peak = Peak()
    action()
    extra = peak.extra()
    dist.barrier()
    return extra


# What is measured, on every rank.


def _save_and_load(folder, shapes, layout, held=torch.float32, stored=None, loads_into=None):
    """Returns what a save and the load of it took on this rank."""
    from booster.checkpoint_io import GeneralCheckpointIO

    _give_memory_back()
    io, rank, size = GeneralCheckpointIO(), dist.get_rank(), dist.get_world_size()
    model = SlicedModel(shapes, layout, rank, size, held=held, stored=stored)
    model.fill()
    saving = _extra(lambda: io.save_model(model, folder / "m", shard=True))
    if loads_into is not None:
        model = SlicedModel(shapes, layout, rank, size, held=loads_into)
    model.clear()
    loading = _extra(lambda: io.load_model(model, folder / "m"))
    model.check()
    return saving, loading


def _save_and_load_training(folder, width):
    from booster import Booster

    _give_memory_back()
    booster = Booster(plugin="torch_ddp")
    net = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2 * width))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters()))
    booster.backward(model(torch.ones(1, width)).mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    saving = _extra(lambda: booster.save(folder / "c", model=model, optimizer=optimizer))
    loading = _extra(lambda: booster.load(folder / "c", model=model, optimizer=optimizer))
    return saving, loading


def _save_in_background(folder):
    """Returns this rank's bytes, and what each of three saves took."""
    from booster.checkpoint_io import GeneralCheckpointIO

    _give_memory_back()
    io = GeneralCheckpointIO()
    model = SlicedModel(TWICE, "spans", dist.get_rank(), dist.get_world_size())
    model.fill()

    def save(index):
        io.save_model(model, folder / f"m{index}", shard=True, use_async=True)
        io.wait()

    return model.num_bytes, [_extra(lambda index=index: save(index)) for index in range(3)]


def _save_clones(folder):
    """The naive save: a copy of everything, then a file of it."""
    _give_memory_back()
    model = SlicedModel(SMALL, "replicated", dist.get_rank(), dist.get_world_size())
    model.fill()
    tensors = {part.name: part.tensor for part in model.tensor_slices()}
    path = folder / f"clones-{dist.get_rank()}.safetensors"

    def load():
        for name, tensor in load_file(path).items():
            tensors[name].copy_(tensor)

    saving = _extra(lambda: save_file({name: tensor.clone() for name, tensor in tensors.items()}, path))
    return saving, _extra(load)


def _gather_and_save(folder):
    """The naive save of a sharded model: every tensor gathered before it is written, one at a time."""
    _give_memory_back()
    rank, size = dist.get_rank(), dist.get_world_size()
    model = SlicedModel({"wide": SMALL["wide"]}, "rows", rank, size)
    (part,) = model.tensor_slices()

    def save():
        whole = torch.empty(part.global_shape)
        dist.all_gather(list(whole.chunk(size)), part.tensor)
        torch.save(whole, folder / f"{part.name}-{rank}.pt")

    return _extra(save)


def _allocate_and_free(kind):
    _give_memory_back()

    def allocate():
        if kind == "shared":
            with mmap.mmap(-1, 100 * MIB) as block:
                for offset in range(0, len(block), mmap.PAGESIZE):
                    block[offset] = 1
        else:
            torch.ones(25 * MIB)

    return _extra(allocate)


# The model.


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_hold_the_values_of_their_places(layout, world_size):
    shapes = {"a": (7, 12), "b": (5,), "c": (8, 9)}
    found = {name: torch.full(shape, -1.0) for name, shape in shapes.items()}
    for rank in range(world_size):
        model = SlicedModel(shapes, layout, rank, world_size)
        model.fill()
        model.check()
        for part in model.tensor_slices():
            box = tuple(slice(offset, offset + length) for offset, length in part.box)
            flat = found[part.name][box].flatten()
            flat[slice(*part.span)] = part.tensor.flatten()
            found[part.name][box] = flat.view([length for _, length in part.box])
    for seed, (name, shape) in enumerate(shapes.items()):
        values = logical_values(seed, torch.arange(found[name].numel()))
        assert torch.equal(found[name], values.view(shape))
    model.clear()
    with pytest.raises(AssertionError, match="not those of their place"):
        model.check()


# The detector.


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_memory_that_is_freed_at_once_is_seen(kind):
    for extra in run_ranks(_allocate_and_free, 2, kind, fresh=True):
        assert 95 * MIB < extra < 110 * MIB


@pytest.mark.slow
def test_naive_saves_and_loads_are_seen(folder):
    for saving, loading in run_ranks(_save_clones, 2, folder, fresh=True):
        assert saving > BOUND_BYTES
        assert loading > BOUND_BYTES
    assert min(run_ranks(_gather_and_save, 2, folder, fresh=True)) > BOUND_BYTES


# The bound.


def _assert_bounded(figures):
    for rank, (saving, loading) in enumerate(figures):
        assert saving <= BOUND_BYTES, f"rank {rank} took {saving / MIB:.1f} MiB to save"
        assert loading <= BOUND_BYTES, f"rank {rank} took {loading / MIB:.1f} MiB to load"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["replicated", "transposed"])
def test_whole_tensors_take_little_memory(folder, layout):
    _assert_bounded(run_ranks(_save_and_load, 2, folder, SMALL, layout, fresh=True))


@pytest.mark.parametrize("layout", ["spans", "columns"])
@pytest.mark.slow
def test_parts_take_little_memory(folder, layout):
    _assert_bounded(run_ranks(_save_and_load, 2, folder, TWICE, layout, fresh=True))


@pytest.mark.parametrize("formats", CONVERSIONS, ids=["save", "load"])
@pytest.mark.slow
def test_converting_takes_little_memory(folder, formats):
    _assert_bounded(run_ranks(_save_and_load, 2, folder, TWICE, "replicated", **formats, fresh=True))


def test_a_training_state_takes_little_memory(folder):
    _assert_bounded(run_ranks(_save_and_load_training, 2, folder, 1900, fresh=True))


@pytest.mark.slow
def test_saves_in_the_background_keep_one_copy_and_no_more(folder):
    for num_bytes, (first, *later) in run_ranks(_save_in_background, 2, folder, fresh=True):
        assert first <= num_bytes + BOUND_BYTES
        assert max(later) <= BOUND_BYTES, f"the saves after the first took {[extra / MIB for extra in later]} MiB"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gibibyte_takes_no_more(folder, layout, world_size):
    figures = run_ranks(_save_and_load, world_size, folder, LARGE, layout, fresh=True, timeout=600)
    _assert_bounded(figures)


@pytest.mark.slow
@pytest.mark.parametrize("formats", CONVERSIONS, ids=["save", "load"])
@pytest.mark.parametrize("layout", ["spans", "columns", "transposed"])
def test_converting_a_gibibyte_takes_no_more(folder, layout, formats):
    figures = run_ranks(_save_and_load, 2, folder, LARGE, layout, **formats, fresh=True, timeout=600)
    _assert_bounded(figures)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_training_state_of_a_gibibyte_takes_no_more(folder, world_size):
    _assert_bounded(run_ranks(_save_and_load_training, world_size, folder, 5460, fresh=True, timeout=600))
