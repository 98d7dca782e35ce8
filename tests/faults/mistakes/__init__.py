"""Wrong calls of the whole public surface, by topic."""

from __future__ import annotations

from faults.mistakes import (
    alone,
    boosting,
    checkpoints,
    commands,
    data,
    fine_tuning,
    launching,
    loops,
    optimizers,
    plugins,
    training,
    watching_tools,
)
from faults.mistakes.wrong_call import WrongCall

__all__ = ["all_wrong_calls"]

_TOPICS = (
    *(launching, commands),
    *(plugins, boosting, training, checkpoints, fine_tuning, data, optimizers, watching_tools, loops, alone),
)


def all_wrong_calls(world_size: int) -> list[WrongCall]:
    """Returns the wrong calls that are made on so many ranks: 2, or 1 before there is a world."""
    topics = [topic for topic in _TOPICS if world_size == topic.WORLD_SIZE]
    return [call for topic in topics for call in topic.wrong_calls()]
