"""Machine profiles with round figures, whose step times can be computed by hand."""

from __future__ import annotations

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
