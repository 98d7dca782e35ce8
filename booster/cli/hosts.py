"""Which hosts `booster run` starts ranks on, from a host file or a list, with some of them left out."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from booster.errors import ConfigError

__all__ = ["Host", "choose_hosts", "first_hosts", "is_loopback"]

# No "-" at the beginning: ssh would take it for an option.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.%-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine to start ranks on.

    Attributes:
        name: What ssh and the other hosts know it by.
        slots: How many ranks it takes where the command line does not say; None where the host file does not either.
    """

    name: str
    slots: int | None = None


def choose_hosts(
    *, listed: str | None = None, hostfile: str | None = None, include: str | None = None, exclude: str | None = None
) -> list[Host]:
    """Returns the hosts in the order of the list or the file; the first is where the ranks meet.

    Args:
        listed: Names with commas between them.
        hostfile: Path of a file with a host a line: its name, then `slots=N` or nothing. `#` begins a comment.
        include: Names of those to keep.
        exclude: Names of those to leave out.

    Raises:
        ConfigError: There is nothing to choose from or nothing left, a line or a name can't be understood, or a name
            comes twice or is unknown.
    """
    if listed is not None and hostfile is not None:
        raise ConfigError(
            f"--host={listed} and --hostfile={hostfile} both say which hosts there are: give one of them; "
            "--include and --exclude choose from a host file"
        )
    if hostfile is not None:
        source, hosts = f"--hostfile={hostfile}", _read_file(hostfile)
    else:
        source, hosts = f"--host={listed}", [Host(name=name) for name in _names("--host", listed or "")]
    if include is not None and exclude is not None:
        raise ConfigError(
            f"--include={include} and --exclude={exclude} can't both be followed: give the one that says it shorter"
        )
    known = [host.name for host in hosts]
    if include is not None:
        kept = _known_names("--include", include, known, source)
        return [host for host in hosts if host.name in kept]
    if exclude is not None:
        left_out = _known_names("--exclude", exclude, known, source)
        hosts = [host for host in hosts if host.name not in left_out]
        if not hosts:
            raise ConfigError(f"--exclude={exclude} leaves none of the hosts of {source}: exclude fewer of them")
    return hosts


def first_hosts(hosts: Sequence[Host], num_machines: int) -> list[Host]:
    """Returns as many hosts as --nnodes asks for, from the beginning.

    Raises:
        ConfigError: There are fewer, or some are this machine itself for whoever asks while others are not.
    """
    if num_machines > len(hosts):
        raise ConfigError(
            f"--nnodes={num_machines} is more than the {len(hosts)} host(s) {', '.join(host.name for host in hosts)}: "
            "name more hosts, or leave --nnodes out to take all of them"
        )
    chosen = list(hosts[:num_machines])
    here = [host.name for host in chosen if is_loopback(host.name)]
    if here and len(here) < len(chosen):
        raise ConfigError(
            f"{here[0]} means another machine on each host, so the others can't find it: write the name or the address "
            "that this machine has in their network"
        )
    return chosen


def is_loopback(name: str) -> bool:
    """Returns whether a host's name means the machine itself, wherever it is said."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name in ("localhost", "ip6-localhost") or name.endswith(".localhost")


def _read_file(path: str) -> list[Host]:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--hostfile={path} can't be read ({error}): give a text file with a host a line, as in: node-1 slots=4"
        ) from error
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--hostfile={path}, line {number}"
        host = Host(name=_checked(where, words[0]), slots=_slots(where, words[1:]))
        if host.name in hosts:
            raise ConfigError(f"{where}: {host.name} is there twice: keep one line of it, with all its slots")
        hosts[host.name] = host
    if not hosts:
        raise ConfigError(f"--hostfile={path} names no host: write one a line, as in: node-1 slots=4")
    return list(hosts.values())


def _slots(where: str, words: list[str]) -> int | None:
    if not words:
        return None
    name, _, count = words[0].partition("=")
    if len(words) > 1 or name != "slots" or not count.isdecimal() or int(count) < 1:
        raise ConfigError(
            f"{where}: {' '.join(words)!r} after the name is not understood: a line is a name and, if it takes more "
            "ranks than one, slots=N, as in: node-1 slots=4"
        )
    return int(count)


def _names(option: str, text: str) -> list[str]:
    names = [_checked(option, name.strip()) for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{option}={text!r} names no host: give names with commas between them, as in: node-1,node-2")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{option}={text} names {twice} twice, but a host is started once: name it once, with --nproc-per-node, "
            "or slots=N in a host file, for more ranks"
        )
    return names


def _known_names(option: str, text: str, known: list[str], source: str) -> set[str]:
    names = _names(option, text)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"{option}={text}: {', '.join(unknown)} is none of the hosts of {source}: choose from {', '.join(known)}"
        )
    return set(names)


def _checked(where: str, name: str) -> str:
    if _NAME.fullmatch(name) or _is_address(name):
        return name
    hint = "give the name alone"
    if "@" in name:
        hint = "give the name alone, and --ssh-user for who logs in there"
    elif ":" in name:
        hint = "give the name alone, --ssh-port for where sshd listens, and slots=N in a host file for its ranks"
    raise ConfigError(f"{where}: {name!r} can't be the name of a host: {hint}")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
