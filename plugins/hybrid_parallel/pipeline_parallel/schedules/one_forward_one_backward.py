"""1F1B: alternating forwards and backwards, which bounds the activations of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.schedule import PipelineSchedule, register_schedule
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.work import Kind, Work

__all__ = ["OneForwardOneBackward", "take_turns"]


@register_schedule
class OneForwardOneBackward(PipelineSchedule):
    """Alternating forwards and backwards (Narayanan et al. 2019, "PipeDream", section 3.2, with a flush at the end).

    As long as GPipe, (m + p - 1) * t with p stages and m microbatches of cost t each, but stage s keeps the
    activations of min(m, p - s) microbatches only.
    """

    name = "1f1b"

    def check(self, num_stages: int, num_micro_batches: int, num_chunks: int) -> None:
        super().check(num_stages, num_micro_batches, num_chunks)
        if num_chunks != 1:
            raise ConfigError(
                f"pp_style='1f1b' with num_model_chunks={num_chunks}, but it gives each stage one piece of the model:"
                " write num_model_chunks=1, or pp_style='interleaved'"
            )

    def order(self, stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> list[Work]:
        forwards = [Work(Kind.FORWARD, index) for index in range(num_micro_batches)]
        backwards = [Work(Kind.BACKWARD, index) for index in range(num_micro_batches)]
        # The first gradient reaches this stage after one forward of each later stage.
        return take_turns(forwards, backwards, num_stages - stage - 1)


def take_turns(forwards: Sequence[Work], backwards: Sequence[Work], warm_up: int) -> list[Work]:
    """Return `warm_up` forwards (all, if there are fewer), then alternating forwards and backwards, then the rest."""
    warm_up = min(warm_up, len(forwards))
    order = list(forwards[:warm_up])
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        order += pair
    return order + list(backwards[len(forwards) - warm_up :])
