"""Where the device is the simulated one, a test of one process fails with the faults that it has seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from simulated_cuda import device, reports


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    if not device.is_installed():
        yield
        return
    with reports.recording() as record:
        yield
        device.settle()
    faults = record.faults()
    if faults:
        pytest.fail("the simulated device reports:\n" + "\n".join(faults), pytrace=False)
