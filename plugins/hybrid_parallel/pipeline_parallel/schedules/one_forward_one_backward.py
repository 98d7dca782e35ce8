"""1F1B: alternating forwards and backwards, which bounds the activations of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from booster.errors import ConfigError

from .schedule import Action, ActionKind, PipelineSchedule, register_schedule


@register_schedule
class OneForwardOneBackward(PipelineSchedule):
    """Alternating forwards and backwards (Narayanan et al. 2019, "PipeDream", section 3.2, with a flush at the end).

    As long as GPipe, (m + p - 1) * t with p stages and m microbatches of cost t each, but stage s keeps the
    activations of min(m, p - s) microbatches only.
    """

    name = "1f1b"

    def check(self, num_stages: int, num_microbatches: int, num_chunks: int) -> None:
        super().check(num_stages, num_microbatches, num_chunks)
        if num_chunks != 1:
            raise ConfigError(
                f"pp_style='1f1b' with num_model_chunks={num_chunks}, but it gives each stage one model chunk:"
                " write num_model_chunks=1, or pp_style='interleaved'"
            )

    def order(self, stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Action]:
        forwards = [Action(ActionKind.FORWARD, index) for index in range(num_microbatches)]
        backwards = [Action(ActionKind.BACKWARD, index) for index in range(num_microbatches)]
        # The first gradient reaches this stage after one forward of each later stage.
        return interleave(forwards, backwards, num_stages - stage - 1)


def interleave(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """Return `warm_up` forwards (at most all), then alternating forwards and backwards, then the rest."""
    warm_up = min(warm_up, len(forwards))
    order = list(forwards[:warm_up])
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        order += pair
    return order + list(backwards[len(forwards) - warm_up :])
