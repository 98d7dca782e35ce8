"""What goes wrong in pipeline stages: one error on all ranks, soon, that says where it began."""

from __future__ import annotations

import copy
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, distributed, run_ranks
from pipeline_cases import SCHEDULES
from pipeline_twins import StagedTwins
from torch import nn

from booster import Booster
from booster.errors import BoosterError, ConfigError, DesyncError
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin

pytestmark = pytest.mark.on_device

MAX_SECONDS = 15.0  # far below the minutes after which a collective times out
BAD = 2  # the microbatch in which it happens, of 0 to 3
# Where a stage fails in the middle of a batch the others are told by gloo. NCCL does not notice that a rank is gone:
# heartbeats end such a run, which tests/faults/test_rank_loss.py is about.
SOON_TOLD: dict[str, Any] = {"fresh": True, "device": "cpu"}
BY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


class MadeUpError(Exception):
    """Of a user's code."""


def at_call(number: int, action):
    """Returns a hook that does nothing until its call of that number."""
    calls = [0]

    def hook(*_):
        calls[0] += 1
        if calls[0] == number:
            action()

    return hook


def fail():
    raise MadeUpError("what the user's code says")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def in_forward(twins, action):
    """On the last stage, after a batch of four."""
    twins.model.unwrap().layers[-1].norm.register_forward_pre_hook(at_call(BAD + 1, action))


def in_backward(twins, action):
    """On the first stage."""
    hook = at_call(BAD + 1, action)

    def watch(module, inputs, output):
        if output.requires_grad:
            output.register_hook(hook)

    twins.model.unwrap().layers[0].norm.register_forward_hook(watch)


def in_criterion(twins, action):
    own, hook = twins.whole.criterion, at_call(BAD + 1, action)

    def criterion(outputs, batch):
        hook()
        return own(outputs, batch)

    twins.whole.criterion = criterion


PLACES = {
    "forward": (in_forward, "forward"),
    "criterion": (in_criterion, "forward"),
    "backward": (in_backward, "backward"),
}


def run_with(place: str, schedule: str, pp_size: int, action, arguments=None) -> tuple[str, str, float]:
    """Returns class and text of what a rank meets in its second batch, and how long that took."""
    twins = StagedTwins("glued_chain", schedule, pp_size, num_microbatches=4, **(arguments or {})).train(1)
    if twins.plugin.dp_rank == 0:
        PLACES[place][0](twins, action)
    begin = time.monotonic()
    try:
        twins.execute(twins.batch(1)[1])
        twins.optimizer.step()
    except Exception as error:
        seconds = time.monotonic() - begin
        texts = [str(error), *getattr(error, "__notes__", [])]
        with pytest.raises(BoosterError):  # and what stands half done is not used
            twins.execute(twins.batch(2)[1])
        return type(error).__name__, "\n".join(texts), seconds
    return "", "no error", 0.0


def stage_of(place: str, schedule: str, pp_size: int) -> int:
    if place == "backward" or schedule == "zbv":
        return 0
    return pp_size - 1


def assert_all_say(found, place: str, stage: int, num_ranks: int) -> None:
    where = f"pipeline stage {stage}, {PLACES[place][1]} of microbatch {BAD} (of 0 to 3)"
    assert len(found) == num_ranks
    for rank, (name, text, seconds) in enumerate(found):
        assert name == ("MadeUpError" if rank == stage else "RankFailedError"), (rank, name, text)
        assert where in text, (rank, text)
        assert "what the user's code says" in text, (rank, text)
        assert seconds < MAX_SECONDS, (rank, seconds)


@pytest.mark.parametrize("place", PLACES)
@BY_SCHEDULE
def test_what_fails_on_one_of_two_stages_fails_on_both(schedule, place):
    found = run_ranks(run_with, 2, place, schedule, 2, fail, **SOON_TOLD)
    assert_all_say(found, place, stage_of(place, schedule, 2), 2)


@pytest.mark.parametrize("place", PLACES)
def test_what_fails_on_one_of_four_stages_fails_on_all(place):
    found = run_ranks(run_with, 4, place, "1f1b", 4, fail, **SOON_TOLD)
    assert_all_say(found, place, stage_of(place, "1f1b", 4), 4)


@pytest.mark.parametrize("arguments", [{"tp_size": 1}, {"dp_outside": False}, {"zero_stage": 1}], ids=str)
def test_what_fails_in_one_replica_fails_in_all(arguments):
    found = run_ranks(run_with, 4, "forward", "1f1b", 2, fail, arguments, **SOON_TOLD)
    for rank, (name, text, seconds) in enumerate(found):
        assert name, rank
        assert "microbatch" in text or "rank" in text, (rank, text)
        assert seconds < MAX_SECONDS, (rank, seconds)
    assert any(name == "MadeUpError" and f"microbatch {BAD} " in text for name, text, _ in found)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.slow
def test_a_stage_that_is_killed_is_noticed_by_the_other(place):
    with pytest.raises(RanksFailed, match="killed by SIGKILL") as caught:
        run_ranks(run_with, 2, place, "1f1b", 2, die, **SOON_TOLD)
    killed = stage_of(place, "1f1b", 2)
    assert [failure.rank for failure in caught.value.failures] == [killed]
    name, text, seconds = caught.value.results[1 - killed]
    assert name == "RankFailedError", (name, text)
    assert f"rank {killed}" in text, text
    # In its backward, the other one has nothing left to do but to ask for the loss.
    assert ("all_reduce" if place == "backward" else "microbatch") in text, text
    assert seconds < MAX_SECONDS


def run_until_killed(num_batches: int) -> tuple[str, str, float]:
    twins = StagedTwins("glued_chain").train(num_batches)
    if dist.get_rank() == 1:
        die()
    begin = time.monotonic()
    try:
        twins.execute(twins.batch(1)[0])
    except BoosterError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "no error", 0.0


@pytest.mark.parametrize("num_batches", [0, 1])
def test_a_stage_that_is_killed_between_batches_is_noticed_by_the_other(num_batches):
    with pytest.raises(RanksFailed, match="killed by SIGKILL") as caught:
        run_ranks(run_until_killed, 2, num_batches, **SOON_TOLD)
    name, text, seconds = caught.value.results[0]
    assert name == "RankFailedError", (name, text)
    assert "rank 1" in text
    assert seconds < MAX_SECONDS


# What ranks give.


@distributed(world_size=2)
def test_an_iterator_that_ends_on_one_rank_alone():
    twins = StagedTwins("glued_chain")
    batches = [twins.batch(step)[0] for step in range(2)][: 2 - dist.get_rank()]
    batches = iter(batches)
    for _ in range(1):
        twins.booster.execute_pipeline(batches, twins.model, twins.whole.criterion, twins.optimizer)
    with pytest.raises(DesyncError, match=r"ended on the ranks \[1\] and not on the ranks \[0\]"):
        twins.booster.execute_pipeline(batches, twins.model, twins.whole.criterion, twins.optimizer)
    twins.execute(twins.batch(2)[0])  # nothing has begun, so that nothing is broken


def broken_loader(batch):
    yield batch
    if dist.get_rank() == 1:
        raise MadeUpError("a file is gone")
    yield batch


@distributed(world_size=2)
def test_an_iterator_that_raises_on_one_rank_alone():
    twins = StagedTwins("glued_chain")
    batches = broken_loader(twins.batch(0)[0])
    twins.booster.execute_pipeline(batches, twins.model, twins.whole.criterion, twins.optimizer)
    with pytest.raises(Exception, match="a file is gone"):
        twins.booster.execute_pipeline(batches, twins.model, twins.whole.criterion, twins.optimizer)


@distributed(world_size=4)
def test_stages_with_other_batches():
    twins = StagedTwins("glued_chain")
    with pytest.raises(DesyncError, match=r"batches with other contents.*plugin\.dp_rank and plugin\.dp_size"):
        twins.execute(twins.batch(dist.get_rank())[1])
    with pytest.raises(DesyncError, match=r"batches of other shapes"):
        twins.execute(twins.batch(0, 4 + dist.get_rank())[1])
    twins.train()
    twins.assert_equal()


@distributed(world_size=2)
def test_what_every_layer_would_have_to_give():
    twins = StagedTwins("glued_chain")  # which captures nothing by hooks
    batch, _ = twins.batch(0)
    twins.model.unwrap().config = SimpleNamespace(output_attentions=True)
    with pytest.raises(ConfigError, match=r"does not capture them .* model\.config\.output_attentions = False"):
        twins.execute(batch)
    twins.model.unwrap().config.output_attentions = False
    twins.train()
    twins.assert_equal()


@distributed(world_size=2, device="cpu")  # on a device only the first batches are compared, without waits later
def test_stages_with_other_batches_late_in_an_epoch():
    twins = StagedTwins("glued_chain")
    twins.train(5)
    with pytest.raises(DesyncError, match="batches with other contents"):
        twins.execute(twins.batch(dist.get_rank())[1])


@distributed(world_size=2)
def test_stages_that_are_asked_for_other_things():
    twins = StagedTwins("glued_chain")
    batch, _ = twins.batch(0)
    with pytest.raises(DesyncError, match="another call"):
        twins.execute(batch, trains=dist.get_rank() == 0)
    with pytest.raises(DesyncError, match="another call"):
        twins.execute(batch, return_outputs=dist.get_rank() == 0)
    twins.model.train(dist.get_rank() == 0)
    with pytest.raises(DesyncError, match="another call"):
        twins.execute(batch)
    twins.model.train()
    twins.train()
    twins.assert_equal()


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("batch", "said"),
    [({}, "no tensor with a dimension"), ({"x": torch.zeros(0, 6, 7)}, "without samples"), ([], "no tensor")],
    ids=str,
)
def test_batches_of_nothing(batch, said):
    twins = StagedTwins("glued_chain")
    with pytest.raises(ConfigError, match=said):
        twins.booster.execute_pipeline(iter([batch]), twins.model, twins.whole.criterion, twins.optimizer)
    twins.train()
    twins.assert_equal()


def run_with_criterion(kind: str) -> tuple[str, str]:
    twins = StagedTwins("glued_chain")
    losses = {
        "vector": lambda outputs, _: outputs.sum(dim=1),
        "detached": lambda outputs, _: outputs.detach().sum(),
        "nothing": lambda outputs, _: None,
    }
    try:
        batch, _ = twins.batch(0)
        twins.booster.execute_pipeline(iter([batch]), twins.model, losses[kind], twins.optimizer)
    except Exception as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "", "no error"


@pytest.mark.parametrize("kind", ["vector", "detached", "nothing"])
def test_a_criterion_that_gives_no_loss(kind):
    (first, first_text), (last, last_text) = run_ranks(run_with_criterion, 2, kind, **SOON_TOLD)
    assert last == "ConfigError", last_text
    assert first == "RankFailedError", first_text
    assert "stage 1" in last_text
    assert "stage 1" in first_text


# What models do.


class Skipping(nn.Module):
    """Leaves a layer out where a number of the batch says it, and looks at values, so that it can't be known before."""

    def __init__(self, around: bool) -> None:
        super().__init__()
        self.around = around
        self.embed = nn.Linear(4, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x, skips):
        first = torch.tanh(self.embed(x))
        hidden, skipped = first, int(skips[0])
        for index, layer in enumerate(self.layers):
            if index != skipped:
                hidden = torch.tanh(layer(hidden))
        return self.head(hidden + first if self.around else hidden)


def run_skipping(skipped: int, around: bool) -> list[tuple[str, str]]:
    torch.manual_seed(0)
    raw = Skipping(around)
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32", split=["layers.2"]))
    whole = copy.deepcopy(raw).to(booster.device)
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    batch = {"x": torch.randn(4, 4).to(booster.device), "skips": torch.full((4,), skipped, device=booster.device)}
    for _ in range(2):
        try:
            found = booster.execute_pipeline(
                iter([batch]), model, lambda outputs, _: outputs.square().mean(), optimizer
            )
        except Exception as error:
            return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
        optimizer.step()
        optimizer.zero_grad()
        expected = whole(**batch).square().mean()
        torch.testing.assert_close(found["loss"], expected.detach(), rtol=1e-6, atol=0)
        own = list(whole.parameters())
        for parameter, gradient in zip(own, torch.autograd.grad(expected, own, allow_unused=True), strict=True):
            parameter.data.sub_(0.0 if gradient is None else 0.1 * gradient)
    return "", "no error"


# Layers 0 and 1 are the first stage's.
@pytest.mark.parametrize("skipped", [0, 2, 3])
def test_a_layer_inside_of_a_stage_may_be_left_out(skipped):
    assert run_ranks(run_skipping, 2, skipped, False) == [("", "no error")] * 2


def test_the_last_layer_of_a_stage_has_to_run():
    found = run_ranks(run_skipping, 2, 1, False, **SOON_TOLD)
    assert [name for name, _ in found] == ["ConfigError", "RankFailedError"], found
    assert all("the model ran 'layers.2' after 'layers.0'" in text for _, text in found), found


def test_a_value_that_goes_round_the_layers():
    found = run_ranks(run_skipping, 2, -1, True, **SOON_TOLD)
    assert [name for name, _ in found] == ["RankFailedError", "ConfigError"], found
    assert "'embed', which an earlier stage holds" in found[1][1]


class ReadingTheEmbedding(nn.Module):
    """Computes its head with the embedding's weight, read or as a module's own, and looks at values, as `Skipping`."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 7, bias=False) if is_tied else None
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers[int(x[0, 0]) < 0 :]:
            hidden = torch.tanh(layer(hidden))
        return nn.functional.linear(hidden, self.embed.weight) if self.head is None else self.head(hidden)


def run_reading(is_tied: bool) -> str:
    torch.manual_seed(0)
    raw = ReadingTheEmbedding(is_tied)
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32", split=["layers.2"]))
    expected = copy.deepcopy(raw).to(booster.device)
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    batch = torch.arange(4, device=booster.device).reshape(2, 2)
    try:
        found = booster.execute_pipeline(
            iter([batch]), model, lambda outputs, _: outputs.square().mean(), optimizer, return_loss=True
        )
    except Exception as error:
        return str(error)
    torch.testing.assert_close(found["loss"], expected(batch).square().mean().detach())
    return "no error"


def test_a_parameter_of_another_stage_that_the_forward_reads():
    found = run_ranks(run_reading, 2, False, **SOON_TOLD)
    assert all("the parameter 'embed.weight'" in text for text in found), found
    assert "head.weight = embedding.weight" in found[1]
    assert run_ranks(run_reading, 2, True) == ["no error"] * 2


def test_a_model_that_runs_all_layers_is_trained():
    assert run_ranks(run_skipping, 2, -1, False) == [("", "no error")] * 2
