"""Where an inf or nan comes from, and that all ranks decide together whether a step is skipped."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from harness import distributed, run_ranks
from nonfinite_cases import CASES, SCALE, Training, poisoned
from oracles.joined_slices import gathered_over_ranks, joined_over_ranks
from torch import nn

from booster import Booster, ConfigError
from booster.device import current_device
from booster.errors import NonfiniteError
from booster.plugins import TorchDDPPlugin

pytestmark = pytest.mark.on_device

BAD = "blocks.1.mlp_norm"
BF16 = [name for name, case in CASES.items() if case.precision == "bf16"]


def all_hooks(model: nn.Module) -> list[int]:
    modules = [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules()]
    return modules + [len(one._backward_hooks or ()) for one in model.parameters()]


@contextmanager
def lines_of_log() -> Iterator[list[str]]:
    """Gives what this rank writes to the library's log."""
    found: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("booster.dist_logger.booster"), Keeping()
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def nan_on_rank(module: nn.Module, culprit: int) -> torch.utils.hooks.RemovableHandle | None:
    if dist.get_rank() != culprit:
        return None
    return module.register_forward_hook(lambda module, inputs, output: output * float("nan"))


# Losses.


def a_module_gives_nan(name: str) -> None:
    training = Training(CASES[name])
    hooks = all_hooks(training.model.unwrap())
    training.good_step()
    culprit = 0 if training.case.is_pipelined else 1
    before = training.memory()
    putting = nan_on_rank(training.model.unwrap().get_submodule(BAD), culprit)
    with pytest.raises(NonfiniteError) as caught, training.booster.debug_nonfinite(training.model, training.optimizer):
        training.backward(training.batch()[1])
    if putting is not None:
        putting.remove()
    text = str(caught.value)
    assert f"on rank {culprit} the first module with an output that is not finite was {BAD!r} (its inputs were" in text
    # The last stage has the loss, and ranks that share layers all have it.
    spreads = training.booster.plugin.dp_size == 1
    assert ("nan on rank 0, nan on rank 1" in text) == (spreads and not training.case.is_pipelined), text
    assert "nan on rank 1" in text
    assert "parameters that are not finite: none" in text
    assert len(set(gathered_over_ranks(text))) == 1
    training.optimizer.zero_grad()
    assert all(torch.equal(old, new) for old, new in zip(before, training.memory(), strict=True))
    assert all_hooks(training.model.unwrap()) == hooks
    with training.booster.debug_nonfinite(training.model):
        training.good_step()
    assert all_hooks(training.model.unwrap()) == hooks
    assert all(bool(one.isfinite().all()) for one in joined_over_ranks(training.model).values())


@pytest.mark.parametrize("name", BF16)
def test_a_module_that_gives_nan_is_named_on_all_ranks(name):
    run_ranks(a_module_gives_nan, CASES[name].world_size, name)


class Rooted(nn.Module):
    """Takes the root of differences that are zero where it is told so: finite, with an infinite slope."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, is_steep: bool = False) -> torch.Tensor:
        """Maps (batch, 3) to (batch, 1)."""
        hidden = self.inner(self.first(x))
        mask = torch.zeros(4, device=current_device()).masked_fill(
            torch.tensor([True, False, False, False], device=current_device()), float("-inf")
        )
        hidden = hidden * torch.softmax(mask, dim=0)
        if is_steep:
            hidden = hidden + (hidden - hidden.detach()).abs().sqrt()
        return self.last(hidden)


def boosted(precision: str | None = None) -> tuple[Booster, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    raw = Rooted()
    plugin = TorchDDPPlugin() if dist.get_world_size() > 1 else None
    booster = Booster(plugin=plugin, mixed_precision=precision)
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9))
    return booster, model, optimizer


@distributed(world_size=[1, 2])
def test_weights_and_criterion_are_named(world_size):
    booster, model, optimizer = boosted()
    with booster.debug_nonfinite(model, optimizer):
        loss = model(torch.ones(2, 3, device=current_device())).mean()
        with pytest.raises(NonfiniteError, match="outputs of all modules were finite, so the criterion computed it"):
            booster.backward(loss / 0.0, optimizer)
        optimizer.zero_grad()
        with torch.no_grad():
            model.unwrap().inner[0].weight[0, 0] = float("inf")
        with pytest.raises(NonfiniteError, match=r"parameters that are not finite: 'inner\.0\.weight'"):
            booster.backward((model(torch.ones(2, 3, device=current_device())) * float("inf")).mean(), optimizer)


@distributed(world_size=2)
def test_inputs_that_are_not_finite_are_told_from_modules_that_make_them():
    booster, model, optimizer = boosted()
    x = torch.full((2, 3), float("nan") if dist.get_rank() == 1 else 1.0, device=current_device())
    with booster.debug_nonfinite(model, optimizer), pytest.raises(NonfiniteError) as caught:
        booster.backward(model(x).mean(), optimizer)
    assert "nan on rank 1 of 2" in str(caught.value)
    assert "on rank 1 the first module with an output that is not finite was 'first' (its inputs were not" in str(
        caught.value
    )


@distributed(world_size=2)
def test_a_bad_micro_step_can_be_left_out():
    booster, model, optimizer = boosted()
    before = [one.detach().clone() for one in model.parameters()]
    with (
        booster.debug_nonfinite(model, optimizer),
        pytest.raises(NonfiniteError),
        booster.accumulate(model, optimizer, 2),
    ):
        booster.backward(model(torch.full((2, 3), float("nan"), device=current_device())).mean(), optimizer)
    optimizer.zero_grad()
    assert optimizer.num_microbatches == 0
    for index in range(2):
        with booster.accumulate(model, optimizer, 2) as is_last:
            assert is_last == (index == 1)
            booster.backward(model(torch.ones(2, 3, device=current_device())).mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    assert all(bool(one.isfinite().all()) for one in model.parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


# Gradients.


@distributed(world_size=[1, 2])
def test_the_place_where_backward_met_it_is_named(world_size):
    booster, model, optimizer = boosted()
    before = [one.detach().clone() for one in model.parameters()]
    culprit = world_size - 1
    with booster.debug_nonfinite(model, optimizer):
        booster.backward(
            model(torch.ones(2, 3, device=current_device()), is_steep=dist.get_rank() == culprit).mean(), optimizer
        )
        with pytest.raises(NonfiniteError) as caught:
            booster.clip_grad_norm_(optimizer, 1.0)
    text = str(caught.value)
    held = "'first.weight', 'first.bias', 'inner.0.weight', 'inner.0.bias'"
    assert re.search(rf"gradients are not finite after \d+ steps: those of {held};", text), text
    made = "'inner.0.bias', 'inner.0.weight', 'first.bias', 'first.weight'"
    assert f"rank {culprit} computed nonfinite gradients of " in text
    assert all(name in text.partition("computed nonfinite gradients of ")[2] for name in made.split(", "))
    assert ", first at the output of 'inner" in text
    assert text.count("computed nonfinite gradients of") == 1
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@distributed(world_size=2)
def test_the_log_says_the_same_and_training_continues():
    booster, model, optimizer = boosted()
    x = torch.full((2, 3), float("nan") if dist.get_rank() == 1 else 1.0, device=current_device())
    with lines_of_log() as lines, booster.debug_nonfinite(model, optimizer, action="log"):
        booster.backward(model(x).mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert any(bool(one.isnan().any()) for one in model.parameters()), "nothing was to be held back"
    if dist.get_rank() == 0:
        assert len(lines) == 2
        assert re.match(r"the loss is not finite after \d+ steps: nan on rank 1 of 2", lines[0])
        assert "gradients are not finite" in lines[1]
        assert "rank 1 computed nonfinite gradients of" in lines[1]
    else:
        assert lines == []


@distributed(world_size=2)
def test_an_overflow_that_is_skipped_is_a_line_of_the_log():
    training = Training(CASES["zero 1 fp16"])
    # Its second gradient.
    putting = poisoned(training, "norm.weight", float("inf"), in_backward=1) if dist.get_rank() == 1 else nullcontext()
    with (
        putting,
        lines_of_log() as lines,
        training.booster.debug_nonfinite(training.model, training.optimizer),
    ):
        training.good_step()
        training.backward(training.batch()[1])
        training.booster.clip_grad_norm_(training.optimizer, 1.0)
        training.optimizer.step()
        training.optimizer.zero_grad()
        assert training.optimizer.step_was_skipped
        training.good_step()
    told = [line for line in lines if "not finite" in line]
    assert len(told) == (1 if dist.get_rank() == 0 else 0)
    if told:
        assert "those of 'norm.weight'; rank 1 computed nonfinite gradients of 'norm.weight'" in told[0]
        assert f"The step with loss scale {SCALE:g} is skipped" in told[0]


# One decision.


def change_after_the_sum(name: str, parameter: str, culprit: int) -> None:
    """What one rank alone holds makes all of them skip, also where others should hold the same."""
    training = Training(CASES[name])
    training.good_step()
    optimizer, before = training.optimizer, training.memory()
    training.backward(training.batch()[1])
    if dist.get_rank() == culprit:
        training.model.unwrap().get_parameter(parameter).grad.view(-1)[0] = float("nan")
    optimizer.step()
    optimizer.zero_grad()
    assert gathered_over_ranks(optimizer.step_was_skipped) == [True] * dist.get_world_size()
    assert all(torch.equal(old, new) for old, new in zip(before, training.memory(), strict=True))
    training.good_step()
    assert len(set(gathered_over_ranks(str(optimizer.loss_scaler.state_dict())))) == 1


@pytest.mark.parametrize("name", ["ddp fp16", "ddp fp16_naive", "ddp fp16_apex"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_replicas_ask_each_other(name, culprit):
    run_ranks(change_after_the_sum, 2, name, "blocks.1.up.weight", culprit)


def copies_differ(name: str, parameter: str, culprit: int) -> None:
    training = Training(CASES[name])
    training.good_step()
    before = training.memory()
    with poisoned(training, parameter, float("nan")) if dist.get_rank() == culprit else nullcontext():
        training.backward(training.batch()[1])
    training.optimizer.step()
    training.optimizer.zero_grad()
    assert gathered_over_ranks(training.optimizer.step_was_skipped) == [True] * dist.get_world_size()
    assert all(torch.equal(old, new) for old, new in zip(before, training.memory(), strict=True))
    training.good_step()


@pytest.mark.parametrize("culprit", [0, 1])
def test_copies_over_tensor_parallel_ranks_count_for_the_decision(culprit):
    run_ranks(copies_differ, 2, "hybrid tp fp16", "blocks.1.mlp_norm.weight", culprit)


# Mistakes.


@distributed(world_size=1)
def test_mistakes_are_told():
    booster, model, optimizer = boosted()
    with pytest.raises(ConfigError, match=r"action='warn'.*write action='raise' .*or action='log'"):
        booster.debug_nonfinite(model, optimizer, action="warn").__enter__()
    with pytest.raises(ConfigError, match="debug_nonfinite"):
        booster.debug_nonfinite(model.unwrap(), optimizer)
    with pytest.raises(ConfigError, match="debug_nonfinite"):
        booster.debug_nonfinite(model, optimizer.optim)
