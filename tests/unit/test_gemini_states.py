"""States of parameters: which may follow on which, alone, at random, and over the life of a chunk's parameters."""

from __future__ import annotations

import itertools
import random

import pytest

from booster.plugins.gemini.chunk import TensorState, checked_transition

FREE, HOLD, COMPUTE = TensorState.FREE, TensorState.HOLD, TensorState.COMPUTE
ARRIVED, READY = TensorState.HOLD_AFTER_BWD, TensorState.READY_FOR_REDUCE

LEGAL = {
    (FREE, HOLD): "the weights were gathered",
    (FREE, ARRIVED): "an embedding's backward gave a gradient without looking at the weights",
    (HOLD, COMPUTE): "a module that uses them runs",
    (HOLD, FREE): "the weights were released",
    (HOLD, ARRIVED): "the gradient arrived",
    (COMPUTE, HOLD): "the module has ended",
    (COMPUTE, ARRIVED): "the gradient arrived while the module runs again, as under activation checkpointing",
    (ARRIVED, READY): "the gradient went into the chunk's buffer",
    (READY, ARRIVED): "another gradient arrived in the same backward",
    (READY, HOLD): "the gradients were reduced and the weights are still here",
    (READY, FREE): "the gradients were reduced",
}
PAIRS = list(itertools.product(TensorState, repeat=2))


def test_there_are_five_states():
    assert len(TensorState) == 5
    assert len(PAIRS) == 25


@pytest.mark.parametrize(("before", "after"), LEGAL)
def test_what_happens_in_training_is_legal(before, after):
    assert checked_transition("weight", before, after) is after


@pytest.mark.parametrize("state", TensorState)
def test_a_state_may_stay(state):
    assert checked_transition("weight", state, state) is state


@pytest.mark.parametrize(("before", "after"), [pair for pair in PAIRS if pair not in LEGAL and pair[0] is not pair[1]])
def test_everything_else_raises_and_names_the_parameter(before, after):
    with pytest.raises(RuntimeError, match=rf"'layer\.weight' can't go from {before.name} to {after.name}$"):
        checked_transition("layer.weight", before, after)


@pytest.mark.parametrize("seed", range(200))
def test_random_walks_go_only_where_the_table_allows(seed):
    generator = random.Random(seed)
    state, visited = FREE, [FREE]
    for _ in range(60):
        wanted = generator.choice(list(TensorState))
        if wanted is state or (state, wanted) in LEGAL:
            state = checked_transition("weight", state, wanted)
            assert state is wanted
        else:
            with pytest.raises(RuntimeError, match="can't go from"):
                checked_transition("weight", state, wanted)
        visited.append(state)
    assert len(set(visited)) > 2


@pytest.mark.parametrize("start", TensorState)
def test_every_state_leads_back_to_free(start):
    reached, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        for before, after in LEGAL:
            if before is state and after not in reached:
                reached.add(after)
                frontier.append(after)
    assert reached == set(TensorState)
