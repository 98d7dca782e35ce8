"""Multi-node launch over ssh: one process per host, their merged output, and their shared shutdown."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, BinaryIO

from booster.cli.ending import ending_signals
from booster.cli.failure import RankFailure, has_cause
from booster.cli.fleet_verdict import HostEnd, judge, was_lost
from booster.cli.host_messages import read_failures, read_message
from booster.cli.line_splitting import LineSplitter
from booster.cli.ssh_commands import HostCommand
from booster.errors import ConfigError

__all__ = ["run_fleet"]

# A node's launcher terminates its ranks and itself at EOF on its stdin: closed here, or because this process, ssh or
# the network failed. So closing a pipe terminates a node and leaves no process behind. ssh then exits by itself, and is
# killed only after a launcher's own timeout. Ctrl-C in a terminal reaches this process alone: each ssh has its own
# session, so that the nodes' final output still arrives.
_END_SECONDS = 30.0  # on top of the timeout of ranks
# Ranks fail at once when a peer is lost, perhaps before the peer's launcher noticed: time for its report to arrive.
_CAUSE_SECONDS = 5.0


def run_fleet(commands: Sequence[HostCommand], least: int, rank_seconds: float) -> int:
    """Start a launcher on each host over ssh and wait for all of them.

    Output of the hosts is copied to this process's, each line prefixed with its host and rank. The root cause of a
    failure comes last. When one host fails, all others are terminated. A lost host is ignored while enough remain.
    Must be called in the main thread.

    Args:
        commands: ssh command of each host.
        least: Minimum number of hosts to continue with.
        rank_seconds: Time between SIGTERM and SIGKILL of ranks, in seconds.

    Returns:
        Exit code: 0 if all hosts succeeded, else that of the rank that failed first.

    Raises:
        ConfigError: The program ssh is not installed.
    """
    if shutil.which(commands[0].command[0]) is None:
        raise ConfigError(
            "hosts are reached by ssh, but the program ssh is not installed here: install it (Debian: openssh-client), "
            "or start each machine by hand with --nnodes, --node-rank and --master-addr"
        )
    fleet = _Fleet(commands, least, rank_seconds + _END_SECONDS)
    with _told_by_signals(fleet):
        try:
            fleet.run()
        finally:
            fleet.kill()
    verdict = judge([host.end() for host in fleet.hosts], fleet.told)
    with suppress(BrokenPipeError):
        print(verdict.text, end="", file=sys.stderr, flush=True)
    return verdict.code


class _Host:
    """ssh process of one host, and the launcher messages received from it."""

    def __init__(self, command: HostCommand) -> None:
        self.name = command.host
        self.failures: dict[int, RankFailure] = {}
        self.refusal: dict[str, Any] | None = None
        self.world_size = 0
        self.has_started = self.was_told_to_end = self.is_unheard = False
        self._last_words: deque[str] = deque(maxlen=20)
        self.process = subprocess.Popen(
            command.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._num_open = 2
        self.streams = {self.process.stdout: LineSplitter(), self.process.stderr: LineSplitter()}

    def read(self, stream: Any) -> bool:
        """Forward available output; return False at EOF."""
        piece = os.read(stream.fileno(), 2**16)
        splitter = self.streams[stream]
        if not piece:
            self._num_open -= 1
        target = sys.stdout.buffer if stream is self.process.stdout else sys.stderr.buffer
        self._take(splitter.add(piece) if piece else splitter.rest(), target)
        return bool(piece)

    def tell_to_end(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.was_told_to_end = self.process.poll() is None
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def is_over(self) -> bool:
        """Return whether it reported a failure, or exited with all of its output read."""
        is_gone = self._num_open == 0 and self.process.poll() is not None
        return bool(self.failures) or self.refusal is not None or is_gone

    def is_lost(self) -> bool:
        """Return whether ssh itself failed: the host is unreachable or disconnected."""
        return was_lost(self.process.poll()) and not self.failures and self.refusal is None

    def end(self) -> HostEnd:
        return HostEnd(
            host=self.name,
            code=self.process.returncode,
            has_started=self.has_started,
            was_told_to_end=self.was_told_to_end,
            failures=self.failures,
            world_size=self.world_size,
            refusal=self.refusal,
            last_words=list(self._last_words),
        )

    def _take(self, lines: list[bytes], target: BinaryIO) -> None:
        shown = []
        for line in lines:
            message = read_message(line)
            if message is not None:
                self._hear(message)
            elif line.startswith(f"[{self.name}:".encode()):
                shown.append(line)
            else:
                self._last_words.append(line.decode(errors="replace").strip())
                shown.append(f"[{self.name}] ".encode() + line)
        try:
            target.write(b"".join(shown))
            target.flush()
        except BrokenPipeError:
            # The reader of our output is gone, as after `| head`. Drain what the hosts still write, so that they exit.
            self.is_unheard = True
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), target.fileno())

    def _hear(self, message: dict[str, Any]) -> None:
        event = message.get("event")
        if event == "started":
            self.has_started = True
        elif event == "failed":
            self.failures, self.world_size = read_failures(message, self.name), message["world_size"]
        elif event == "refused":
            self.refusal = message


class _Fleet:
    def __init__(self, commands: Sequence[HostCommand], least: int, end_seconds: float) -> None:
        self.told: list[signal.Signals] = []
        self._least, self._end_seconds = least, end_seconds
        self._end_at: float | None = None  # deadline for terminated hosts to exit
        self._cause_at: float | None = None  # deadline for a root cause to be reported
        self._selector = selectors.DefaultSelector()
        self._woken, self.wake = os.pipe()
        os.set_blocking(self.wake, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self.hosts: list[_Host] = []
        self._commands = commands

    def run(self) -> None:
        """Start all hosts and wait until all have exited or the deadline passed."""
        for command in self._commands:
            host = _Host(command)
            self.hosts.append(host)
            for stream in host.streams:
                self._selector.register(stream, selectors.EVENT_READ, host)  # type: ignore[arg-type]
        while len(self._selector.get_map()) > 1:
            self._read(timeout=self._seconds_left())
            self._look()
            if self._end_at is not None and time.monotonic() > self._end_at:
                return
        for host in self.hosts:
            host.process.wait()

    def kill(self) -> None:
        """Kill the remaining ssh processes; their nodes see EOF."""
        for host in self.hosts:
            host.tell_to_end()
            if host.process.poll() is None:
                host.process.kill()
            host.process.wait()
            for stream in host.streams:
                stream.close()  # type: ignore[union-attr]
        self._selector.close()
        os.close(self._woken)
        os.close(self.wake)

    def _read(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                os.read(self._woken, 64)
                continue
            host: _Host = key.data
            if not host.read(key.fileobj):
                self._selector.unregister(key.fileobj)
                if not any(stream in self._selector.get_map() for stream in host.streams):
                    host.process.wait()  # both pipes are closed: it exits
            if host.is_unheard and signal.SIGPIPE not in self.told:
                self.told.append(signal.SIGPIPE)

    def _look(self) -> None:
        """Terminate all hosts after a failure or signal, at once if its root cause is known."""
        if self._end_at is not None:
            if len(self.told) > 1:
                self._end_at = 0.0  # a second Ctrl-C ends the wait
            return
        now = time.monotonic()
        over = [host for host in self.hosts if host.is_over() and not self._did_well(host)]
        lost = [host for host in over if host.is_lost()]
        failed = [host for host in over if host not in lost]
        if len(self.hosts) - len(lost) < self._least or (self.hosts[0] in lost):
            failed += lost
        if not failed and not self.told:
            return
        if self._cause_at is None:
            self._cause_at = now + _CAUSE_SECONDS
        if self.told or any(_is_cause(host) for host in failed) or now >= self._cause_at:
            self._end_at = now + self._end_seconds
            for host in self.hosts:
                host.tell_to_end()

    def _did_well(self, host: _Host) -> bool:
        return host.process.poll() == 0 and not host.failures

    def _seconds_left(self) -> float | None:
        deadlines = [at for at in (self._end_at, self._cause_at if self._end_at is None else None) if at is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None


def _is_cause(host: _Host) -> bool:
    """Return whether a host's failure is not the consequence of another's."""
    if host.failures:
        return has_cause(host.failures)
    return host.refusal is None or not host.refusal["is_consequence"]


@contextmanager
def _told_by_signals(fleet: _Fleet) -> Iterator[None]:
    def note(number: int, _: FrameType | None) -> None:
        fleet.told.append(signal.Signals(number))

    handlers = {number: signal.signal(number, note) for number in ending_signals()}
    before = signal.set_wakeup_fd(fleet.wake, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
