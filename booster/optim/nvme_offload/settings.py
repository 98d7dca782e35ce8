"""How much of the optimizer states goes to a disk, and where."""

from __future__ import annotations

import os
from dataclasses import dataclass

from booster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """The arguments `nvme_offload_fraction` and `nvme_offload_dir`, checked.

    Attributes:
        fraction: Of the states' bytes, from 0 to 1.
        directory: Under which the files go; None: the system's directory for temporary files.
    """

    fraction: float = 0.0
    directory: str | None = None

    @classmethod
    def checked(cls, fraction: float, directory: str | os.PathLike[str] | None) -> OffloadSettings:
        """Return the settings; the directory is made if it is not there.

        Raises:
            ConfigError: The fraction is none, or nothing can be written to the directory.
        """
        is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
        if not is_number or not 0.0 <= fraction <= 1.0:
            raise ConfigError(
                f"nvme_offload_fraction={fraction!r} is not a fraction: give a number from 0 (all optimizer states in"
                " memory) to 1 (all on the disk)"
            )
        if directory is not None and (not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory)):
            raise ConfigError(
                f"nvme_offload_dir={directory!r} is not a path: give a directory, or None for a temporary one"
            )
        if directory is not None and fraction == 0:
            raise ConfigError(
                f"nvme_offload_dir={str(directory)!r} with nvme_offload_fraction=0 would hold nothing: give the"
                " fraction of the optimizer states that is to be there, up to 1, or leave the directory out"
            )
        path = None if directory is None else os.path.abspath(os.fspath(directory))
        if fraction > 0 and path is not None:
            _make_writable(path)
        return cls(float(fraction), path)


def _make_writable(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"nvme_offload_dir={path!r} can't be made: {error}. Give a directory on a local disk, or one in which it"
            " can be made"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"nvme_offload_dir={path!r} can't be written to: give a directory that belongs to you")
