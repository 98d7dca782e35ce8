"""A comparison as a text table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _harness.pair import Comparison, EngineReport, Figures

__all__ = ["align", "format_table"]

_MIB = 2**20
_HEAD = ["engine", "median ms", "best ms", "ratio", "quartiles", "extra us", "last loss", "loss diff"]
_TOKENS_HEAD = ["tokens/s"]
_MEMORY_HEAD = ["resting MiB", "peak MiB"]


def format_table(comparison: Comparison) -> str:
    """Returns the table, with the errors of engines that could not be built below it."""
    has_memory = any(engine.memory is not None for engine in comparison.engines)
    tokens = comparison.step_tokens
    rows = [_HEAD + (_TOKENS_HEAD if tokens else []) + (_MEMORY_HEAD if has_memory else [])]
    rows += [_row(engine, tokens, has_memory) for engine in comparison.engines]
    errors = [f"{engine.name}: {engine.outcome}" for engine in comparison.engines if engine.has_failed]
    return "\n".join([_title(comparison), *align(rows), *errors])


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the rows as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(_padded, row, widths, range(len(row)))) for row in rows]


def _padded(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def _title(comparison: Comparison) -> str:
    ranks = comparison.world.size
    timed = next((engine.figures.num_steps for engine in comparison.engines if engine.figures is not None), 0)
    return f"{comparison.title}: {ranks} rank{'s' if ranks > 1 else ''}, {timed} paired steps"


def _row(engine: EngineReport, step_tokens: int | None, has_memory: bool) -> list[str]:
    if engine.figures is not None:
        cells = _cells(engine.figures)
    else:
        cells = ["FAILED" if engine.has_failed else engine.outcome, *["-"] * (len(_HEAD) - 2)]
    if step_tokens:
        cells += ["-" if engine.figures is None else f"{step_tokens / engine.figures.seconds.median:.0f}"]
    if has_memory:
        memory = engine.memory
        cells += [_mebibytes(None if memory is None else memory.after_steps)]
        cells += [_mebibytes(None if memory is None else memory.step_peak)]
    return [engine.name, *cells]


def _cells(figures: Figures) -> list[str]:
    return [
        f"{figures.seconds.median * 1e3:.3f}",
        f"{figures.best_seconds * 1e3:.3f}",
        f"{figures.ratio.median:.3f}",
        f"[{figures.ratio.first:.3f}, {figures.ratio.third:.3f}]",
        f"{figures.extra_seconds.median * 1e6:+.1f}",
        f"{figures.last_loss:.5f}",
        f"{figures.largest_loss_difference:.1e}" if figures.largest_loss_difference else "0.0",
    ]


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / _MIB:.1f}"
