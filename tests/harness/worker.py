"""One rank's process: waits for jobs, runs them in a clean surrounding, and reports."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from types import TracebackType

import torch

from harness import ddp_logger
from harness.failures import RankFailure
from harness.forkserver import LAUNCHER_VARIABLES, WORKER_ENVIRONMENT, Device
from harness.messages import Job, Join, Reply, Request, Returned, Settle
from harness.rank_state import RankGroup, job_surroundings
from harness.reference import resolve

# A worker whose parent is gone ends itself this many seconds after the parent would have ended it.
_ORPHAN_SECONDS = 30.0
_PREPARATION_SECONDS = 60.0


def worker_main(connection: Connection, rank: int, world_size: int, stack_path: str, device: Device) -> None:
    """Runs jobs until the parent closes the connection or a job fails. Never returns."""
    stacks = open(stack_path, "w")  # noqa: SIM115 - it belongs to faulthandler for as long as the process lives
    _prepare_process(stacks.fileno())
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where there is a GPU, too
    group = RankGroup(rank, world_size, device)
    reply: Reply | None = None
    while not isinstance(reply, RankFailure):
        try:
            request: Request = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):  # the parent is done, or gone
            os._exit(0)
        faulthandler.dump_traceback_later(_limit(request) + _ORPHAN_SECONDS, exit=True, file=stacks)
        reply = _answer(request, group)
        faulthandler.cancel_dump_traceback_later()
        _send(connection, reply)
    # Leaves at once: open sockets close, which wakes the ranks that wait for this one, and nothing else can block.
    os._exit(1)


def _prepare_process(stack_fd: int) -> None:
    # A fatal signal writes the stack of every thread to the file; so the parent sends SIGABRT to learn where a rank is.
    faulthandler.enable(file=stack_fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it ends the workers
    os.environ.update(WORKER_ENVIRONMENT)
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    torch.distributed.set_debug_level_from_env()
    ddp_logger.install()
    gc.freeze()


def _limit(request: Request) -> float:
    return request.timeout if isinstance(request, Job) else _PREPARATION_SECONDS


def _answer(request: Request, group: RankGroup) -> Reply:
    try:
        if isinstance(request, Join):
            return group.join(request.store_path)
        if isinstance(request, Settle):
            return group.settle()
        with job_surroundings(group.rank, group.world_size), group.checked():
            return Returned(result=_call(request))
    except BaseException as error:
        return _failure(group.rank, error)


def _call(job: Job) -> bytes:
    function = resolve(job.function)
    args, kwargs = pickle.loads(job.arguments)
    return _packed(function(*args, **kwargs))


class _ResultPickler(pickle.Pickler):
    """Takes tensors of a device to the host: the test's process has no such device."""

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _packed(result: object) -> bytes:
    try:
        stream = io.BytesIO()
        _ResultPickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(result)
        return stream.getvalue()
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(result).__name__} that can't be sent to the test: {error}. "
            "Return plain values (numbers, strings, tensors) or None."
        ) from error


def _failure(rank: int, error: BaseException) -> RankFailure:
    name = type(error).__qualname__
    module = type(error).__module__
    return RankFailure(
        rank=rank,
        kind="skipped" if name == "Skipped" else "raised",
        summary=str(error) if name == "Skipped" else f"{name}: {error}",
        detail="".join(traceback.format_exception(type(error), error, _without_harness(error.__traceback__))),
        error_type=name if module == "builtins" else f"{module}.{name}",
        at=time.monotonic(),
    )


def _without_harness(frames: TracebackType | None) -> TracebackType | None:
    """Returns the traceback from the test's own function on; the whole where the error is the harness's."""
    inner = frames
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    return inner or frames


def _send(connection: Connection, reply: Reply) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # A parent that was interrupted no longer listens; the loop then ends at its next receive.
    with contextlib.suppress(BrokenPipeError):
        connection.send_bytes(pickle.dumps(reply))
