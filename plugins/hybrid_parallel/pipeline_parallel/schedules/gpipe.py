"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from booster.errors import ConfigError

from .schedule import Action, ActionKind, PipelineSchedule, register_schedule


@register_schedule
class GPipe(PipelineSchedule):
    """All forwards, then all backwards (Huang et al. 2019, "GPipe", section 2.3).

    With p stages and m microbatches of cost t each, a step takes (m + p - 1) * t, of which (p - 1) / (m + p - 1) is
    idle. A stage keeps the activations of all m microbatches.
    """

    name = "gpipe"

    def check(self, num_stages: int, num_microbatches: int, num_chunks: int) -> None:
        super().check(num_stages, num_microbatches, num_chunks)
        if num_chunks != 1:
            raise ConfigError(
                f"pp_style='gpipe' with num_model_chunks={num_chunks}, but it gives each stage one model chunk:"
                " write num_model_chunks=1, or pp_style='interleaved'"
            )

    def order(self, stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Action]:
        return [
            Action(kind, index)
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
            for index in range(num_microbatches)
        ]
