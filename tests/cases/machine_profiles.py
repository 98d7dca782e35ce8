"""Machine profiles with round figures, whose step times can be computed by hand, and a short one of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from booster.estimate import machine_speed
from booster.estimate.machine_profile import (
    BYTE_KINDS,
    FLOP_KINDS,
    CollectiveSpeed,
    Curve,
    MachineProfile,
)

FLOPS_PER_SECOND = 1e9
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send")


def profile_of(
    *,
    bytes_per_second: float = 1e18,
    call: float = 0.0,
    latency: float = 0.0,
    seconds_per_byte: float = 0.0,
    overlap: float = 0.0,
    is_asynchronous: bool = False,
) -> MachineProfile:
    """Returns a profile of 2 ranks; by default only floating-point operations take time."""
    curves = {kind: {"float32": Curve(((1e6, 1e6 / FLOPS_PER_SECOND),))} for kind in FLOP_KINDS}
    curves |= {kind: {"float32": Curve(((1e6, 1e6 / bytes_per_second),))} for kind in BYTE_KINDS}
    collectives = [
        CollectiveSpeed(
            operation=one,
            num_ranks=2,
            num_hosts=1,
            transport="shared memory",
            latency=latency,
            seconds_per_byte=seconds_per_byte,
            overlap=overlap,
        )
        for one in OPERATIONS
    ]
    return MachineProfile(
        machine="test",
        num_ranks=2,
        ranks_per_host=8,
        operators=curves,
        call_seconds=call,
        step_call_seconds=call,
        is_asynchronous=is_asynchronous,
        collectives=tuple(collectives),
    )


@contextmanager
def short_measurement() -> Iterator[None]:
    """Lets the measurement of this machine take a second in place of ten: few and small operators, few repeats."""
    with (
        patch.object(machine_speed, "_SIDES", {"cpu": (32, 64)}),
        patch.object(machine_speed, "_NUM_BYTES", {"cpu": (2**12, 2**14)}),
        patch.object(machine_speed, "_PAYLOADS", {"cpu": (2**8, 2**16, 2**20)}),
        patch.multiple(machine_speed, _MIN_SECONDS=0.0005, _REPEATS=2, _NUM_WAITS=4, _UNCACHED=2**20),
    ):
        yield
