"""The process that every rank is forked from: torch is imported there once, so that a rank starts in 0.1 s."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver as server
from multiprocessing.context import ForkServerContext

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
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def preload(*modules: str) -> None:
    """Has the rank processes start with these modules imported, where no rank was started yet.

    Call it at the top of a test module whose jobs import something slow, such as a transformers model: then one process
    pays for the import instead of every rank of every world size. A module that isn't installed is left out.
    """
    _PRELOADED.extend(name for name in modules if name not in _PRELOADED)


def start_context() -> ForkServerContext:
    """Returns the context to start ranks with, its server running with the environment that ranks need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    before = dict(os.environ)
    os.environ.update(WORKER_ENVIRONMENT)  # torch reads these while it is imported, which happens in the server
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    try:
        server.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context
