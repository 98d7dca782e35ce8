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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, BinaryIO

from booster.errors import ConfigError

from .exit_report import HostExit, has_root_cause, summarize, was_lost
from .launcher_protocol import read_failures, read_message
from .log_prefix import LineBuffer
from .signals import termination_signals

# A node's launcher terminates its ranks and itself at EOF on its stdin: closed here, or because this process, ssh or
# the network failed. So closing a pipe terminates a node and leaves no process behind. ssh then exits by itself, and is
# killed only after a launcher's own timeout. Ctrl-C in a terminal reaches this process alone: each ssh has its own
# session, so that the nodes' final output still arrives.
_EXIT_SECONDS = 30.0  # on top of the timeout of ranks
# Ranks fail at once when a peer is lost, perhaps before the peer's launcher noticed: time for its report to arrive.
_CAUSE_SECONDS = 5.0


def launch_nodes(commands: Mapping[str, Sequence[str]], min_hosts: int, grace_seconds: float) -> int:
    """Start a launcher on each host over ssh, by the command lines, and wait for all of them.

    The exit code is 0 if all hosts succeeded, else that of the rank that failed first. Output of the hosts is copied to
    this process's, each line prefixed with its host and rank. The root cause of a failure comes last. When one host
    fails, all others are terminated: their ranks are killed `grace_seconds` after SIGTERM. A lost host is ignored while
    `min_hosts` remain. Must be called in the main thread.

    Raises:
        ConfigError: The program ssh is not installed.
    """
    if shutil.which("ssh") is None:
        raise ConfigError(
            "hosts are reached by ssh, but the program ssh is not installed here: install it (Debian: openssh-client), "
            "or start each machine by hand with --nnodes, --node-rank and --master-addr"
        )
    group = _NodeGroup(commands, min_hosts, grace_seconds + _EXIT_SECONDS)
    with _collect_signals(group):
        try:
            group.run()
        finally:
            group.kill()
    exit_report = summarize([host.exit for host in group.hosts], group.signals)
    with suppress(BrokenPipeError):
        print(exit_report.text, end="", file=sys.stderr, flush=True)
    return exit_report.code


class _HostProcess:
    """ssh process of one host, and its exit status by the launcher messages received from it."""

    def __init__(self, host: str, command: Sequence[str]) -> None:
        self._output_tail: deque[str] = deque(maxlen=20)
        self.exit = HostExit(host=host, output_tail=self._output_tail)
        self.is_output_closed = False
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self._num_open = 2
        self.streams = {self.process.stdout: LineBuffer(), self.process.stderr: LineBuffer()}

    def read(self, stream: Any) -> bool:
        """Forward available output; return False at EOF."""
        data = os.read(stream.fileno(), 2**16)
        buffer = self.streams[stream]
        if not data:
            self._num_open -= 1
        target = sys.stdout.buffer if stream is self.process.stdout else sys.stderr.buffer
        self._write_lines(buffer.add(data) if data else buffer.flush(), target)
        return bool(data)

    def terminate(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.exit.was_terminated = self.process.poll() is None
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def has_ended(self) -> bool:
        """Return whether it reported a failure, or exited with all of its output read."""
        has_exited = self._num_open == 0 and self.process.poll() is not None
        return bool(self.exit.failures) or self.exit.error is not None or has_exited

    def _write_lines(self, lines: list[bytes], target: BinaryIO) -> None:
        output = []
        for line in lines:
            message = read_message(line)
            if message is not None:
                self._handle_message(message)
            elif line.startswith(f"[{self.exit.host}:".encode()):
                output.append(line)
            else:
                self._output_tail.append(line.decode(errors="replace").strip())
                output.append(f"[{self.exit.host}] ".encode() + line)
        try:
            target.write(b"".join(output))
            target.flush()
        except BrokenPipeError:
            # The reader of our output is gone, as after `| head`. Drain what the hosts still write, so that they exit.
            self.is_output_closed = True
            with open(os.devnull, "wb") as devnull:
                os.dup2(devnull.fileno(), target.fileno())

    def _handle_message(self, message: dict[str, Any]) -> None:
        event = message.get("event")
        if event == "started":
            self.exit.has_started = True
        elif event == "failed":
            self.exit.failures, self.exit.world_size = read_failures(message, self.exit.host), message["world_size"]
        elif event == "refused":
            self.exit.error = message


class _NodeGroup:
    def __init__(self, commands: Mapping[str, Sequence[str]], min_hosts: int, exit_seconds: float) -> None:
        self.signals: list[signal.Signals] = []
        self._min_hosts, self._exit_seconds = min_hosts, exit_seconds
        self._exit_deadline: float | None = None  # deadline for terminated hosts to exit
        self._cause_deadline: float | None = None  # deadline for a root cause to be reported
        self._selector = selectors.DefaultSelector()
        self._wake_read_fd, self.wake_fd = os.pipe()
        os.set_blocking(self.wake_fd, False)
        self._selector.register(self._wake_read_fd, selectors.EVENT_READ)
        self.hosts: list[_HostProcess] = []
        self._commands = commands

    def run(self) -> None:
        for name, command in self._commands.items():
            host = _HostProcess(name, command)
            self.hosts.append(host)
            for stream in host.streams:
                self._selector.register(stream, selectors.EVENT_READ, host)  # type: ignore[arg-type]
        while len(self._selector.get_map()) > 1:
            deadline = self._cause_deadline if self._exit_deadline is None else self._exit_deadline
            self._read(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            self._check_hosts()
            if self._exit_deadline is not None and time.monotonic() > self._exit_deadline:
                return
        for host in self.hosts:
            host.process.wait()

    def kill(self) -> None:
        """Kill the remaining ssh processes; their nodes see EOF."""
        for host in self.hosts:
            host.terminate()
            if host.process.poll() is None:
                host.process.kill()
            host.exit.code = host.process.wait()
            for stream in host.streams:
                stream.close()  # type: ignore[union-attr]
        self._selector.close()
        os.close(self._wake_read_fd)
        os.close(self.wake_fd)

    def _read(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                os.read(self._wake_read_fd, 64)
                continue
            host: _HostProcess = key.data
            if not host.read(key.fileobj):
                self._selector.unregister(key.fileobj)
                if not any(stream in self._selector.get_map() for stream in host.streams):
                    host.process.wait()  # both pipes are closed: it exits
            if host.is_output_closed and signal.SIGPIPE not in self.signals:
                self.signals.append(signal.SIGPIPE)

    def _check_hosts(self) -> None:
        """Terminate all hosts after a failure or signal, at once if its root cause is known."""
        if self._exit_deadline is not None:
            if len(self.signals) > 1:
                self._exit_deadline = 0.0  # a second Ctrl-C ends the wait
            return
        now = time.monotonic()
        ended = [host for host in self.hosts if host.has_ended() and (host.process.poll() != 0 or host.exit.failures)]
        # Hosts whose ssh itself failed: they are unreachable or disconnected.
        unexplained = [host for host in ended if not host.exit.failures and host.exit.error is None]
        lost = [host for host in unexplained if was_lost(host.process.poll())]
        failed = [host for host in ended if host not in lost]
        if len(self.hosts) - len(lost) < self._min_hosts or (self.hosts[0] in lost):
            failed += lost
        if not failed and not self.signals:
            return
        if self._cause_deadline is None:
            self._cause_deadline = now + _CAUSE_SECONDS
        if self.signals or any(_is_root_cause(host.exit) for host in failed) or now >= self._cause_deadline:
            self._exit_deadline = now + self._exit_seconds
            for host in self.hosts:
                host.terminate()


def _is_root_cause(host: HostExit) -> bool:
    """Return whether a host's failure is not the consequence of another's."""
    if host.failures:
        return has_root_cause(host.failures)
    return host.error is None or not host.error["is_consequence"]


@contextmanager
def _collect_signals(group: _NodeGroup) -> Iterator[None]:
    def note(number: int, _: FrameType | None) -> None:
        group.signals.append(signal.Signals(number))

    handlers = {number: signal.signal(number, note) for number in termination_signals()}
    previous_fd = signal.set_wakeup_fd(group.wake_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in handlers.items():
            signal.signal(number, handler)
