"""The parent's handle on one rank's process: start it, talk to it, learn where it hangs, end it."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

from harness.failures import RankFailure
from harness.forkserver import Device, start_context
from harness.messages import Reply
from harness.worker import worker_main

_STACK_SECONDS = 5.0  # for a process that was told to write its stacks and end
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)')


class RankProcess:
    """One live rank."""

    def __init__(self, rank: int, world_size: int, directory: Path, device: Device = "cpu") -> None:
        context = start_context(device)
        self.rank = rank
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self._stack_path = directory / f"stacks-{rank}.txt"
        self._process = context.Process(
            target=worker_main, args=(theirs, rank, world_size, str(self._stack_path), device), daemon=True
        )
        self._process.start()
        theirs.close()  # so that the worker's death closes the connection

    def send(self, message: bytes) -> None:
        """Sends a job. A process that is gone already is noticed when its answer is read."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send_bytes(message)

    def receive(self) -> Reply:
        """Returns the answer that is ready, or the failure that the process has ended without one."""
        try:
            reply: Reply = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return self._death()
        return reply

    def interrupt(self) -> None:
        """Has a process that still runs write its stacks and end. `failure` follows."""
        self._signal(signal.SIGABRT)

    def failure(self, test_path: str | None) -> RankFailure:
        """Returns where a process was that was interrupted, as the stacks of all its threads.

        Args:
            test_path: file whose frames say best where it was.
        """
        self._process.join(_STACK_SECONDS)
        stacks = self._stacks() or "it did not answer: stopped, or blocked outside Python"
        place = _place(stacks, test_path)
        return RankFailure(rank=self.rank, kind="hung", summary=place, detail=stacks, at=time.monotonic())

    def kill(self) -> None:
        """Ends the process, whatever it does. `close` follows."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Waits for the end of a process that was killed, and frees what belongs to it."""
        self._process.join()
        self.connection.close()
        self._process.close()

    def _death(self) -> RankFailure:
        now = time.monotonic()
        self._process.join(_STACK_SECONDS)
        code = self._process.exitcode
        how = f"left with exit code {code}" if code is None or code >= 0 else f"killed by {signal.Signals(-code).name}"
        return RankFailure(rank=self.rank, kind="died", summary=how, detail=self._stacks(), at=now)

    def _signal(self, number: int) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself between the two lines
                os.kill(self._process.pid, number)

    def _stacks(self) -> str:
        text = self._stack_path.read_text(errors="replace") if self._stack_path.exists() else ""
        return text.partition("\nExtension modules:")[0].strip()


def _place(stacks: str, test_path: str | None) -> str:
    """Returns `in function (file:line)`: the innermost frame of the test's own file, or else of the main thread."""
    main = stacks.partition("Current thread")[2] or stacks
    frames = list(_FRAME.finditer(main))
    if not frames:
        return "at an unknown place"
    own = [frame for frame in frames if frame["path"] == test_path]
    frame = (own or frames)[0]
    return f"in {frame['function']} ({Path(frame['path']).name}:{frame['line']})"
