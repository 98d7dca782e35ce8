"""Settings of the offload of optimizer states to disk."""

from __future__ import annotations

import os
from dataclasses import dataclass

from booster.errors import ConfigError
from booster.validation import is_non_nan_number


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """The arguments `nvme_offload_fraction` and `nvme_offload_dir`, checked.

    Attributes:
        fraction: Fraction of the states' bytes on disk, from 0 to 1.
        directory: Parent directory of the state files; optional, defaults to the system's temporary directory.
    """

    fraction: float = 0.0
    directory: str | None = None

    @classmethod
    def from_arguments(cls, fraction: float, directory: str | os.PathLike[str] | None) -> OffloadSettings:
        """Return the settings; a missing directory is created.

        Raises:
            ConfigError: The fraction is not a number in [0, 1], or the directory is not writable.
        """
        if not is_non_nan_number(fraction) or not 0.0 <= fraction <= 1.0:
            raise ConfigError(
                f"nvme_offload_fraction={fraction!r} is not a fraction: give a number from 0 (all optimizer states in"
                " memory) to 1 (all on disk)"
            )
        if directory is not None and (not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory)):
            raise ConfigError(
                f"nvme_offload_dir={directory!r} is not a path: give a directory, or None for a temporary one"
            )
        if directory is not None and fraction == 0:
            raise ConfigError(
                f"nvme_offload_dir={str(directory)!r} with nvme_offload_fraction=0 would stay empty: give the fraction"
                " of the optimizer states to offload, up to 1, or omit the directory"
            )
        path = None if directory is None else os.path.abspath(os.fspath(directory))
        if fraction > 0 and path is not None:
            _create_directory(path)
        return cls(float(fraction), path)


def _create_directory(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"nvme_offload_dir={path!r} can't be created: {error}. Give an existing directory on a local disk, or a"
            " path that can be created"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"nvme_offload_dir={path!r} is not writable: give a directory with write permission")
