"""Choice of the network interface that reaches the other hosts."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

import psutil

# Note [Interface of gloo]
# gloo publishes the address that its host name resolves to. On many hosts /etc/hosts has 127.0.1.1, or a container's
# name does not resolve, and ranks on other hosts then connect to themselves. In that case, with ranks on several hosts,
# gloo is given the interface that reaches another host's rank.
VARIABLE = "GLOO_SOCKET_IFNAME"


def local_address(host: str, port: int) -> str:
    """Return this host's address on the route to another host, or "" without a route. Sends nothing."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:  # the name does not resolve: connecting to it raises the better error
        return ""
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return _plain(str(probe.getsockname()[0]))
        except OSError:  # this host has no such network; another of the addresses may work
            continue
    return ""


def nearest_address(addresses: Sequence[str]) -> str:
    """Return the one of another host's numeric addresses that is in a network of this host.

    An address that this host has itself, as of a container bridge, leads back to it and is the last choice.
    """
    own = _own_networks()
    mine = {network.ip for network in own}
    foreign = [address for address in addresses if ipaddress.ip_address(address) not in mine]
    for address in foreign:
        if any(ipaddress.ip_address(address) in network.network for network in own):
            return address
    return (foreign or list(addresses))[0]


def choose_gloo_interface(hosts: Sequence[str], addresses: Sequence[str], rank: int) -> None:
    """Set GLOO_SOCKET_IFNAME if gloo's default would be unreachable; see Note [Interface of gloo].

    Hosts and addresses are those of every rank, an address "" where the route to the store is unknown.
    """
    if os.environ.get(VARIABLE) or len(set(hosts)) == 1 or _own_name_is_reachable():
        return
    others = [address for host, address in zip(hosts, addresses, strict=True) if host != hosts[rank]]
    routes = [local_address(address, 1) for address in others if address and not _is_loopback(address)]
    interfaces = {address: name for name, address in _own_addresses() if not _is_loopback(address)}
    for address in [*routes, addresses[rank]]:
        if address in interfaces:
            os.environ[VARIABLE] = interfaces[address]
            return


def _own_name_is_reachable() -> bool:
    """Return whether gloo's default, the first local address of the host name, is reachable from other hosts."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    mine = {address for _, address in _own_addresses()}
    named = [_plain(str(address[0])) for *_, address in found]
    # All of 127.0.0.0/8 is local, though an interface lists only one address of it.
    first = next((address for address in named if address in mine or _is_loopback(address)), None)
    return first is not None and not _is_loopback(first)


def _own_addresses() -> list[tuple[str, str]]:
    """Return pairs of an interface's name and one of its addresses."""
    return [
        (name, _plain(entry.address))
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _own_networks() -> list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    networks = []
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and entry.netmask:
                networks.append(ipaddress.ip_interface(f"{entry.address}/{entry.netmask}"))
            elif entry.family == socket.AF_INET6 and entry.netmask:
                length = int(ipaddress.IPv6Address(entry.netmask)).bit_count()
                networks.append(ipaddress.ip_interface(f"{_plain(entry.address)}/{length}"))
    return networks


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _plain(address: str) -> str:
    """Return an address without the interface suffix of link-local IPv6 addresses: fe80::1%eth0."""
    return address.partition("%")[0]
