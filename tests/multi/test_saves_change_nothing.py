"""A save is a look at a run: training continues bit for bit as without it, also inside of an accumulation."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from restart_cases import PLUGINS
from resume_cases import Job

from booster.rng_state import preserved_rng

pytestmark = pytest.mark.on_device

NUM_BATCHES = 8


@pytest.fixture(autouse=True)
def _random_state():
    with preserved_rng():
        yield


def train(name, saves_into):
    """Returns losses and tensors of this rank; saves after every batch, of which a step has two."""
    job = Job("fp32", PLUGINS[name](), accumulation=2)
    for _ in range(NUM_BATCHES):
        job.train(1)
        if saves_into is not None:
            job.save(saves_into, step=len(job.losses), keep_last=1)
    return job.losses, job.tensors()


@pytest.mark.parametrize("name", PLUGINS)
def test_training_goes_on_as_without_a_save(name, tmp_path):
    saving, other = run_ranks(train, 2, name, tmp_path / "run"), run_ranks(train, 2, name, None)
    for (losses, tensors), (expected_losses, expected) in zip(saving, other, strict=True):
        assert losses == expected_losses
        assert tensors.keys() == expected.keys()
        for key in expected:
            assert torch.equal(tensors[key], expected[key]), key
