"""The process that every rank is forked from: torch is imported there once, so that a rank starts in 0.1 s."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver as server
from multiprocessing import popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Literal

from simulated_cuda import build

# "shared_gpu": one GPU for all ranks, with the backend of `harness.shared_gpu`; the others are simulated.
Device = Literal["cpu", "simulated_cuda", "shared_gpu", "simulated_shared_gpu"]
SIMULATED: tuple[Device, ...] = ("simulated_cuda", "simulated_shared_gpu")

# _dynamo and tensor are what DDP and the first optimizer import on their own, a second each.
_PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "torch.distributed.tensor", "pytest"]
# What the first boost by each plugin imports: a quarter of a second in every new rank.
_PLUGINS = ("gemini", "hybrid_parallel.plugin", "low_level_zero", "torch_fsdp")
_PRELOADED += [f"booster.plugins.{name}" for name in _PLUGINS]

WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # DETAIL compares all collectives, and doubles the time of some tests: `make test` turns it off.
    "TORCH_DISTRIBUTED_DEBUG": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
}
_TESTS = str(Path(__file__).parents[1])
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


_default_device: Device = "cpu"
_job_device: Device = "cpu"


def default_device() -> Device:
    """Returns the device of the ranks in tests of parity that choose none."""
    return _default_device


def set_default_device(device: Device) -> None:
    """Sets the device of the ranks in tests of parity that choose none."""
    global _default_device
    _default_device = device


def job_device() -> Device:
    """Returns the device of `run_ranks` where none is given: the CPU's, but for tests that are marked `on_device`."""
    return _job_device


def set_job_device(device: Device) -> None:
    """Sets the device of `run_ranks` where none is given."""
    global _job_device
    _job_device = device


def preload(*modules: str) -> None:
    """Has the rank processes start with these modules imported, where no rank was started yet.

    Call it at the top of a test module whose jobs import something slow, such as a transformers model: then one process
    pays for the import instead of every rank of every world size. A module that isn't installed is left out.
    """
    _PRELOADED.extend(name for name in modules if name not in _PRELOADED)


def start_context(device: Device = "cpu") -> ForkServerContext:
    """Returns the context to start ranks with, its server running with the environment that ranks need."""
    if device in SIMULATED:
        build.library()  # here, where an error of the compiler can be read
        _simulated_server.set_forkserver_preload(["simulated_cuda.preload", *_PRELOADED])
        with _environment_of_ranks():
            # Python 3.11 does not hand its path to the server.
            os.environ["PYTHONPATH"] = os.pathsep.join([_TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
            _simulated_server.ensure_running()
        return _SimulatedContext()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    with _environment_of_ranks():
        server.ensure_running()
    return context


# Ranks with the simulated device are forked from a second server, as torch can't change its devices once imported.
_simulated_server = server.ForkServer()


class _SimulatedPopen(popen_forkserver.Popen):
    def _launch(self, process_obj: Any) -> None:
        original, server.connect_to_new_process = (
            server.connect_to_new_process,
            _simulated_server.connect_to_new_process,
        )
        try:
            super()._launch(process_obj)  # type: ignore[misc]
        finally:
            server.connect_to_new_process = original


class _SimulatedProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _SimulatedPopen(process_obj)


class _SimulatedContext(ForkServerContext):
    Process = _SimulatedProcess  # type: ignore[assignment]


@contextmanager
def _environment_of_ranks() -> Iterator[None]:
    """Set the environment that ranks need: torch reads it while it is imported, which happens in the server."""
    before = dict(os.environ)
    os.environ.update(WORKER_ENVIRONMENT)
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
