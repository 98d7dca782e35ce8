"""What surrounds a job in its process: the process group, and the process-wide settings that are put back after."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import warnings
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from simulated_cuda import device as simulated_device
from simulated_cuda import reports
from torch.distributed.distributed_c10d import get_pg_count

from harness import shared_gpu
from harness.forkserver import SIMULATED, Device
from harness.messages import Joined, Settled

# More than any job's limit: the parent, who asks every rank where it is, must be the first to give up.
_GROUP_TIMEOUT = timedelta(minutes=30)
# Objects that survive a job are frozen, so that the next collection is cheap. Some become garbage later and keep their
# groups, whose threads wake up all the time: now and then all are looked at again.
_JOBS_PER_FULL_COLLECTION = 16


class RankGroup:
    """The default process group of one worker, kept from job to job while no job has changed it.

    A new group of 4 costs 0.1 to 0.2 s, ten times a small job. It is given up where a job made groups of its own,
    destroyed it, or left it unable to pass a barrier.
    """

    def __init__(self, rank: int, world_size: int, device: Device = "cpu") -> None:
        self.rank = rank
        self.world_size = world_size
        self._device = device
        self._is_simulated = device in SIMULATED
        self._num_destroyed = 0

    def join(self, store_path: str) -> Joined:
        """Makes the default group, with the store at `store_path`. *Collective: yes*."""
        store = dist.FileStore(store_path, self.world_size)
        store.set_timeout(_GROUP_TIMEOUT)
        backend, device = "gloo", None
        if self._device == "simulated_cuda":
            torch.accelerator.set_device_index(self.rank)
            backend, device = "nccl", torch.device("cuda", self.rank)
        elif self._device != "cpu":
            torch.accelerator.set_device_index(0)
            shared_gpu.register()
            backend = shared_gpu.BACKEND
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=_GROUP_TIMEOUT,
            device_id=device,
        )
        return Joined()

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Fails a job in which the simulated device has seen a fault: a race, memory that was freed too early."""
        if not self._is_simulated:
            yield
            return
        with reports.recording() as record:
            try:
                yield
                simulated_device.settle()
            finally:
                simulated_device.set_options()
        faults = record.faults()
        if faults:
            raise AssertionError("the simulated device reports:\n" + "\n".join(faults))

    def settle(self) -> Settled:
        """Keeps the group for the next job, or destroys it. *Collective: yes*, but no rank waits for one that destroys.

        It comes after all ranks have returned: what goes wrong here costs a new group, never a test.
        """
        gc.collect()
        is_kept = self._is_untouched() and _passes_barrier()
        if not is_kept and dist.is_initialized():
            dist.destroy_process_group()
            self._num_destroyed += 1
            if self._num_destroyed % _JOBS_PER_FULL_COLLECTION == 0:
                gc.unfreeze()
            gc.collect()
        gc.freeze()
        return Settled(is_group_reusable=is_kept)

    def _is_untouched(self) -> bool:
        return dist.is_initialized() and get_pg_count() == 1 and dist.get_world_size() == self.world_size


def _passes_barrier() -> bool:
    try:
        dist.barrier()
    except RuntimeError:  # a connection that the job broke, and whose error the job caught
        return False
    return True


@contextlib.contextmanager
def job_surroundings(rank: int, world_size: int) -> Iterator[None]:
    """Seeds everything, sets the launcher's variables, and puts back what the job changed in the process."""
    environment, directory, dtype = dict(os.environ), os.getcwd(), torch.get_default_dtype()
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size)):
        os.environ[name] = str(value)
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    _seed()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
