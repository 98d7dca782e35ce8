"""An inf or nan on one rank: all ranks skip the step or none does, nothing changes, and training continues."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from nonfinite_cases import CASES, Training, good_step_with_names, poisoned
from oracles.joined_slices import gathered_over_ranks, joined_over_ranks

from booster.errors import NonfiniteError

pytestmark = pytest.mark.on_device

VALUES = (float("inf"), float("-inf"), float("nan"))
# Against one process in fp32, which rounds no gradient: the share of the way that training moved. fp16 rounds by up to
# 2**-12 and bf16 by 2**-9, some 16 such errors over the layers and steps, as `parity.AT_ONCE` says.
TOLERANCES = {"fp16": 2.5e-2, "bf16": 1.2e-1}

# The last pipeline stage has its copy under its own name; the user's model has both names, and tells the first.
TIED = {"head.weight": "embedding.weight"}

NUM_DEFAULT, NUM_SLOW = 2, 10


def train_with_injections(name: str, seed: int, number: int) -> None:
    """Has one bad step after the other, each followed by a good one."""
    case = CASES[name]
    training = Training(case)
    draw = random.Random(f"{name} {seed}")
    held = good_step_with_names(training)
    for index in range(number):
        _bad_step(training, held, draw, f"{name}, seed {seed}, injection {index}")
        training.good_step()
        _assert_near_twin(training)
    assert training.optimizer.num_skipped_steps == (number if training.optimizer.loss_scaler is not None else 0)


def _bad_step(training: Training, held_here: list[str], draw: random.Random, what: str) -> None:
    culprit, value = draw.randrange(dist.get_world_size()), draw.choice(VALUES)
    held = gathered_over_ranks(held_here)[culprit]
    name = draw.choice(held)
    num_microbatches = 1 if training.case.is_pipelined else draw.choice([1, 2])
    bad_micro_step = draw.randrange(2 if training.case.is_pipelined else num_microbatches)
    place, clips = draw.random(), draw.random() < 0.5
    what += f": {value} of {name} on rank {culprit}, backward {bad_micro_step} of {num_microbatches}, clips: {clips}"
    optimizer, before = training.optimizer, training.memory()
    scaler = optimizer.loss_scaler
    scale = None if scaler is None else scaler.scale
    is_here = dist.get_rank() == culprit
    putting = poisoned(training, name, value, in_backward=bad_micro_step, place=place) if is_here else nullcontext()
    watching = training.booster.debug_nonfinite(training.model, optimizer) if scaler is None else nullcontext()
    raised = ""
    with putting:
        try:
            with watching:
                for ids in training.micro_steps(num_microbatches):
                    training.backward(ids)
                    if clips:
                        training.booster.clip_grad_norm_(optimizer, 1.0)
                    optimizer.step()
                    if scaler is not None:
                        optimizer.zero_grad()
        except NonfiniteError as error:
            raised = str(error)
            optimizer.zero_grad()
    after = training.memory()
    assert len(after) == len(before), what
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True)), f"something changed by {what}"
    if scaler is None:
        told = TIED.get(name, name)
        assert f"rank {culprit} computed nonfinite gradients of {told!r}" in raised, f"{what}: {raised!r}"
        assert len(set(gathered_over_ranks(raised))) == 1, what
        return
    facts = (optimizer.step_was_skipped, optimizer.num_skipped_steps, scaler.state_dict())
    assert facts[0], f"not skipped: {what}"
    assert all(fact == facts for fact in gathered_over_ranks(facts)), what
    assert scaler.scale == max(scale / 2, scaler.min_scale), what


def _assert_near_twin(training: Training) -> None:
    found = joined_over_ranks(training.model)
    names = training.initial
    trained = {name: training.twin.get_parameter(name).detach().cpu() for name in names}
    assert all(bool(found[name].isfinite().all()) for name in names)
    moved = sum(float((trained[one] - names[one]).square().sum()) for one in names) ** 0.5
    apart = sum(float((trained[one] - found[one].float()).square().sum()) for one in names) ** 0.5
    # Weights that are shown rounded differ by that much from what the optimizer keeps of them.
    size = sum(float(names[one].square().sum()) for one in names) ** 0.5
    rounding = {"fp16": 2.0**-12, "bf16": 2.0**-9}[training.case.precision] * size
    assert apart <= TOLERANCES[training.case.precision] * moved + rounding, (apart, moved, rounding)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_skip_a_bad_step_and_go_on(name):
    run_ranks(train_with_injections, CASES[name].world_size, name, 0, NUM_DEFAULT)


# About 200 bad steps for every plugin.
_NUM_CASES = {
    plugin: sum(case.plugin == plugin for case in CASES.values()) for plugin in {case.plugin for case in CASES.values()}
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        (name, seed)
        for name, case in CASES.items()
        for seed in range(1, 1 + -(-200 // (NUM_SLOW * _NUM_CASES[case.plugin])))
    ],
)
def test_many_bad_steps(name, seed):
    run_ranks(train_with_injections, CASES[name].world_size, name, seed, NUM_SLOW, timeout=300)
