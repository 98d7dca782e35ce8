"""Rank process of `booster check --comm`: runs an all-reduce, times it and records its progress."""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from booster.comm import all_reduce_sum, collective_device, group_rank, group_size, transport
from booster.device import synchronize
from booster.launch.launch import destroy_world, launch_from_torch

NUM_ELEMENTS = 4 * 2**20
_REPEATS = 5


def main(record_path: str, timeout_seconds: float) -> None:
    """Run the check; its progress, result or error is written to a JSON file, which each step replaces."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    record: dict[str, Any] = {}

    def note(**entries: Any) -> None:
        record.update(entries)
        temporary = Path(f"{record_path}.part")
        temporary.write_text(json.dumps(record))
        temporary.replace(record_path)

    try:
        note(step="initializing the process group")
        launch_from_torch(verbose=False, timeout_seconds=timeout_seconds, setup_timeout_seconds=timeout_seconds)
        note(step="selecting a transport (and building its kernels)")
        device = collective_device()
        transport_name = transport() if device.type == "cpu" else str(torch.distributed.get_backend())
        note(step="summing", device=device.type, backend=str(torch.distributed.get_backend()), transport=transport_name)
        # Small integers: their sum is exact in every order.
        values = torch.arange(NUM_ELEMENTS, dtype=torch.float32, device=device).remainder_(1000)
        expected = values * sum(range(1, group_size() + 1))
        is_right = torch.equal(all_reduce_sum(values * (group_rank() + 1)), expected)
        note(step="measuring", is_right=is_right, bytes=4 * NUM_ELEMENTS)
        seconds = _median_seconds(device)
        note(step="leaving", seconds=seconds)
        destroy_world()
        note(step="done")
    except Exception as error:
        note(error=f"{type(error).__name__}: {error}")
        raise


def _median_seconds(device: torch.device) -> float:
    tensor = torch.zeros(NUM_ELEMENTS, device=device)
    times = []
    for _ in range(_REPEATS):
        synchronize()
        start = time.perf_counter()
        all_reduce_sum(tensor)
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _exit_with_parent() -> None:
    # EOF on stdin means that the parent has exited, for whatever reason. Not read through sys.stdin, whose lock this
    # thread would hold at interpreter exit.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
