"""The ssh processes of a run over several hosts: their output, and that all end when one does."""

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

# Note [How hosts end]
# Each host's launcher ends its ranks and itself when its stdin ends, however that comes about: closed here, or because
# this process, ssh or the network is no more. So to end a host is to close a pipe, and nothing is left there. ssh then
# goes by itself, and is killed only where it takes longer than a launcher may. Ctrl-C in a terminal reaches
# this process alone: every ssh is in a session of its own, so that the hosts' last words still come through.
_END_SECONDS = 30.0  # more than ranks are given
# Ranks whose peer is gone fail at once, perhaps sooner than the peer's launcher noticed: it is given time to say why.
_CAUSE_SECONDS = 5.0


def run_fleet(commands: Sequence[HostCommand], least: int, rank_seconds: float) -> int:
    """Starts a launcher on each host and returns 0 when all have ended well, or else the first failing rank's code.

    What hosts write is written here, each line with its host and rank; last what failed first. When one host fails
    all others are ended, but a host that is lost is done without as long as enough remain.
    Must be called in the main thread.

    Args:
        commands: What to start for each host.
        least: How many hosts the run can go on with.
        rank_seconds: How long ranks may take to end before they are killed.

    Raises:
        ConfigError: There is no ssh here.
    """
    if shutil.which(commands[0].command[0]) is None:
        raise ConfigError(
            "hosts are reached by ssh, and there is no program ssh here: install one, as Debian's openssh-client, or "
            "start each machine by hand with --nnodes, --node-rank and --master-addr"
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
    """One host's ssh process and what it has said so far."""

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
        """Passes on what there is to read, and returns False at the end of the stream."""
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
        """Returns whether it said why it ends, or is gone without a word, all of its words being read."""
        is_gone = self._num_open == 0 and self.process.poll() is not None
        return bool(self.failures) or self.refusal is not None or is_gone

    def is_lost(self) -> bool:
        """Returns whether ssh ended for a reason of its own: the host could not be reached, or went away."""
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
            # Nobody reads our output any more, as after `| head`. What hosts still write must find a way, so that they
            # can end.
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
        self._end_at: float | None = None  # when everybody should have ended who was told to
        self._cause_at: float | None = None  # when a cause should be known
        self._selector = selectors.DefaultSelector()
        self._woken, self.wake = os.pipe()
        os.set_blocking(self.wake, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self.hosts: list[_Host] = []
        self._commands = commands

    def run(self) -> None:
        """Starts all and returns when all have ended."""
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
        """Ends what is left of the ssh processes; their hosts notice it."""
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
                    host.process.wait()  # both ends are closed: it exits
            if host.is_unheard and signal.SIGPIPE not in self.told:
                self.told.append(signal.SIGPIPE)

    def _look(self) -> None:
        """Tells all to end where there is a reason, at once if it is clear which one."""
        if self._end_at is not None:
            if len(self.told) > 1:
                self._end_at = 0.0  # a second Ctrl-C: whoever waits no longer
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
    """Returns whether a host ended for a reason of its own, not because another's ranks were gone."""
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
