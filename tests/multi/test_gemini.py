"""Training under GeminiPlugin equals training in one process."""

from __future__ import annotations

import pytest
from parity import assert_parallel_equals_serial
from zoo import model_names

WORLDS = (1, 2, 3, 4)


@pytest.mark.parametrize("model", model_names())
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_model_trains_as_in_one_process(model, world_size):
    assert_parallel_equals_serial("gemini", model, world_size=world_size)
