"""Output of this node's ranks, prefixed "[host:rank] ", and their restart count."""

from __future__ import annotations

import os
import re
import selectors
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, Std

_LINE_END = re.compile(rb"\r\n|\n|\r")
_MAX_LINE_BYTES = 2**16  # bytes; a longer line is broken, as it may never end


class LineBuffer:
    r"""Buffer for process output that returns complete lines.

    The "\r" of a progress bar ends a line as well, so that each state gets a prefix and still overwrites the last.

    Examples:
        >>> buffer = LineBuffer()
        >>> buffer.add(b"one\ntw"), buffer.add(b"o\r"), buffer.flush()
        ([b'one\n'], [b'two\r'], [])
    """

    def __init__(self) -> None:
        self._partial = b""

    def add(self, data: bytes) -> list[bytes]:
        """Append output and return the lines completed by it, with their line ends."""
        text = self._partial + data
        lines, start = [], 0
        for end in _LINE_END.finditer(text):
            if end.group() == b"\r" and end.end() == len(text) and not text[start : end.start()]:
                break  # an empty line whose "\n" may follow
            line = text[start : end.end()]
            if line != b"\r":  # leads each state of a progress bar, and ended the last one
                lines.append(line)
            start = end.end()
        self._partial = text[start:]
        if len(self._partial) > _MAX_LINE_BYTES:
            lines.append(self._partial + b"\n")
            self._partial = b""
        return lines

    def flush(self) -> list[bytes]:
        """Return the incomplete last line, if any, as a line."""
        partial, self._partial = self._partial.strip(b"\r"), b""
        return [partial + b"\n"] if partial else []


class RankLogs(DefaultLogsSpecs):
    """Log destinations of ranks: inherited from this process, or the pipes of a `PrefixedOutput`.

    `log_dir` is for the ranks' error reports and the pipes. `restart_count` returns that of the job, as torch's may
    differ between nodes; None keeps torch's.
    """

    def __init__(
        self, log_dir: str, output: PrefixedOutput | None = None, restart_count: Callable[[], int | None] = lambda: None
    ) -> None:
        super().__init__(log_dir=log_dir, redirects=Std.NONE if output is None else Std.ALL)
        self.world_size = 0
        self._output, self._restart_count = output, restart_count

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the log destinations of one start of this node's ranks, opened for writing by torch."""
        destinations = super().reify(envs)
        restart_count = self._restart_count()
        for local_rank, environment in envs.items():
            self.world_size = int(environment.get("WORLD_SIZE", "0"))
            if restart_count is not None:
                environment["TORCHELASTIC_RESTART_COUNT"] = str(restart_count)
            if self._output is not None:
                # See Note [Launcher protocol].
                prefix = f"[{self._output.host}:{environment['RANK']}] ".encode()
                self._output.add(destinations.stdouts[local_rank], prefix, sys.stdout.buffer)
                self._output.add(destinations.stderrs[local_rank], prefix, sys.stderr.buffer)
        return destinations


class PrefixedOutput:
    """Named pipes for the output of ranks, and a thread that forwards their lines with prefixes.

    Pipes, unlike log files, leave nothing on disk. As another process reads them, the last output of a killed rank is
    not lost.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self._selector = selectors.DefaultSelector()
        self._wake_read_fd, self._wake_fd = os.pipe()
        self._selector.register(self._wake_read_fd, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._pending: list[_Stream] = []  # not yet registered by the thread
        self._is_closing = False
        self._thread = threading.Thread(target=self._forward_all, name="booster-rank-output", daemon=True)
        self._thread.start()

    def add(self, path: str, prefix: bytes, target: BinaryIO) -> None:
        """Create a pipe at `path` and forward its lines to `target`, each with `prefix`."""
        os.mkfifo(path)
        # Opened before the rank's end, whose open would block.
        stream = _Stream(os.open(path, os.O_RDONLY | os.O_NONBLOCK), prefix, target)
        with self._lock:
            self._pending.append(stream)
        os.write(self._wake_fd, b"+")

    def close(self) -> None:
        """Forward the remaining output and end the thread, without waiting for processes that hold a pipe open."""
        self._is_closing = True
        os.write(self._wake_fd, b"-")
        self._thread.join()
        for fd in (self._wake_read_fd, self._wake_fd):
            os.close(fd)
        self._selector.close()

    def _forward_all(self) -> None:
        streams: list[_Stream] = []
        while not self._is_closing:
            for key, _ in self._selector.select():
                if key.fd == self._wake_read_fd:
                    os.read(self._wake_read_fd, 64)
                elif not key.data.forward():
                    self._selector.unregister(key.fd)
                    key.data.close()
                    streams.remove(key.data)
            with self._lock:
                new, self._pending = self._pending, []
            for stream in new:
                self._selector.register(stream.fd, selectors.EVENT_READ, stream)
            streams += new
        for stream in [*streams, *self._pending]:
            while stream.forward():
                pass
            stream.close()


class _Stream:
    def __init__(self, fd: int, prefix: bytes, target: BinaryIO) -> None:
        self.fd, self._prefix, self._target = fd, prefix, target
        self._lines = LineBuffer()

    def forward(self) -> bool:
        """Forward available output; return whether there was any."""
        try:
            data = os.read(self.fd, 2**16)
        except BlockingIOError:
            return False
        self._write(self._lines.add(data))
        return bool(data)

    def close(self) -> None:
        self._write(self._lines.flush())
        os.close(self.fd)

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        with suppress(BrokenPipeError):  # the connection is lost, which ends this launcher; ranks must not block
            self._target.write(b"".join(self._prefix + line for line in lines))
            self._target.flush()
