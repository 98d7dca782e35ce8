"""Loops as users write them, each once: they run under every plugin, and by plain torch in one process."""

from __future__ import annotations

from .one_process import OneProcess, on_the_host
from .table import LOOPS, STRATEGIES, UserLoop, as_markdown

__all__ = ["LOOPS", "STRATEGIES", "OneProcess", "UserLoop", "as_markdown", "on_the_host"]
