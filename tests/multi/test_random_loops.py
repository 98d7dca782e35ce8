"""Random models, loops and settings of plugins train as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import random_hybrid_loops
import random_loops
from harness import run_ranks
from zoo import needs_transformers

LOOPS = {
    "blocks": (random_loops.draw_case, random_loops.RandomLoop),
    "hybrid": (random_hybrid_loops.draw_case, random_hybrid_loops.RandomHybridLoop),
}
NUM_SEEDS = {"blocks": 12, "hybrid": 8}  # of a test
PARTS = [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 16))]


def run_seeds(loops: str, seeds: list[int], num_ranks: int, folder: Path) -> list[str]:
    """Returns what went wrong, with the case that shows it."""
    draw_case, kind = LOOPS[loops]
    for seed in seeds:
        case = draw_case(seed, num_ranks)
        try:
            kind(case, folder / str(seed)).run()
        except Exception as error:  # the ranks are no longer in step
            return [f"{case}\n    {type(error).__name__}: {error}"]
    return []


def assert_seeds_train(loops: str, part: int, num_ranks: int, folder: Path) -> None:
    number = NUM_SEEDS[loops]
    seeds = list(range(part * number, (part + 1) * number))
    for seed in seeds:
        (folder / str(seed)).mkdir()
    found = run_ranks(run_seeds, num_ranks, loops, seeds, num_ranks, folder, timeout=300)
    errors = [error for of_rank in found for error in of_rank]
    assert not errors, errors[0]


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", PARTS)
def test_random_loops(part, num_ranks, tmp_path):
    assert_seeds_train("blocks", part, num_ranks, tmp_path)


@needs_transformers
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", PARTS)
def test_random_hybrid_loops(part, num_ranks, tmp_path):
    assert_seeds_train("hybrid", part, num_ranks, tmp_path)
