"""Keeps what pytest collected out of the garbage collector's way."""

from __future__ import annotations

import gc

import pytest

from booster.checkpoint_io.planning import save_plan


@pytest.fixture(autouse=True, scope="module")
def _only_garbage_of_this_module() -> None:
    """Has no collection look at the objects of all tests and reports: each that a test asks for took half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def small_sizes(monkeypatch):
    """Blocks, pages and regions of a few bytes, so that small tensors meet all cuts."""
    monkeypatch.setattr(save_plan, "BLOCK_BYTES", 128)
    monkeypatch.setattr(save_plan, "PAGE_BYTES", 16)
    monkeypatch.setattr(save_plan, "_MIN_REGION_BYTES", 48)
