"""What is said to be usually wrong where ranks wait for each other: by where they are, and whether they can come."""

from __future__ import annotations

import pytest

from booster.fault_tolerance import failure_diagnosis
from booster.fault_tolerance.failure_diagnosis import (
    CALLS,
    JOIN,
    SAVES,
    SAVES_OR_BATCHES,
    TRAINING,
    PeerStatus,
    likely_cause,
)
from booster.fault_tolerance.progress import PHASES, CollectiveInfo, Progress

OPERATION = CollectiveInfo(name="all_reduce", number=2, ranks=(0, 1))


def at(*phases, waits=True):
    communicates = ("communication",) * (waits and bool(phases))
    return Progress(num_steps=3, phases=(*phases, *communicates), operation=OPERATION if waits else None)


def waits(*phases):
    return PeerStatus(progress=at(*phases), state="waits")


def busy(*phases, communicates=False):
    return PeerStatus(progress=at(*phases, waits=communicates), state="busy")


ENDED = PeerStatus(progress=at(), state="ended")


@pytest.mark.parametrize(
    ("waiting", "others", "expected"),
    [
        pytest.param(at("save"), [ENDED], SAVES, id="`if rank == 0: save()` as the last line"),
        pytest.param(at("save", "commit"), [waits()], SAVES, id="a part of a save, and a state_dict()"),
        pytest.param(at("load"), [ENDED], SAVES, id="a load on one rank"),
        pytest.param(at("save write"), [ENDED], SAVES, id="a save in the background"),
        pytest.param(at("save"), [busy()], SAVES, id="a save, and the user's own barrier"),
        pytest.param(at("save"), [waits("boost")], SAVES, id="a save before another boost"),
        pytest.param(at("boost"), [waits("save")], SAVES, id="a boost after others' save"),
        pytest.param(at("save"), [waits("backward")], SAVES_OR_BATCHES, id="a save in the loop of one rank"),
        pytest.param(at("backward"), [waits("save")], SAVES_OR_BATCHES, id="the same seen from the loop"),
        pytest.param(at("data"), [waits("save")], SAVES_OR_BATCHES, id="the same with join_uneven"),
        pytest.param(at("save"), [waits("save"), ENDED], SAVES, id="one of three does not save"),
        pytest.param(at("save"), [waits("save")], "", id="all save"),
        pytest.param(at("save"), [busy("save")], "", id="one is slow in the same save"),
        pytest.param(at("save"), [busy("data")], "", id="one still reads"),
        pytest.param(at("data"), [ENDED], JOIN, id="one broke off the joined loop and ended"),
        pytest.param(at("data"), [waits("backward")], JOIN, id="join_uneven on one rank alone"),
        pytest.param(at("forward"), [waits("data")], JOIN, id="the same seen from the other"),
        pytest.param(at("data"), [busy("data")], "", id="one still reads its next batch"),
        pytest.param(at("data"), [busy()], "", id="one is still in the loop's body"),
        pytest.param(at("backward"), [ENDED], TRAINING, id="fewer batches"),
        pytest.param(at("backward"), [waits("forward")], TRAINING, id="a forward too many"),
        pytest.param(at("step"), [waits("step")], TRAINING, id="the same phase of other steps"),
        pytest.param(at("clip"), [waits()], TRAINING, id="a state_dict() on one rank in the loop"),
        pytest.param(at(), [waits("clip")], TRAINING, id="the same seen from it"),
        pytest.param(at("backward"), [busy("evaluate")], TRAINING, id="one evaluates"),
        pytest.param(at("backward"), [busy("backward")], "", id="one is slow"),
        pytest.param(at("backward"), [waits("backward"), busy()], "", id="one of three is slow elsewhere"),
        pytest.param(at("backward"), [busy()], "", id="one is slow in the user's own code"),
        pytest.param(at(), [ENDED], CALLS, id="a state_dict() on one rank"),
        pytest.param(at("evaluate"), [ENDED], CALLS, id="an evaluation on one rank"),
        pytest.param(at(), [waits()], CALLS, id="different calls"),
        pytest.param(at("boost"), [ENDED], "", id="one ended in set-up"),
        pytest.param(at("backward"), [waits("boost")], "", id="one boosts again"),
        pytest.param(at("backward"), [], "", id="killed, stopped or failed"),
    ],
)
def test_the_hint_fits_the_places(waiting, others, expected):
    assert likely_cause(waiting, others) == expected


def test_only_loops_are_told_of_join_uneven():
    assert "join_uneven" not in SAVES + CALLS
    assert all("join_uneven" in text for text in (SAVES_OR_BATCHES, TRAINING, JOIN))


def test_the_phases_are_those_that_there_are():
    assert set(PHASES) >= failure_diagnosis._OF_SAVES | failure_diagnosis._OF_TRAINING


def test_hints_can_be_joined_to_other_sentences():
    assert not any(text.endswith(".") for text in (SAVES, SAVES_OR_BATCHES, TRAINING, JOIN, CALLS))
