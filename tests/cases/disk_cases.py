"""Files, tensors and errors for the tests of the disk queue."""

import contextlib
import os
import resource
import signal
import time
import warnings

import pytest
import torch

from booster.kernels.disk_io import aligned_buffer

MIB = 1 << 20


def close_quietly(descriptor):
    """Closes a descriptor that may be closed already."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def random_bytes(num_bytes, seed=0):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def aligned_random(num_bytes, seed=0):
    return aligned_buffer(num_bytes).copy_(random_bytes(num_bytes, seed))


def error_of(ticket):
    with pytest.raises(OSError) as caught:  # noqa: PT011 - which one is what the callers look at
        ticket.wait()
    return caught.value


@contextlib.contextmanager
def largest_file(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def exit_code_of_fork(action):
    """Returns the exit code of a forked process that does this; a negative one: it had to be killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of Python warn of forks with threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    for _ in range(1000):
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
