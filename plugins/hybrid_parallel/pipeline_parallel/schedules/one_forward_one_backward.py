"""1F1B, plain and interleaved: alternating forwards and backwards, which bounds the activations of a stage."""

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
        return _interleave(forwards, backwards, num_stages - stage - 1)


# A stage runs all microbatches of a group through chunk 0, then through chunk 1, and so on. The first one of a group
# returns to stage 0, for the next chunk, after num_stages forwards. So with groups of at least num_stages no stage is
# idle. The paper has groups of exactly num_stages, and requires a multiple of that. Any other number is divided into as
# many groups, as even as possible: none is smaller, and the step is not longer than with a multiple. Larger groups come
# first, because the first group determines the number of warm-up forwards.
@register_schedule
class Interleaved(PipelineSchedule):
    """1F1B over several chunks a stage (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training ...").

    With p stages, v chunks each, and m >= p microbatches of cost t a stage, a step takes m * t + (p - 1) * t / v.
    Stage s keeps the activations of (v - 1) * g + 2 * (p - s - 1) + 1 chunks at most, where g is the size of the
    largest group: p where it divides m, below 2 * p always. Each microbatch's output is sent v times as often.
    """

    name = "interleaved"

    def check(self, num_stages: int, num_microbatches: int, num_chunks: int) -> None:
        super().check(num_stages, num_microbatches, num_chunks)
        if num_chunks < 2:
            raise ConfigError(
                f"pp_style='interleaved' with num_model_chunks={num_chunks}, but it gives each stage several chunks"
                " of the model: write num_model_chunks=2 or more, or pp_style='1f1b'"
            )

    def order(self, stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Action]:
        sizes = _group_sizes(num_stages, num_microbatches)
        forwards: list[Action] = []
        backwards: list[Action] = []
        first = 0
        for size in sizes:
            group = range(first, first + size)
            forwards += [Action(ActionKind.FORWARD, index, chunk) for chunk in range(num_chunks) for index in group]
            backwards += [
                Action(ActionKind.BACKWARD, index, chunk) for chunk in reversed(range(num_chunks)) for index in group
            ]
            first += size
        # The first gradient comes when the first microbatch has gone through all chunks of all stages. Until a stage
        # gets it, the later stages do two actions for each stage in between, a forward and a backward.
        return _interleave(forwards, backwards, (num_chunks - 1) * sizes[0] + 2 * (num_stages - stage - 1))


def _group_sizes(num_stages: int, num_microbatches: int) -> list[int]:
    num_groups = max(1, num_microbatches // num_stages)
    size, num_larger = divmod(num_microbatches, num_groups)
    return [size + 1] * num_larger + [size] * (num_groups - num_larger)


def _interleave(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """Return `warm_up` forwards (at most all), then alternating forwards and backwards, then the rest."""
    warm_up = min(warm_up, len(forwards))
    order = list(forwards[:warm_up])
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        order += pair
    return order + list(backwards[len(forwards) - warm_up :])
