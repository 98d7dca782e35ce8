"""Says once, on rank 0, what the end of an epoch does with samples that can't be spread evenly."""

from __future__ import annotations

__all__ = ["announce"]


def announce(text: str | None) -> None:
    """Logs the text on rank 0; nothing where there is none. No communication."""
    if text is not None:
        from booster.logger import get_dist_logger  # the logger asks where it runs

        get_dist_logger("booster.data").info(text, ranks=[0])
