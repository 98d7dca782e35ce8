"""Two hosts on one machine: network namespaces with a cable between them, each with its own name and sshd.

They share files, users and the process table with this machine, but no memory. As on many real ones, /etc/hosts of each
says that its own name is 127.0.1.1, which no other host can reach.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

NAMES = ("node-a", "node-b")
ADDRESSES = ("198.18.77.1", "198.18.77.2")  # a range for tests of networks
_PROGRAMS = ("ip", "unshare", "mount", "ssh", "ssh-keygen", "sshd")

# In namespaces of its own for names, mounts and the network, so that nothing of it is left when the process ends.
_ENTER = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs tmpfs /run && mkdir /run/sshd'
    ' && mount -t tmpfs tmpfs /dev/shm && shift 2 && exec "$@"'
)


class CannotMakeHostsError(Exception):
    """This machine has no way to make network hosts; the text says why."""


@dataclass(frozen=True, kw_only=True)
class NetworkHost:
    """A namespace that processes can be started in."""

    name: str
    namespace: str
    hosts_file: Path

    def command(self, *command: str) -> list[str]:
        """Returns what starts a command on this host."""
        inside = ["unshare", "--mount", "--uts", "sh", "-c", _ENTER, "sh", self.name, str(self.hosts_file), *command]
        return ["ip", "netns", "exec", self.namespace, *inside]

    def processes(self) -> dict[int, str]:
        """Returns the command line of each process on this host."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        found = {}
        for pid in map(int, listed.stdout.split()):
            with suppress(OSError):  # ended in between
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found |= {pid: line} if line else {}  # a process that ended and was not waited for has none
        return found


@dataclass(frozen=True, kw_only=True)
class Network:
    """The hosts, and what ssh needs to get from one to the other."""

    hosts: tuple[NetworkHost, NetworkHost]
    directory: Path

    def ssh_options(self, key: str = "key", known_hosts: str = "known_hosts") -> str:
        """Returns options for ssh that use nothing of this machine's own configuration."""
        files = f"-i {self.directory / key} -o UserKnownHostsFile={self.directory / known_hosts}"
        return f"-F none {files} -o GlobalKnownHostsFile=none -o IdentitiesOnly=yes -o IdentityAgent=none"

    def left_over(self) -> list[str]:
        """Returns the processes on the hosts besides sshd's own; those of a connection may take seconds to end."""
        processes = [psutil.Process(pid) for host in self.hosts for pid in host.processes()]
        started = [process for process in processes if "[listener]" not in " ".join(process.cmdline())]
        _, alive = psutil.wait_procs(started, timeout=10)
        return [" ".join(process.cmdline()) for process in alive]


@contextmanager
def two_hosts(directory: Path) -> Iterator[Network]:
    """Makes two hosts and takes them away in the end, with all their processes.

    Raises:
        CannotMakeHostsError: It can't be done here.
    """
    _check_machine()
    _make_keys(directory)
    namespaces = [f"booster-{os.getpid()}-{name}" for name in NAMES]
    hosts = [_describe(directory, place, namespaces[place]) for place in range(2)]
    servers: list[subprocess.Popen[str]] = []
    try:
        _connect(namespaces)
        for place, host in enumerate(hosts):
            servers.append(_serve(directory, place, host))
        yield Network(hosts=(hosts[0], hosts[1]), directory=directory)
    finally:
        _take_away(hosts, servers)


def _check_machine() -> None:
    missing = [name for name in _PROGRAMS if _program(name) is None]
    if missing:
        raise CannotMakeHostsError(f"missing programs: {', '.join(missing)} (openssh-server and iproute2 have them)")
    if os.geteuid() != 0:
        raise CannotMakeHostsError("only root can make network namespaces")


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _make_keys(directory: Path) -> None:
    for name in ("key", "wrong_key", *(f"{host}_key" for host in NAMES)):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(directory / name))
    shutil.copy(directory / "key.pub", directory / "authorized_keys")
    lines = [f"{name} {(directory / f'{name}_key.pub').read_text()}" for name in NAMES]
    (directory / "known_hosts").write_text("".join(lines))
    (directory / "no_known_hosts").touch()


def _describe(directory: Path, place: int, namespace: str) -> NetworkHost:
    hosts_file = directory / f"{NAMES[place]}_hosts"
    other = f"{ADDRESSES[1 - place]} {NAMES[1 - place]}"
    hosts_file.write_text(f"127.0.0.1 localhost\n127.0.1.1 {NAMES[place]}\n{other}\n198.18.77.99 node-c\n")
    return NetworkHost(name=NAMES[place], namespace=namespace, hosts_file=hosts_file)


def _connect(namespaces: list[str]) -> None:
    first, second = namespaces
    for namespace in namespaces:
        _run("ip", "netns", "add", namespace)
    _run(*f"ip link add cable netns {first} type veth peer name cable netns {second}".split())
    for namespace, address in zip(namespaces, ADDRESSES, strict=True):
        _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "cable")
        for interface in ("lo", "cable"):
            _run("ip", "-n", namespace, "link", "set", interface, "up")


def _serve(directory: Path, place: int, host: NetworkHost) -> subprocess.Popen[str]:
    config = directory / f"{host.name}_sshd_config"
    config.write_text(
        f"HostKey {directory / f'{host.name}_key'}\n"
        f"AuthorizedKeysFile {directory / 'authorized_keys'}\n"
        "ListenAddress 127.0.1.1\n"
        f"ListenAddress {ADDRESSES[place]}\n"
        "PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nUseDNS no\n"
    )
    command = host.command(str(_program("sshd")), "-D", "-e", "-f", str(config))
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    said = []
    for line in server.stderr:  # its end is that of sshd
        said.append(line)
        if sum("listening" in one for one in said) == 2:
            return server
    server.communicate()
    raise CannotMakeHostsError(f"sshd does not start: {''.join(said).strip()}")


def _take_away(hosts: list[NetworkHost], servers: list[subprocess.Popen[str]]) -> None:
    made = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    for host in hosts:
        if host.namespace not in made:
            continue
        for pid in host.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _run("ip", "netns", "delete", host.namespace)
    for server in servers:
        server.communicate()


def _run(*command: str) -> None:
    done = subprocess.run([_program(command[0]) or command[0], *command[1:]], capture_output=True, text=True)
    if done.returncode != 0:
        raise CannotMakeHostsError(f"{' '.join(command)}: {done.stderr.strip()}")
