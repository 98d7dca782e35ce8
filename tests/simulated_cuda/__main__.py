"""Runs pytest in a process that has the simulated device, as have its ranks: tests marked gpu without a GPU.

Run: python -m simulated_cuda ARGUMENTS OF PYTEST (in tests/).
"""

from __future__ import annotations

import sys

from simulated_cuda import device

if __name__ == "__main__":
    device.install()  # before pytest imports torch
    import pytest

    sys.exit(pytest.main(["--device", "simulated_cuda", *sys.argv[1:]]))
