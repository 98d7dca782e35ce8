"""Passes that repeat are not negotiated again, and ranks that leave the repeated order train as in one process."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_model_cases import Routes
from fsdp_twins import FSDPTwins
from gemini_models import POLICIES, WIDTH, Twins, adamw, square_loss
from harness import run_ranks

from booster import Booster
from booster.comm.fake import fake_world
from booster.errors import DesyncError
from booster.plugins.sharding.collective_order import CollectiveOrder, OrderNegotiation

pytestmark = pytest.mark.on_device

USUAL = [0, 1, 2, 3]
LEAVES = (6, 7, 13)  # steps; before each of them some are replayed


def _skips(rank):
    return [0, 3] if rank == 1 else USUAL


def _takes_another(rank):
    return [0, 4, 3] if rank == 1 else USUAL


def _turns_around(rank):
    return USUAL[::-1] if rank == 1 else USUAL


def _repeats_some(rank):
    return [0, 0, 1, 2, 3, 2] if rank == 1 else USUAL


def _stops_early(rank):
    return [] if rank == 0 else USUAL


def _all_take_another(rank):
    return [0, 4, 3]


DEPARTURES = {
    one.__name__.strip("_"): one
    for one in (_skips, _takes_another, _turns_around, _repeats_some, _stops_early, _all_take_another)
}
PLUGINS = {
    "gemini": (Twins, POLICIES["static"]),
    "gemini, prefetched": (Twins, POLICIES["prefetch"]),
    "gemini, offloaded": (Twins, POLICIES["cpu"]),
    "fsdp": (FSDPTwins, {}),
    "fsdp, grad op": (FSDPTwins, {"sharding_strategy": "SHARD_GRAD_OP"}),
}


def _go(departure, variant):
    def iterate(model, x, backward, rank, step):
        way = DEPARTURES[departure](rank) if step in LEAVES else USUAL
        if variant == "accumulated":
            backward(square_loss(model(-x, USUAL)))
        outputs = []
        if variant == "evaluated":
            with torch.no_grad():
                outputs = [model(x, way).clone()]
        backward(square_loss(model(x, way)))
        return outputs

    return iterate


@contextmanager
def counted_negotiations():
    """Yields a counter of the negotiations of both plugins on this rank."""
    counter = mock.MagicMock()
    with (
        _counted(OrderNegotiation, "exchange", counter),
        _counted(CollectiveOrder, "_agree_on_next", counter),
    ):
        yield counter


def _counted(owner, name, counter):
    method = getattr(owner, name)

    def counted(*args):
        counter()
        return method(*args)

    return mock.patch.object(owner, name, counted)


def negotiations_per_step(plugin):
    """Returns the negotiations of each forward and backward of a model that every rank runs in the same order."""
    make_plugin, arguments = PLUGINS[plugin]
    model = Routes()
    booster = Booster(plugin=make_plugin.make_plugin(mock.Mock(), **arguments))
    model, optimizer, *_ = booster.boost(model, adamw(model))
    counts = []
    with counted_negotiations() as counter:
        for _ in range(7):
            counter.reset_mock()
            booster.backward(
                square_loss(model(torch.randn(2, WIDTH, device=booster.device), list(range(6)))), optimizer
            )
            counts.append(counter.call_count)
            optimizer.step()
            optimizer.zero_grad()
    return counts


def assert_few(counts):
    assert counts[0] > 6, counts  # as many as the chunks or groups ask for
    assert counts[-3:] == [4, 4, 4], counts  # the start and the end of a forward and of a backward


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_uniform_model_negotiates_four_times_a_step(plugin, world_size):
    for counts in run_ranks(negotiations_per_step, world_size, plugin):
        assert_few(counts)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_uniform_model_negotiates_four_times_a_step_on_64_ranks(plugin):
    with fake_world(64):
        assert_few(negotiations_per_step(plugin))
    assert not dist.is_initialized()


def leave(plugin, departure, variant):
    twins_class, arguments = PLUGINS[plugin]
    twins = twins_class(
        lambda: Routes(variant == "checkpointed"), _go(departure, variant), build_plain=Routes, **arguments
    )
    counts = []
    with counted_negotiations() as counter:
        for step in range(16):
            counter.reset_mock()
            twins.backward(step)
            counts.append(counter.call_count)
            twins.step()
    twins.assert_equal()
    assert counts[5] < counts[0] / 2, counts  # it was replayed before ranks left it


@pytest.mark.parametrize("departure", DEPARTURES)
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_leave_a_replayed_order(plugin, departure, world_size):
    run_ranks(leave, world_size, plugin, departure, "simple")


@pytest.mark.parametrize("variant", ["accumulated", "evaluated", "checkpointed"])
@pytest.mark.parametrize("departure", DEPARTURES)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_ranks_leave_a_replayed_order_in_other_loops(plugin, departure, variant):
    run_ranks(leave, 2, plugin, departure, variant)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_different_passes_are_an_error_on_all_ranks_after_replays(plugin):
    run_ranks(_run_different_passes, 2, plugin, fresh=True)


def _run_different_passes(plugin):
    twins_class, arguments = PLUGINS[plugin]
    twins = twins_class(Routes, _go("skips", "simple"), **arguments)
    twins.train(range(5))
    loss = square_loss(twins.model(twins.batch(5), USUAL))
    calls = [lambda: twins.optimizer.backward(loss), lambda: twins.model(twins.batch(5), USUAL)]
    with pytest.raises(DesyncError, match="backward"):
        calls[twins.rank]()


class _Fails(Routes):
    fails = False

    def forward(self, x, way):
        if self.fails:
            way, self.fails = [*way[:2], None], False
        return super().forward(x, way)


@pytest.mark.parametrize("failing", ["all", "one"])
@pytest.mark.parametrize("num_steps", [1, 5])  # negotiated, and replayed
@pytest.mark.parametrize("plugin", PLUGINS)
def test_training_goes_on_after_a_forward_that_failed(plugin, num_steps, failing):
    run_ranks(_fail_in_a_forward, 2, plugin, num_steps, failing)


def _fail_in_a_forward(plugin, num_steps, failing):
    twins_class, arguments = PLUGINS[plugin]
    twins = twins_class(_Fails, _go("skips", "simple"), **arguments)
    twins.train(range(num_steps))
    for step in range(8, 14):
        if step < 12 and (failing == "all" or twins.rank == step % 2):
            twins.raw.fails = True
            with pytest.raises(TypeError):
                twins.model(twins.batch(step), USUAL)
        twins.train([step])
    twins.assert_equal()
