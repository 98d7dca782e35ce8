"""ZB-V: two chunks per stage in a V shape, and deferred weight gradients that fill the bubbles."""

from __future__ import annotations

from booster.errors import ConfigError

from .schedule import Action, ActionKind, PipelineSchedule, register_schedule

# Note [ZB-V schedule]
# A microbatch passes down the stages through their chunks 0, and back up through their chunks 1. So the last stage
# sends to itself, and the first one computes the loss and starts the backward. Let forward F, input gradients B and
# weight gradients W take one beat each. Stage s runs F0 of the first microbatch at beat s, and receives it for F1 at
# beat 2 * p - 1 - s; the beats in between are F0. Alternating F1 and F0 then fill the time until the first gradient,
# and F1 B1 W1 the time until the first one of chunk 0. From there on F0 B0 W0 F1 B1 W1 repeat, and all inputs arrive in
# time. When there are no forwards left, B comes first, as other stages depend on it, and W fills the gaps.


@register_schedule
class ZeroBubbleV(PipelineSchedule):
    """The zero bubble schedule of Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (V-ZB).

    With p stages, F, B and W of equal cost c a chunk, and m >= 2 * p - 2 microbatches, a step takes
    (6 * m + p - 1) * c, the least there can be: the last stage works 6 * m * c, and can't start before (p - 1) * c.
    From 2 * p - 1 microbatches on no stage pauses once it has started; fewer leave bubbles. A stage keeps the
    activations of 2 * p chunks at most, as much as the first stage does with 1F1B.
    """

    name = "zbv"
    defers_weights = True

    def check(self, num_stages: int, num_microbatches: int, num_chunks: int) -> None:
        super().check(num_stages, num_microbatches, num_chunks)
        if num_chunks != 2:
            raise ConfigError(
                f"pp_style='zbv' with num_model_chunks={num_chunks}, but its V has two model chunks on each"
                " stage, one on the way there and one on the way back: write num_model_chunks=2"
            )

    def position(self, stage: int, chunk: int, num_stages: int) -> int:
        return stage if chunk == 0 else 2 * num_stages - 1 - stage

    def order(self, stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Action]:
        # Microbatches are processed in order, so a beat is a kind and a chunk, and its microbatch is the number of
        # equal beats before it. Beats beyond the last microbatch are dropped, as no action depends on them.
        counts = dict.fromkeys(((kind, chunk) for kind in ActionKind for chunk in range(2)), 0)
        order = []
        for kind, chunk in _beats(stage, num_stages, num_microbatches):
            index = counts[kind, chunk]
            if index < num_microbatches:
                order.append(Action(kind, index, chunk))
                counts[kind, chunk] += 1
        return order


def _beats(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[ActionKind, int]]:
    f0, b0, w0 = ((kind, 0) for kind in ActionKind)
    f1, b1, w1 = ((kind, 1) for kind in ActionKind)
    behind = num_stages - stage  # stages from this one to the turn of the V, itself included
    warm_up = [f0] * (2 * behind - 1) + [f1, f0] * stage + [f1, b1, w1] * behind
    steady = [f0, b0, w0, f1, b1, w1] * max(0, num_microbatches - num_stages)
    cool_down = [b0, b1] * stage + [b0, w0] * behind + [w1, w0] * stage
    return warm_up + steady + cool_down
