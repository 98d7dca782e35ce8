"""Keeps what pytest collected out of the garbage collector's way."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Has no collection look at the million objects of all tests: each that a test asks for took over half a second."""
    gc.collect()
    gc.freeze()
