"""Random models, loops and settings of plugins train as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_ranks
from random_loops import RandomLoop, draw_case

SEEDS_OF_A_TEST = 20


def run_seeds(seeds: list[int], num_ranks: int, folder: Path) -> list[str]:
    """Returns what went wrong, with the case that shows it."""
    errors = []
    for seed in seeds:
        case = draw_case(seed, num_ranks)
        try:
            RandomLoop(case, folder / str(seed)).run()
        except Exception as error:
            errors.append(f"{case}\n    {type(error).__name__}: {error}")
            break  # the ranks are no longer in step
    return errors


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_random_loops(part, num_ranks, tmp_path):
    seeds = list(range(part * SEEDS_OF_A_TEST, (part + 1) * SEEDS_OF_A_TEST))
    for seed in seeds:
        (tmp_path / str(seed)).mkdir()
    errors = [error for found in run_ranks(run_seeds, num_ranks, seeds, num_ranks, tmp_path) for error in found]
    assert not errors, errors[0]
