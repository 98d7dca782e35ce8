"""The schedule within a budget, against all choices of layers; arguments of checkpoint_activations and of compile."""

from __future__ import annotations

import copy
import itertools
import random
import re

import pytest
import torch
from torch import nn

from booster import Booster, ConfigError, checkpoint_activations
from booster.core.activation_budget import ActivationBudget, LayerCost, choose_schedule
from booster.core.activation_policy import policy_of


def needed(costs, recomputed, keeps_inputs):
    """Returns the bytes that a choice takes."""
    inputs = {name: cost.input_bytes * cost.num_live for name, cost in costs.items()}
    kept = sum(cost.kept_bytes * cost.num_live for name, cost in costs.items() if name not in recomputed)
    if keeps_inputs:
        kept += sum(inputs.values())
    elif recomputed:
        kept += sum(size for name, size in inputs.items() if name not in recomputed)
    else:
        kept += sum(inputs.values())
    fetched = {name: 0 if keeps_inputs else costs[name].input_bytes for name in costs}
    return kept + max((costs[name].kept_bytes + fetched[name] for name in recomputed), default=0)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("keeps_inputs", [True, False])
@pytest.mark.parametrize("num_live", [1, 2])
def test_no_choice_of_layers_that_fits_takes_less_time(seed, keeps_inputs, num_live):
    generator = random.Random(seed)
    costs = {
        str(index): LayerCost(
            input_bytes=generator.choice([1, 2]),
            kept_bytes=generator.randint(3, 9),
            nanoseconds=generator.randint(1, 50),
            num_live=generator.randint(1, num_live),
            position=index + 1,
        )
        for index in range(6)
    }
    names = list(costs)
    choices = [set(one) for size in range(7) for one in itertools.combinations(names, size)]
    sizes = [needed(costs, choice, keeps_inputs) for choice in choices]
    for budget in range(min(sizes), max(sizes) + 2, 3):
        fitting = [choice for choice, size in zip(choices, sizes, strict=True) if size <= budget]
        schedule = choose_schedule(costs, budget, keeps_inputs=keeps_inputs, has_segments=False)
        assert not schedule.has_segments
        time = sum(costs[name].nanoseconds for name in schedule.recomputed)
        assert time <= min(sum(costs[name].nanoseconds for name in one) for one in fitting)
    with pytest.raises(ConfigError, match="give at least budget_bytes=") as raised:
        choose_schedule(costs, 3, keeps_inputs=keeps_inputs)
    least = int(re.search(r"budget_bytes=(\d+), a smaller", str(raised.value))[1])
    choose_schedule(costs, least, keeps_inputs=keeps_inputs)


def test_layers_are_ordered_as_they_run_and_joined_if_they_are_chained():
    costs = {str(index): LayerCost(4, 10, 1, 1, position=4 - index) for index in range(4)}
    schedule = choose_schedule(costs, 4 + 20)
    assert schedule.names == ("3", "2", "1", "0")
    assert schedule.has_segments
    for cost in costs.values():
        cost.num_unchained = 1
    with pytest.raises(ConfigError, match="give at least budget_bytes=26"):
        choose_schedule(costs, 4 + 20)
    assert not choose_schedule(costs, 26).has_segments


# Arguments.


def stack():
    return nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)))


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (nn.Linear(2, 2), {}, "Linear has no stack of equal layers"),
        ("model", {}, "got a str"),
        (stack(), {"policy": "all"}, "give one of 'layers', 'selective', 'budget', 'schedule'"),
        (stack(), {"policy": "schedule"}, "without schedule: write policy='schedule'"),
        (stack(), {"schedule": ["0"]}, "with schedule=..."),
        (stack(), {"policy": "schedule", "schedule": "0"}, "is not a list of names"),
        (stack(), {"policy": "schedule", "schedule": [["0", []]]}, "is not a list of names"),
        (stack(), {"policy": "schedule", "schedule": ["0", ["0"]]}, "has '0' twice"),
        (stack(), {"policy": "schedule", "schedule": ["0", "l1"]}, "names 'l1', which is not a layer"),
        (stack(), {"policy": "schedule", "schedule": [["1", "0"]]}, "a segment with '0' behind '1'"),
        (stack(), {"policy": "budget"}, "without budget_bytes"),
        (stack(), {"budget_bytes": 1000}, "with budget_bytes=1000"),
        (stack(), {"policy": "budget", "budget_bytes": "8GiB"}, "is not a number of bytes"),
        (stack(), {"policy": "budget", "budget_bytes": 0}, "is not a number of bytes"),
        (stack(), {"offload": "nvme"}, "give 'cpu', or leave it out"),
        (
            stack(),
            {"policy": "selective", "offload": "cpu"},
            "'layers', 'budget' or 'schedule' to offload",
        ),
    ],
)
def test_mistakes(model, settings, message):
    with pytest.raises(ConfigError, match=message):
        checkpoint_activations(model, **settings)
    assert not isinstance(model, nn.Module) or all(policy_of(one) is None for one in model.modules())


def test_called_twice_or_too_late():
    model = checkpoint_activations(stack())
    with pytest.raises(ConfigError, match="'0' is checkpointed already"):
        checkpoint_activations(model, policy="selective")
    boosted, *_ = Booster(device="cpu").boost(stack())
    with pytest.raises(ConfigError, match="call it before boost"):
        checkpoint_activations(boosted)


def test_a_copy_has_the_policy_and_the_names():
    model = checkpoint_activations(stack(), policy="budget", budget_bytes=2**30)
    twin = copy.deepcopy(model)
    assert list(twin.state_dict()) == list(stack().state_dict())
    assert isinstance(policy_of(twin[0]), ActivationBudget)
    booster = Booster(device="cpu")
    twin, optimizer, *_ = booster.boost(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    for _ in range(3):
        booster.backward(twin(torch.ones(2, 4, 8)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert policy_of(twin.unwrap()[0]).recomputed == frozenset()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("inductor", "is not a setting of torch.compile"),
        ({"level": 3}, "give True, or a dict with some of fullgraph"),
        ({"backend": "nvfuser2"}, "torch.compile refuses it"),
        ({"mode": "fast"}, "Unrecognized mode=fast"),
        ({"mode": "default", "options": {"x": 1}}, "Either mode or options"),
    ],
)
def test_compile_mistakes(given, message):
    with pytest.raises(ConfigError, match=message):
        Booster(device="cpu", compile=given)


def test_names_and_copies_of_compiled_layers():
    model, names = stack(), list(stack().state_dict())
    booster = Booster(device="cpu", compile={"backend": "eager"})
    boosted, *_ = booster.boost(model)
    twin = copy.deepcopy(boosted)
    assert list(boosted.state_dict()) == list(twin.state_dict()) == names
    assert type(model[0]).__name__ == "TransformerEncoderLayer"
    assert isinstance(model[0], nn.TransformerEncoderLayer)
    x = torch.ones(2, 4, 8)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        assert not torch.equal(boosted.eval()(x), twin.eval()(x))  # the copy does not call the original's layers
