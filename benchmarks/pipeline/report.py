"""Figures of the pipeline benchmark: steps over what their schedules allow, targets, and what each rank keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from _harness.pair import Comparison
from _harness.samples import Spread
from _harness.table import align
from _harness.targets import Target
from pipeline.engines import ALONE, STYLES, our_name, torch_name

__all__ = ["kept_table", "over_theory", "pipeline_targets", "theory_table"]

_MIB = 2**20


def over_theory(
    comparison: Comparison, name: str, style: str, num_microbatches: int
) -> tuple[float, tuple[float, float]] | None:
    """Returns the median of an engine's step over what its schedule allows, with its 95% confidence interval.

    Each step is compared with the stage's share of the work in the same round; None where one was not measured.
    """
    ratio = comparison.ratio(name, ALONE)
    if ratio is None:
        return None
    factor = num_microbatches / STYLES[style].microbatches_of_time(num_microbatches)
    return ratio.median * factor, (ratio.low * factor, ratio.high * factor)


def theory_table(comparison: Comparison, styles: Sequence[str], num_microbatches: int) -> str:
    """Returns each schedule's steps over the allowed time, torch's and ours, and ours over torch's."""
    rows = [["schedule", "allowed", "torch", "", "ours", "", "ours over torch's", ""]]
    for style in styles:
        allowed = STYLES[style].microbatches_of_time(num_microbatches)
        cells = [style, f"{allowed:g} t"]
        for name in (torch_name(style), our_name(style)):
            cells += _cells(over_theory(comparison, name, style, num_microbatches))
        rows.append(cells + _cells(_of(comparison.ratio(our_name(style), torch_name(style)))))
    control = comparison.control.figures
    noise = "" if control is None else f"; control {control.ratio.median:.3f}"
    return "\n".join([f"steps over what the schedule allows, with 95% intervals of the median{noise}", *align(rows)])


def pipeline_targets(comparison: Comparison, styles: Sequence[str], num_microbatches: int) -> list[Target]:
    """Returns how much of the allowed time our steps may take; one that was not measured is not met."""
    control = comparison.control.figures
    targets = []
    for style in styles:
        found = over_theory(comparison, our_name(style), style, num_microbatches)
        value, interval = (None, None) if found is None else found
        targets.append(
            Target(
                what=f"{our_name(style)}: step over {STYLES[style].microbatches_of_time(num_microbatches):g} t",
                value=value,
                high=STYLES[style].target,
                interval=interval,
                control=None if control is None else control.ratio.median,
            )
        )
    return targets


def kept_table(kept: Mapping[str, Sequence[Mapping[str, int | None]]]) -> str:
    """Returns what each rank keeps, activations in those of one microbatch on a whole stage.

    Args:
        kept: By engine and rank, bytes of "activations", and of "resting" and "peak" resident memory.
    """
    num_ranks = len(kept[ALONE])
    heads = [f"{what}, rank {rank}" for what in ("live", "resting MiB", "peak MiB") for rank in range(num_ranks)]
    rows = [["engine", *heads]]
    units = [one["activations"] for one in kept[ALONE]]
    for name, ranks in kept.items():
        live = [_over(one["activations"], unit) for one, unit in zip(ranks, units, strict=True)]
        rows.append([name, *live, *(_over(one[what], _MIB) for what in ("resting", "peak") for one in ranks)])
    return "\n".join(["live activations in microbatches of a stage, and resident memory", *align(rows)])


def _of(spread: Spread | None) -> tuple[float, tuple[float, float]] | None:
    return None if spread is None else (spread.median, (spread.low, spread.high))


def _cells(found: tuple[float, tuple[float, float]] | None) -> list[str]:
    return ["-", "-"] if found is None else [f"{found[0]:.3f}", f"[{found[1][0]:.3f}, {found[1][1]:.3f}]"]


def _over(value: int | None, unit: int | None) -> str:
    return "-" if value is None or not unit else f"{value / unit:.2f}"
