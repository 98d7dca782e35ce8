"""Installs the simulated device when it is imported: the first module that a server of rank processes imports."""

from __future__ import annotations

import sys

from simulated_cuda import device

device.install()
# peft imports it if it is there, and it takes the simulated device for one that runs its kernels.
sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
