"""Speeds of machines that one does not have, from the numbers of their data sheets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from booster.errors import ConfigError

from .machine_profile import BYTE_KINDS, FLOP_KINDS, CollectiveSpeed, Curve, MachineProfile

# Note [Data sheets]
# Data sheets give peaks. What programs reach of them in large operators is assumed: the shares below. Operators take
# time in proportion to their work, and at least that of their launch. A collective takes the latency of its link, and
# the bytes that a rank sends over the link's bandwidth in one direction; over several hosts that of the links of its
# ranks on a host together. Predictions for such a machine order plans; measure one with `booster profile-mesh` for
# times.
_MATMUL_SHARE, _MEMORY_SHARE, _LINK_SHARE = 0.7, 0.85, 0.8
_LAUNCH_SECONDS = 5e-6  # of a call in a model, on the host
_STEP_LAUNCH_SECONDS = 5e-6
_HOST_BYTES_PER_SECOND = 25e9  # of PCI Express, fourth generation
_OPERATIONS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter", "send")


@dataclass(frozen=True, slots=True)
class _Device:
    """Peaks of a device: operations per second in bfloat16 and in fp32, bytes per second of its memory, own link."""

    bfloat16: float
    float32: float
    memory: float
    link: str


DEVICES = {
    "a100-40gb": _Device(312e12, 19.5e12, 1.555e12, "nvlink3"),
    "a100": _Device(312e12, 19.5e12, 2.039e12, "nvlink3"),
    "h100": _Device(989e12, 67e12, 3.35e12, "nvlink4"),
    "h200": _Device(989e12, 67e12, 4.8e12, "nvlink4"),
    "b200": _Device(2250e12, 80e12, 8.0e12, "nvlink5"),
    "l40s": _Device(362e12, 91.6e12, 0.864e12, "pcie4"),
    "rtx4090": _Device(165e12, 82.6e12, 1.008e12, "pcie4"),
    "mi300x": _Device(1307e12, 163.4e12, 5.3e12, "infinity-fabric"),
}
"""Devices by name."""

# Bytes per second of a rank in one direction, and seconds of a call.
LINKS = {
    "nvlink3": (300e9, 10e-6),
    "nvlink4": (450e9, 10e-6),
    "nvlink5": (900e9, 10e-6),
    "infinity-fabric": (448e9, 12e-6),
    "pcie4": (32e9, 15e-6),
    "pcie5": (64e9, 15e-6),
    "ib-hdr": (25e9, 20e-6),
    "ib-ndr": (50e9, 20e-6),
    "ib-xdr": (100e9, 20e-6),
    "ethernet-10g": (1.25e9, 60e-6),
    "ethernet-25g": (3.125e9, 60e-6),
    "ethernet-100g": (12.5e9, 40e-6),
    "ethernet-400g": (50e9, 30e-6),
}
"""Links by name."""

_DEFAULT_BETWEEN = "ib-ndr"
_LINK = re.compile(r"(\d+(?:\.\d+)?)(GB|Gb)/s(?::(\d+(?:\.\d+)?)us)?")


def profile_of_data_sheets(
    device: str | None, interconnect: str | None, num_ranks: int, ranks_per_host: int, measured: MachineProfile | None
) -> MachineProfile:
    """Return the profile of a machine by its description; see Note [Data sheets].

    Args:
        device: Name of one of `DEVICES`; None for the operators of `measured`.
        interconnect: Link within a host, and after a comma that between hosts: names of `LINKS`, or a bandwidth per
            rank in one direction and a latency, such as "300GB/s:10us". None for the device's own link, and ib-ndr.
        num_ranks: World size.
        ranks_per_host: Number of ranks on each host.
        measured: Profile of this machine, if there is no device.

    Raises:
        ConfigError: The device or a link is unknown.
    """
    if device is not None and device.lower() not in DEVICES:
        raise ConfigError(
            f"--device {device} is not known: give one of {', '.join(DEVICES)}, or --profile FILE of a machine that was"
            " measured"
        )
    known = None if device is None else DEVICES[device.lower()]
    if known is None and measured is None:
        raise ConfigError(
            "the speed of the machine is unknown: give --device, such as --device h100, or --profile FILE"
        )
    texts = [] if interconnect is None else [one.strip() for one in interconnect.split(",")]
    if len(texts) > 2 or not all(texts[:1]):
        raise ConfigError(
            f"--interconnect {interconnect!r} is not a link within a host, and one between hosts: write, for example,"
            " nvlink4,ib-ndr"
        )
    within = texts[0] if texts else (known.link if known is not None else "pcie4")
    between = texts[1] if len(texts) > 1 else _DEFAULT_BETWEEN
    collectives = list(_collectives(within, _link(within), min(num_ranks, ranks_per_host), num_hosts=1))
    if num_ranks > ranks_per_host:
        collectives += _between_hosts(within, between, num_ranks, ranks_per_host)
    links = within if num_ranks <= ranks_per_host else f"{within} and {between}"
    name = f"{'this machine' if known is None else device} with {links}, {ranks_per_host} ranks per host"
    if known is None:
        assert measured is not None
        return replace(
            measured, machine=name, num_ranks=num_ranks, ranks_per_host=ranks_per_host, collectives=tuple(collectives)
        )
    peaks = {"float32": known.float32, "bfloat16": known.bfloat16, "float16": known.bfloat16}
    return MachineProfile(
        machine=name,
        num_ranks=num_ranks,
        ranks_per_host=ranks_per_host,
        operators={
            **{kind: {one: _curve(_MATMUL_SHARE * rate) for one, rate in peaks.items()} for kind in FLOP_KINDS},
            **{kind: {one: _curve(_MEMORY_SHARE * known.memory) for one in peaks} for kind in BYTE_KINDS},
        },
        call_seconds=_LAUNCH_SECONDS,
        step_call_seconds=_STEP_LAUNCH_SECONDS,
        is_asynchronous=True,
        host_bytes_per_second=_HOST_BYTES_PER_SECOND,
        collectives=tuple(collectives),
    )


def _curve(rate: float) -> Curve:
    return Curve(((1e6, 1e6 / rate), (1e12, 1e12 / rate)))


def _between_hosts(within: str, between: str, num_ranks: int, ranks_per_host: int) -> Iterator[CollectiveSpeed]:
    """Yield the speeds of groups with one, two, four ... ranks on each host, each of which has a link of its own.

    Data that several ranks of a host receive alike crosses the network once, over the links of all of them.
    """
    (inside, _), (outside, latency) = _link(within), _link(between)
    num_hosts = math.ceil(num_ranks / ranks_per_host)
    on_host = 1
    while on_host <= ranks_per_host:
        bandwidth = min(inside, on_host * outside)
        yield from _collectives(between, (bandwidth, latency), on_host * num_hosts, num_hosts)
        on_host *= 2


def _collectives(link: str, speed: tuple[float, float], num_ranks: int, num_hosts: int) -> Iterator[CollectiveSpeed]:
    bandwidth, latency = speed
    for operation in _OPERATIONS:
        yield CollectiveSpeed(
            operation=operation,
            num_ranks=max(2, num_ranks),
            num_hosts=num_hosts,
            transport=link,
            latency=latency,
            seconds_per_byte=1 / (_LINK_SHARE * bandwidth),
            overlap=1.0,
        )


def _link(text: str) -> tuple[float, float]:
    if text.lower() in LINKS:
        return LINKS[text.lower()]
    found = _LINK.fullmatch(text)
    if found is None or not float(found[1]):
        raise ConfigError(
            f"--interconnect has the link {text!r}: give one of {', '.join(LINKS)}, or a bandwidth per rank in one"
            " direction and a latency, such as 300GB/s:10us (GB are bytes, Gb are bits)"
        )
    return float(found[1]) * 1e9 / (8 if found[2] == "Gb" else 1), float(found[3] or 20) * 1e-6
