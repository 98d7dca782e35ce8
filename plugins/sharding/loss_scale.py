"""Loss scalers of the strategies that hold float16 weights, and what of them is logged."""

from __future__ import annotations

from collections.abc import Callable

from booster.mixed_precision.fp16_naive import log_on_master
from booster.mixed_precision.loss_scale_arguments import LossScaleArguments
from booster.mixed_precision.loss_scaler import DynamicLossScaler

__all__ = ["new_loss_scaler"]


def new_loss_scaler(arguments: LossScaleArguments, *, verbose: bool) -> DynamicLossScaler:
    """Returns a scaler for one optimizer, which logs on rank 0.

    Args:
        arguments: Its numbers.
        verbose: Log every skipped step and change; False: the first skipped step alone.
    """
    return arguments.new_scaler(log_on_master if verbose else _report_first_skip())


def _report_first_skip() -> Callable[[str], None]:
    """Returns a report that logs the first skipped step: the first ones of a run are usually skipped."""
    reported: list[str] = []

    def report(text: str) -> None:
        if "skipped" in text and not reported:
            reported.append(text)
            log_on_master(
                f"{text}. More may follow while the scale falls to where gradients fit: start lower with"
                " a smaller initial_scale, see them all with verbose=True, ask optimizer.step_was_skipped"
            )

    return report
