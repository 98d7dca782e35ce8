"""A scheduler continues exactly from its state, from the optimizer's groups, and with groups that came later."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from lr_scheduler_cases import CASES, Halves, N, hyperparameters, optimizer, take
from torch import nn
from torch.optim import AdamW

from booster import Booster, ConfigError, lr_scheduler
from booster.checkpoint_io.formats import json_values
from booster.single_device import SingleDevicePlugin


def through_json(state):
    return json_values.loads(json_values.dumps(state, "state").encode(), "state")


def kinds_of_lr(as_tensor: bool):
    return [torch.tensor(0.1), torch.tensor(0.03)] if as_tensor else [0.1, 0.03]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_state_goes_on_exactly_from_every_step(name, as_tensor):
    for taken in range(N + 2):
        scheduler = CASES[name](optimizer(kinds_of_lr(as_tensor)))
        take(scheduler, taken)
        state = through_json(scheduler.state_dict())
        untouched = copy.deepcopy(state)
        expected = take(scheduler, N + 2 - taken)

        # On a new optimizer, whose own state is not loaded.
        again = CASES[name](optimizer(kinds_of_lr(as_tensor)))
        again.load_state_dict(state)
        assert repr(state) == repr(untouched)
        assert take(again, N + 2 - taken) == expected
        assert again.last_epoch == N + 2
        assert repr(again.state_dict()) == repr(scheduler.state_dict())


@pytest.mark.parametrize("name", CASES)
def test_a_state_does_not_change_along(name):
    scheduler = CASES[name](optimizer(kinds_of_lr(True)))
    take(scheduler, 3)
    state = scheduler.state_dict()
    before = repr(state)
    take(scheduler, 2)
    assert repr(state) == before
    other = CASES[name](optimizer(kinds_of_lr(True)))
    other.load_state_dict(state)
    take(other, 5)
    assert repr(state) == before


@pytest.mark.parametrize("name", ["cosine", "steps", "exponential", "factors", "one cycle"])
@pytest.mark.parametrize("scheduler_first", [False, True])
def test_changes_from_outside_are_saved(name, scheduler_first):
    of = optimizer()
    scheduler = CASES[name](of)
    take(scheduler, 4)
    of.param_groups[0]["lr"] *= 0.5
    states = [scheduler.state_dict(), copy.deepcopy(of.state_dict())]
    expected = take(scheduler, 5)

    again = optimizer([0.7, 0.8])
    other = CASES[name](again)
    for one in (0, 1) if scheduler_first else (1, 0):
        (other, again)[one].load_state_dict(states[one])
    assert take(other, 5) == expected


@pytest.mark.parametrize("name", ["cosine after warm-up", "one cycle", "polynomial"])
def test_a_scheduler_may_be_built_on_a_loaded_optimizer(name):
    of = optimizer()
    scheduler = CASES[name](of)
    take(scheduler, 4)
    states = scheduler.state_dict(), copy.deepcopy(of.state_dict())
    expected = take(scheduler, 5)
    again = optimizer([0.7, 0.8])
    again.load_state_dict(states[1])
    other = CASES[name](again)  # builds on the learning rates of the middle
    other.load_state_dict(states[0])
    assert take(other, 5) == expected


def test_a_state_of_numbers_goes_to_tensors_and_back():
    scheduler = CASES["cosine to a floor"](optimizer([0.125, 0.25]))
    take(scheduler, 3)
    state = scheduler.state_dict()
    other = CASES["cosine to a floor"](optimizer([torch.tensor(lr, dtype=torch.float64) for lr in (0.1, 0.2)]))
    held = [group["lr"] for group in other.optimizer.param_groups]
    other.load_state_dict(state)
    back = CASES["cosine to a floor"](optimizer())
    back.load_state_dict(other.state_dict())
    assert take(back, 5) == take(other, 5) == take(scheduler, 5)
    assert all(one is two["lr"] for one, two in zip(held, other.optimizer.param_groups, strict=True))
    assert [type(lr) for lr in back.get_last_lr()] == [float, float]
    assert [type(lr) for lr in other.get_last_lr()] == [torch.Tensor, torch.Tensor]


def test_objects_keep_their_state_and_functions_are_the_users():
    scheduler = lr_scheduler.LambdaLR(optimizer([1.0]), N, Halves(3))
    state = through_json(scheduler.state_dict())
    assert state["lr_lambdas"] == [{"period": 3}]
    other = lr_scheduler.LambdaLR(optimizer([1.0]), N, Halves(5))
    other.load_state_dict(state)
    assert other.lr_lambdas[0].period == 3
    assert lr_scheduler.LambdaLR(optimizer(), N, lambda step: 1.0).state_dict()["lr_lambdas"] == [None, None]


# In the middle.


@pytest.mark.parametrize("name", CASES)
def test_last_epoch_goes_on_from_the_groups(name):
    walked = take(CASES[name](optimizer()), N + 1)
    for taken in range(1, N + 1):
        scheduler = CASES[name](optimizer())
        take(scheduler, taken)
        of = optimizer([0.7, 0.8])
        of.load_state_dict(copy.deepcopy(scheduler.optimizer.state_dict()))
        again = _with_last_epoch(scheduler, of, taken - 1)
        assert again.last_epoch == taken
        assert hyperparameters(of) == pytest.approx(walked[taken], rel=1e-12, abs=1e-16)
        for seen, expected in zip(take(again, N + 1 - taken), walked[taken:], strict=True):
            assert seen == pytest.approx(expected, rel=1e-12, abs=1e-16)


def _with_last_epoch(scheduler, of, last_epoch):
    settings = {key: getattr(scheduler, key) for key in scheduler.SETTINGS}
    if "milestones" in settings:
        settings["milestones"] = list(getattr(settings["milestones"], "elements", settings["milestones"].__iter__)())
    if hasattr(scheduler, "lr_lambdas"):
        settings["lr_lambda"] = scheduler.lr_lambdas
    if type(scheduler) is lr_scheduler.FlatAnnealingLR:
        settings = {"total_steps": settings["total_steps"], "pct_start": settings["pct_start"]}
    return type(scheduler)(of, **settings, last_epoch=last_epoch)


def test_last_epoch_needs_no_more_than_base_learning_rates():
    of = optimizer([0.1])
    of.param_groups[0]["initial_lr"] = 0.1
    lr_scheduler.CosineAnnealingLR(of, 10, last_epoch=4)
    assert of.param_groups[0]["lr"] == pytest.approx(0.05)


def test_another_schedule_may_go_on():
    of = optimizer([0.1])
    take(lr_scheduler.CosineAnnealingLR(of, 10), 5)
    longer = lr_scheduler.CosineAnnealingLR(of, 20, last_epoch=4)
    walked = take(lr_scheduler.CosineAnnealingLR(optimizer([0.1]), 20), 20)
    for seen, expected in zip(take(longer, 15), walked[5:], strict=True):
        assert seen == pytest.approx(expected, rel=1e-12, abs=1e-16)


# Groups that come later.


@pytest.mark.parametrize("kind", [torch.optim.SGD, AdamW])
@pytest.mark.parametrize("name", [name for name in CASES if name != "objects"])
def test_a_group_that_comes_later_joins_the_curve(name, kind):
    walked = take(CASES[name](optimizer([0.1, 0.03, 0.05], kind)), N + 1)
    for taken in (0, 1, 5, N + 1):
        scheduler = CASES[name](optimizer(kind=kind))
        take(scheduler, taken)
        scheduler.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.05})
        state, groups = through_json(scheduler.state_dict()), copy.deepcopy(scheduler.optimizer.state_dict())
        rest = walked[taken:] if taken <= N else walked[-1:] * 3
        seen = take(scheduler, len(rest) - 1)
        for one, expected in zip(seen[1:], rest[1:], strict=True):
            assert one == pytest.approx(expected, rel=1e-12, abs=1e-16)

        # Saved before the step in which it joins.
        for loads_optimizer in ("before", "after", "never"):
            of = optimizer([0.1, 0.03, 0.9], kind)
            if loads_optimizer == "before":
                of.load_state_dict(copy.deepcopy(groups))
            again = CASES[name](of)
            if loads_optimizer == "after":
                of.load_state_dict(copy.deepcopy(groups))
            again.load_state_dict(state)
            assert take(again, len(rest) - 1) == seen
            assert repr(again.state_dict()) == repr(scheduler.state_dict())


def test_a_group_that_comes_later_is_checked():
    scheduler = lr_scheduler.PolynomialLR(optimizer([0.1]), N)
    take(scheduler, 1)
    scheduler.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 1e-5})
    scheduler.optimizer.step()
    with pytest.raises(ConfigError, match=r"end_lr=0.0001 is more than the learning rate 1e-05 of param group 1"):
        scheduler.step()
    assert scheduler.last_epoch == 1
    by_functions = lr_scheduler.LambdaLR(optimizer(), N, [lambda step: 1.0, lambda step: 0.5])
    by_functions.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigError, match="with 3 functions, or one function for all"):
        by_functions.step()


def test_groups_do_not_go():
    scheduler = lr_scheduler.StepLR(optimizer(), N)
    del scheduler.optimizer.param_groups[1]
    with pytest.raises(ConfigError, match="groups may be added, not removed"):
        scheduler.step()


# Boosted optimizers and checkpoints.


@pytest.mark.parametrize("on_boosted", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_checkpoints_of_boosted_runs(tmp_path, name, on_boosted):
    booster = Booster(plugin=SingleDevicePlugin("cpu"))

    def run():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.03}]
        of = torch.optim.SGD(groups, momentum=0.9)
        scheduler = None if on_boosted else CASES[name](of)
        model, of, _, _, scheduler = booster.boost(model, of, lr_scheduler=scheduler)
        return model, of, CASES[name](of) if on_boosted else scheduler

    def train(model, of, scheduler, num_steps):
        for step in range(num_steps):
            booster.backward(model(torch.full((2, 3), 1.0 + step)).square().mean(), of)
            of.step()
            of.zero_grad()
            scheduler.step()
        return [hyperparameters(of), *(tensor.clone() for tensor in model.state_dict().values())]

    first = run()
    train(*first, 4)
    booster.save(tmp_path / "whole", *first)
    booster.save_lr_scheduler(first[2], tmp_path / "alone.json")
    assert json.loads((tmp_path / "alone.json").read_text())["scheduler"] == type(first[2]).__name__
    expected = train(*first, 5)
    second = run()
    booster.load(tmp_path / "whole", *second)
    found = train(*second, 5)
    assert found[0] == expected[0]
    assert all(torch.equal(one, two) for one, two in zip(found[1:], expected[1:], strict=True))
    third = run()
    booster.load_lr_scheduler(third[2], tmp_path / "alone.json")
    assert train(*third, 5)[0] == expected[0]
