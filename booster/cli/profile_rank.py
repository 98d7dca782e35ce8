"""Rank of `booster profile-mesh`: measures the launched world; rank 0 writes the profile."""

from __future__ import annotations

import sys
from pathlib import Path

from booster.comm import group_rank, group_size
from booster.estimate.machine_profile import default_path, save_profile
from booster.estimate.machine_speed import measure_machine
from booster.launch.launch import destroy_world, launch_from_torch


def main(path: str | None = None) -> None:
    """Measure, and write the profile to a file, by default that of this machine."""
    launch_from_torch(verbose=False)
    profile = measure_machine()
    if group_rank() == 0:
        save_profile(profile, default_path(group_size()) if path is None else Path(path))
    destroy_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
