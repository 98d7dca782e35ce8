"""Any cut of the tensors over any number of ranks loads into any other: bit for bit, in every file format.

The layouts are those that the plugins to come will hold: flat spans (ZeRO, Gemini), rows, columns and tiles (tensor
parallelism), whole copies.
"""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist
from harness import run_ranks
from sliced_model import LAYOUTS, SlicedModel

from booster.checkpoint_io import GeneralCheckpointIO
from booster.device import current_device

pytestmark = pytest.mark.on_device

# Sizes that don't divide, tensors smaller than the world, one element, none, three dimensions.
SHAPES = {
    "a": (7, 13),
    "b": (1, 17),
    "vocabulary": (97, 12),
    "c": (3,),
    "d": (),
    "e": (0, 5),
    "f": (5, 6, 7),
    "g": (1, 1),
}
FORMS = {"one shard": {}, "small shards": {"size_per_shard": 1}, "bin": {"use_safetensors": False}}
PLACES = [(layout, world_size) for layout in LAYOUTS for world_size in (1, 2, 3, 4)]
PAIRS = list(itertools.product(PLACES, PLACES))


def _save(path: str, layout: str, form: str, use_async: bool) -> None:
    model = SlicedModel(SHAPES, layout, dist.get_rank(), dist.get_world_size(), device=current_device())
    model.fill()
    io = GeneralCheckpointIO()
    io.save_model(model, path, shard=True, use_async=use_async, **FORMS[form])
    io.wait()


def _load(path: str, layout: str) -> None:
    model = SlicedModel(SHAPES, layout, dist.get_rank(), dist.get_world_size(), device=current_device())
    model.clear()
    GeneralCheckpointIO().load_model(model, path)
    model.check()


def _cases() -> list[object]:
    chosen = PAIRS[:: len(PAIRS) // 30]
    return [
        pytest.param(*pair, id="{0[0]} x{0[1]} to {1[0]} x{1[1]}".format(*pair), marks=() if pair in chosen else SLOW)
        for pair in PAIRS
    ]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("saved", "loaded"), _cases())
def test_any_cut_loads_into_any_other(tmp_path, saved, loaded):
    number = PAIRS.index((saved, loaded))
    form = list(FORMS)[number % len(FORMS)]
    run_ranks(_save, saved[1], str(tmp_path / "c"), saved[0], form, number % 2 == 0)
    run_ranks(_load, loaded[1], str(tmp_path / "c"), loaded[0])


def test_the_files_are_the_same_from_every_writer(tmp_path):
    places = [("replicated", 1), ("replicated", 3), ("spans", 2), ("spans", 4)]
    for layout, world_size in places:
        run_ranks(_save, world_size, str(tmp_path / f"{layout}-{world_size}"), layout, "one shard", False)
    files = [tmp_path / f"{layout}-{world_size}" / "model.safetensors" for layout, world_size in places]
    assert len({file.read_bytes() for file in files}) == 1
