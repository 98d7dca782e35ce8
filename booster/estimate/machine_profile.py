"""Speed of a machine: operators by kind and dtype, and collectives by transport; measured once and kept in a file."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from booster.device import device_type, num_devices
from booster.errors import ConfigError
from booster.kernels.loader import cache_folder
from booster.validation import check_path

CACHE_VARIABLE = "BOOSTER_PROFILE_CACHE"
_VERSION = 4  # of the file's format

# Note [Time model]
# An operator takes a fixed time for its call, and the time that its kernel takes for so many floating-point operations
# or bytes. The latter is measured as a curve for each kind of operator and dtype, with all ranks of the machine at
# work, as they share its memory. A collective takes `latency` seconds, and `seconds_per_byte` for each byte that a
# rank sends, fitted for each operation, number of ranks, and number of hosts that they are on. A rank's clock
# advances by each operator of a simulated step (Note [Simulated training]). A collective that was started before and
# is waited for now costs what is left of it: of the time since its start, the part `overlap` counted for it. Both
# moments are those of the plugin's own code, so each plugin hides what it hides. Collectives are measured one after
# another; amid computation a wait also takes a CPU out of its caches, which is measured on its own. Ranks that share a
# core are measured while all of them compute; while some wait for a pipeline stage, the others take their turns, and
# the wait ends sooner. What is offloaded crosses to the device and back in a step, at the speed of that link: the
# host's update is taken to be as fast.


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured times of an operator by its amount of work.

    Attributes:
        points: Amounts, in operations or bytes, with their seconds, ascending.
    """

    points: tuple[tuple[float, float], ...]

    def seconds(self, amount: float) -> float:
        """Return the time: linear between points in logarithms, proportional beyond them."""
        if amount <= 0:
            return 0.0
        amounts = [one for one, _ in self.points]
        index = bisect_left(amounts, amount)
        if index in (0, len(amounts)):
            known, seconds = self.points[min(index, len(amounts) - 1)]
            return seconds * amount / known
        (low, fast), (high, slow) = self.points[index - 1], self.points[index]
        share = math.log(amount / low) / math.log(high / low)
        return float(fast * (slow / fast) ** share)

    @property
    def rate(self) -> float:
        """Work per second at the largest amount."""
        amount, seconds = self.points[-1]
        return amount / seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpeed:
    """Speed of a collective or message.

    Attributes:
        operation: Name of the operation, as `count_communication` has it.
        num_ranks: Number of ranks of the group.
        num_hosts: Number of hosts that the group's ranks are on.
        transport: "shared memory", or the name of the backend.
        latency: Seconds of a call.
        seconds_per_byte: Seconds for each byte that a rank sends.
        overlap: Part of the computation between start and wait during which it proceeds, from 0 to 1.
    """

    operation: str
    num_ranks: int
    num_hosts: int
    transport: str
    latency: float
    seconds_per_byte: float
    overlap: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Return the time of a call in which each rank sends so many bytes."""
        return self.latency + num_bytes * self.seconds_per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Speed of a machine; see Note [Time model].

    Attributes:
        machine: Name of the machine and its device.
        num_ranks: Number of ranks that were at work.
        ranks_per_host: Ranks on one host.
        operators: Curves by kind of operator, and by dtype.
        call_seconds: Time of a call in the model, also of one that returns a view or memory, with its share of autograd
        and modules.
        step_call_seconds: Time of an operator's call in the optimizer's step.
        is_asynchronous: Whether the device computes while the host calls further operators.
        ranks_per_core: Number of ranks that take turns on a core, at least 1.
        wait_seconds: Time that a wait for other ranks amid computation costs on a CPU, in addition to the collective's.
        host_bytes_per_second: Speed of a copy between an accelerator and its host; 0 on a CPU.
        collectives: Speeds of collectives.
    """

    machine: str
    num_ranks: int
    ranks_per_host: int
    operators: Mapping[str, Mapping[str, Curve]]
    call_seconds: float
    step_call_seconds: float
    is_asynchronous: bool = False
    ranks_per_core: float = 1.0
    wait_seconds: float = 0.0
    host_bytes_per_second: float = 0.0
    collectives: Sequence[CollectiveSpeed] = field(default_factory=tuple)

    def curve(self, kind: str, dtype: str) -> Curve:
        """Return the curve of a kind of operator; of fp32, if there is none of the dtype."""
        curves = self.operators[kind]
        return curves[dtype] if dtype in curves else curves["float32"]

    def speed(self, operation: str, num_ranks: int, num_hosts: int = 1) -> CollectiveSpeed | None:
        """Return the speed of a collective, of the nearest group that was measured; None without any.

        Ranks of a host share its network, or have a link each: among groups over several hosts the number of ranks on
        each decides, then that of all. The latency grows with the logarithm of the number of ranks, as that of a tree.
        """
        known = [one for one in self.collectives if one.operation == operation]
        known = [one for one in known if (one.num_hosts == 1) == (num_hosts == 1)] or known

        def distance(one: CollectiveSpeed) -> tuple[float, float]:
            on_host = one.num_ranks / one.num_hosts, num_ranks / num_hosts
            return (
                0.0 if num_hosts == 1 else abs(math.log(on_host[0] / on_host[1])),
                abs(math.log(one.num_ranks / num_ranks)),
            )

        nearest = min(known, key=distance, default=None)
        if nearest is None or nearest.num_ranks == num_ranks:
            return nearest
        growth = math.log2(num_ranks) / math.log2(nearest.num_ranks)
        return replace(nearest, num_ranks=num_ranks, num_hosts=num_hosts, latency=nearest.latency * growth)

    def describe(self) -> str:
        """Return the speeds as text for people."""
        lines = [f"{self.machine}, {self.num_ranks} ranks at work", ""]
        for kind, curves in self.operators.items():
            unit = "GFLOP/s" if kind in FLOP_KINDS else "GB/s"
            rates = ", ".join(f"{curve.rate / 1e9:.1f} {unit} in {dtype}" for dtype, curve in curves.items())
            lines.append(f"{kind:<12} {rates}")
        lines += [
            f"{'calls':<12} {1e6 * self.call_seconds:.1f} us of an operator in the model,"
            f" {1e6 * self.step_call_seconds:.1f} us in the optimizer's step",
            f"{'waits':<12} {1e6 * self.wait_seconds:.0f} us in addition to a collective's time",
        ]
        if self.host_bytes_per_second:
            lines.append(f"{'offloading':<12} {self.host_bytes_per_second / 1e9:.1f} GB/s")
        lines.append("")
        for one in self.collectives:
            where = "of one host" if one.num_hosts == 1 else f"of {one.num_hosts} hosts"
            rate = f"{1e-9 / one.seconds_per_byte:.2f} GB/s" if one.seconds_per_byte else "no time for bytes"
            lines.append(
                f"{one.operation:<14} {one.num_ranks} ranks {where} by {one.transport}: {1e6 * one.latency:.0f} us,"
                f" {rate}, {100 * one.overlap:.0f} % beside computation"
            )
        return "\n".join(lines)


FLOP_KINDS = ("matmul", "attention", "convolution")
BYTE_KINDS = ("elementwise", "inplace", "special", "transcendental", "random", "reduction", "index")


def profile_folder() -> Path:
    """Return the directory of machine profiles: $BOOSTER_PROFILE_CACHE, or one in the user's cache."""
    return cache_folder(CACHE_VARIABLE, "machines")


def machine_name() -> str:
    """Return the name of this host, with its number and type of devices."""
    kind = device_type()
    count = os.cpu_count() if kind == "cpu" else num_devices()
    return f"{platform.node() or 'localhost'} {kind} {count}"


def default_path(num_ranks: int) -> Path:
    """Return the file of this machine's profile with a number of ranks."""
    return profile_folder() / f"{_file_prefix()}-{num_ranks}.json"


def save_profile(profile: MachineProfile, path: Path) -> None:
    """Write a profile as JSON; a reader sees all of it or none.

    Raises:
        ConfigError: The file can't be written.
    """
    check_writable(path)
    temporary = _temporary(path)
    temporary.write_text(json.dumps(profile_values(profile), indent=1) + "\n")
    temporary.replace(path)


def check_writable(path: Path) -> None:
    """Check that a profile can be written to a path, and make its directory.

    Raises:
        ConfigError: It can't.
    """
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise ConfigError(
            f"the machine profile can't be written to {path} ({error}): give another path, or set {CACHE_VARIABLE} to a"
            " directory of yours"
        ) from error


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def load_profile(path: str | os.PathLike[str]) -> MachineProfile:
    """Return the profile in a file.

    Raises:
        ConfigError: The file can't be read, or is not a profile of this version.
    """
    check_path("path", path)
    advice = "give a file that `booster profile-mesh --output FILE` has written"
    try:
        return profile_from_values(json.loads(Path(path).read_text()))
    except OSError as error:
        raise ConfigError(f"the machine profile {path} can't be read ({error.strerror}): {advice}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not a machine profile of this version ({error!r}): {advice}") from error


def find_profile(num_ranks: int) -> MachineProfile | None:
    """Return this machine's profile of the nearest number of ranks, or None if there is none of this version."""
    found: list[MachineProfile] = []
    for path in sorted(profile_folder().glob(f"{_file_prefix()}-*.json")):
        try:
            found.append(load_profile(path))
        except ConfigError:  # of another version: measured again
            continue
    return min(found, key=lambda one: abs(math.log(one.num_ranks / num_ranks)), default=None)


def profile_values(profile: MachineProfile) -> dict[str, Any]:
    """Return the values of a profile for a JSON object."""
    return {"version": _VERSION, **asdict(profile)}


def profile_from_values(values: Mapping[str, Any]) -> MachineProfile:
    """Return the profile of the values of a JSON object.

    Raises:
        ValueError: They are not those of a profile of this version.
    """
    if values.get("version") != _VERSION:
        raise ValueError(f"version {values.get('version')!r}")
    given = {one.name: values[one.name] for one in fields(MachineProfile)}
    operators = {
        kind: {dtype: _curve_from(curve["points"]) for dtype, curve in curves.items()}
        for kind, curves in given["operators"].items()
    }
    missing = {*FLOP_KINDS, *BYTE_KINDS} - {kind for kind, curves in operators.items() if "float32" in curves}
    if missing:
        raise ValueError(f"no speed of {', '.join(sorted(missing))}")
    collectives = tuple(CollectiveSpeed(**one) for one in given["collectives"])
    return MachineProfile(**given | {"operators": operators, "collectives": collectives})


def _curve_from(points: Any) -> Curve:
    curve = Curve(tuple((float(amount), float(seconds)) for amount, seconds in points))
    is_ascending = all(low[0] < high[0] for low, high in pairwise(curve.points))
    if not curve.points or not is_ascending or any(min(point) <= 0 for point in curve.points):
        raise ValueError(f"points {points!r} of a curve")
    return curve


def _file_prefix() -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", machine_name())
