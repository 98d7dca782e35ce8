"""Installs the simulated device when it is imported: the first module that a server of rank processes imports."""

from __future__ import annotations

from simulated_cuda import device

device.install()
