"""How long a rank may wait: what is taken, what the launch sets, and who uses it."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from booster.checkpoint_io import GeneralCheckpointIO
from booster.comm import ErrorBarrier, new_group, new_mesh, timeout_scope
from booster.errors import ConfigError
from booster.fault_tolerance.timeouts import DEFAULT_TIMEOUTS, Timeouts, current_timeout, set_timeouts, timeouts
from booster.kernels.shared_memory import SharedMemory, SharedMemoryError
from booster.launch.launch import destroy_world, launch

NAMES = {"training": "timeout_seconds", "setup": "setup_timeout_seconds", "checkpoint": "checkpoint_timeout_seconds"}


@pytest.fixture(autouse=True)
def _no_launch():
    yield
    destroy_world()
    set_timeouts(None)


def test_the_defaults_are_those_of_the_launch():
    assert timeouts() == DEFAULT_TIMEOUTS == Timeouts(training=600, setup=1800, checkpoint=1800)
    launch(0, 1, "", 0, verbose=False)
    assert timeouts() == DEFAULT_TIMEOUTS


def test_a_launch_sets_them_until_it_is_left():
    launch(0, 1, "", 0, verbose=False, timeout_seconds=3, setup_timeout_seconds=4, checkpoint_timeout_seconds=5)
    assert timeouts() == Timeouts(training=3, setup=4, checkpoint=5)
    destroy_world()
    assert timeouts() == DEFAULT_TIMEOUTS


def test_a_world_that_the_user_destroyed_takes_its_limits_with_it():
    launch(0, 1, "", 0, verbose=False, timeout_seconds=3)
    dist.destroy_process_group()
    launch(0, 1, "", 0, verbose=False)
    assert timeouts() == DEFAULT_TIMEOUTS


@pytest.mark.parametrize("field", NAMES)
@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, 1e-6, 1e12, True, None, "600"])
def test_what_is_no_time_to_wait_is_refused(field, seconds):
    with pytest.raises(ConfigError, match=field):
        Timeouts(**{field: seconds})
    with pytest.raises(ConfigError, match=NAMES[field]):
        launch(0, 1, "", 0, verbose=False, **{NAMES[field]: seconds})
    assert not dist.is_initialized()
    assert timeouts() == DEFAULT_TIMEOUTS


@pytest.mark.parametrize("name", NAMES.values())
def test_a_second_launch_with_another_limit_names_both(name):
    launch(0, 1, "", 0, verbose=False, **{name: 7})
    with pytest.raises(ConfigError, match=f"before with {name}=7 and now with {name}=8"):
        launch(0, 1, "", 0, verbose=False, **{name: 8})


def test_a_launch_over_the_users_world_leaves_that_alone_and_sets_the_limits_of_new_groups():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = _seconds_of(dist.group.WORLD)
    launch(0, 1, "", 0, verbose=False, timeout_seconds=3, setup_timeout_seconds=4)
    with timeout_scope("setup"):
        assert _seconds_of(dist.group.WORLD) == before
        group = new_group([0])
        assert _seconds_of(group) == 4
    assert (_seconds_of(dist.group.WORLD), _seconds_of(group)) == (before, 3)


def test_timeout_scopes_nest_and_end_after_errors():
    launch(0, 1, "", 0, verbose=False, timeout_seconds=3, setup_timeout_seconds=4, checkpoint_timeout_seconds=5)
    followed = [dist.group.WORLD, new_group([0])]
    theirs = dist.new_group([0])
    known = _seconds_of(theirs)

    def waits(seconds):
        return current_timeout() == seconds and {_seconds_of(group) for group in followed} == {seconds}

    @timeout_scope("checkpoint")
    def fail():
        assert waits(5)
        raise ZeroDivisionError

    assert waits(3)
    with timeout_scope("setup"):
        assert waits(4)
        with pytest.raises(ZeroDivisionError):
            fail()
        assert waits(4)
        followed.append(new_mesh("cpu", (1, 1), ("replica", "shard")).get_group("shard"))
        with timeout_scope("setup"):
            assert waits(4)
        assert waits(4)
        assert _seconds_of(theirs) == known
    assert waits(3)


def test_a_timeout_scope_decorates_a_function_each_call_of_which_is_a_block():
    seen = []

    @timeout_scope("checkpoint")
    def save(depth):
        """Saves."""
        seen.append(current_timeout())
        if depth:
            save(depth - 1)

    set_timeouts(Timeouts(training=3, checkpoint=5))
    save(1)
    save(0)
    assert seen == [5, 5, 5]
    assert current_timeout() == 3
    assert save.__doc__ == "Saves."


def test_a_block_of_another_thread_that_ends_first_leaves_the_other_kind():
    set_timeouts(Timeouts(training=3, setup=4, checkpoint=5))
    is_within, may_end = threading.Event(), threading.Event()

    def outlive():
        with timeout_scope("checkpoint"):
            is_within.set()
            may_end.wait(60)

    thread = threading.Thread(target=outlive)
    with timeout_scope("setup"):
        thread.start()
        assert is_within.wait(60)
        assert current_timeout() == 5
    assert current_timeout() == 5, "the other thread is in its block still"
    may_end.set()
    thread.join(60)
    assert current_timeout() == 3


def test_a_backend_whose_limit_cannot_be_changed_is_left_alone():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = new_mesh("cpu", (2, 2), ("replica", "shard"))
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert dist.get_process_group_ranks(mesh.get_group("shard")) == [0, 1]
    assert dist.get_process_group_ranks(mesh.get_group("replica")) == [0, 2]
    with timeout_scope("setup"):
        assert new_group([2, 3]) is None


def test_a_mesh_without_a_world_is_refused():
    with pytest.raises(ConfigError, match=r"1 x 2 ranks needs a process group.*launch"):
        new_mesh("cpu", (1, 2), ("replica", "shard"))


def test_checkpoints_wait_as_long_as_the_launch_says_unless_they_are_told():
    set_timeouts(Timeouts(checkpoint=7))
    assert ErrorBarrier(name="a")._timeout_seconds == 7
    assert ErrorBarrier(name="b", timeout_seconds=2)._timeout_seconds == 2
    assert GeneralCheckpointIO().saver._timeout_seconds is None, "asked at each save, as the launch may come later"
    assert GeneralCheckpointIO(timeout_seconds=2).saver._timeout_seconds == 2


def test_shared_memory_waits_as_long_as_it_was_told_last():
    memory, ticket = SharedMemory.create(2, 60.0)
    other = SharedMemory.attach(ticket, 2, 1, 60.0)
    memory.enable()
    other.enable()
    memory.set_timeout(0.2)
    with pytest.raises(SharedMemoryError, match=r"timed out after 0\.2 s"):
        memory.all_reduce(torch.ones(3), "sum", 1)


def _seconds_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
