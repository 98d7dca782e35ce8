"""Launch: environment variables of launchers, rendezvous, process group, device and config of a process."""

from .launch import (
    get_config,
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)

__all__ = [
    "get_config",
    "get_default_parser",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]
