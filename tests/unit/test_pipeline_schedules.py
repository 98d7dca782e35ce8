"""Orders of pipeline schedules: those of the published algorithms, and of torch; a user's own; messages that match."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import (
    Action,
    ActionKind,
    PipelineSchedule,
    action_list,
    check_orders,
    incoming_messages,
    message_order,
    register_schedule,
    schedule_from_name,
    schedule_names,
    simulate,
)
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import schedule as registry

CHUNKS = {"gpipe": [1], "1f1b": [1], "interleaved": [2, 3], "zbv": [2]}
TORCH_KINDS = {
    "FORWARD": ActionKind.FORWARD,
    "FULL_BACKWARD": ActionKind.BACKWARD,
    "BACKWARD_INPUT": ActionKind.BACKWARD,
    "BACKWARD_WEIGHT": ActionKind.BACKWARD_WEIGHT,
}


def text(works):
    return " ".join(map(str, works))


def torch_order(cls, stage, num_stages, num_microbatches, num_chunks, chunk_of):
    """The order of one stage according to torch, without its idle slots; `chunk_of` maps torch's stage indices."""
    rounds = max(1, num_microbatches // num_stages)
    this = SimpleNamespace(
        pp_group_size=num_stages,
        rank=stage,
        n_local_stages=num_chunks,
        number_of_rounds=rounds,
        microbatches_per_round=num_microbatches // rounds,
        _num_stages=num_stages * num_chunks,
        num_stages=num_stages * num_chunks,
        _n_microbatches=num_microbatches,
    )
    if issubclass(cls, torch_schedules.PipelineScheduleSingle):
        actions = cls._get_pipeline_order(this)[stage]
    else:
        actions = cls._calculate_single_rank_operations(this, stage)
    return [
        Action(TORCH_KINDS[one.computation_type.name], one.microbatch_index, chunk_of(one.stage_index))
        for one in actions
        if one is not None and one.computation_type.name in TORCH_KINDS
    ]


@pytest.mark.parametrize(
    ("name", "cls"), [("gpipe", torch_schedules.ScheduleGPipe), ("1f1b", torch_schedules.Schedule1F1B)]
)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (2, 5), (4, 4), (4, 9), (8, 19)])
def test_one_chunk_is_ordered_as_in_torch(name, cls, p, m):
    ours = schedule_from_name(name)
    for stage in range(p):
        order, theirs = ours.order(stage, p, m, 1), torch_order(cls, stage, p, m, 1, lambda index: 0)
        if name == "1f1b" and stage == p - 1:
            # torch prints the last stage's forwards with numbers from 1 on, but runs them from 0 on.
            theirs = [Action(one.kind, one.microbatch - (one.kind is ActionKind.FORWARD)) for one in theirs]
        assert text(order) == text(theirs)


# With m = 10 and p = 4 torch too makes two groups of five. It refuses numbers that can't be divided evenly.
@pytest.mark.parametrize(
    ("p", "m", "v"), [(1, 3, 2), (2, 6, 2), (2, 6, 3), (4, 4, 2), (4, 12, 3), (4, 10, 2), (4, 3, 2)]
)
def test_interleaved_is_ordered_as_in_torch(p, m, v):
    ours, cls = schedule_from_name("interleaved"), torch_schedules.ScheduleInterleaved1F1B
    for stage in range(p):
        theirs = torch_order(cls, stage, p, m, v, lambda index: index // p)
        assert text(ours.order(stage, p, m, v)) == text(theirs)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (2, 3), (2, 8), (4, 7), (4, 20), (6, 11)])
def test_zbv_is_ordered_as_in_torch(p, m):
    ours, cls = schedule_from_name("zbv"), torch_schedules.ScheduleZBVZeroBubble

    def without_last_weights(works):
        """Behind a stage's last gradient of inputs no stage waits, so the order of weights there is of no account."""
        last = max(index for index, work in enumerate(works) if work.kind is not ActionKind.BACKWARD_WEIGHT)
        return text(works[: last + 1]), set(works[last + 1 :])

    for stage in range(p):
        theirs = torch_order(cls, stage, p, m, 2, lambda index, stage=stage: int(index != stage))
        assert without_last_weights(ours.order(stage, p, m, 2)) == without_last_weights(theirs)


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 2), (4, 3), (4, 6), (6, 5)])
def test_zbv_with_few_microbatches_warms_up_as_in_torch(p, m):
    """torch leaves out a part of an order for 2 * p - 1 microbatches; ours cools down earlier, and waits less."""
    ours, cls = schedule_from_name("zbv"), torch_schedules.ScheduleZBVZeroBubble
    for stage in range(p):
        order = ours.order(stage, p, m, 2)
        theirs = torch_order(cls, stage, p, m, 2, lambda index, stage=stage: int(index != stage))
        first_weight = [work.kind for work in theirs].index(ActionKind.BACKWARD_WEIGHT)
        assert text(order[:first_weight]) == text(theirs[:first_weight])
        for works in (order, theirs):
            assert len(works) == 6 * m
        assert text(ours.forward_order(stage, p, m, 2)) == text(w for w in theirs if w.kind is ActionKind.FORWARD)


@pytest.mark.parametrize(
    ("name", "stage", "p", "m", "v", "order"),
    [
        ("gpipe", 1, 2, 3, 1, "F0 F1 F2 B0 B1 B2"),
        ("1f1b", 0, 3, 4, 1, "F0 F1 F2 B0 F3 B1 B2 B3"),
        ("1f1b", 2, 3, 2, 1, "F0 B0 F1 B1"),
        ("1f1b", 0, 5, 2, 1, "F0 F1 B0 B1"),
        ("interleaved", 1, 2, 2, 2, "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1"),
        # Three over two stages is one group of three: as one of two and one of one, the second would leave a bubble.
        ("interleaved", 1, 2, 3, 2, "F0 F1 F2 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 B0 B1 B2"),
        ("zbv", 1, 2, 2, 2, "F0 F0.1 F1 F1.1 B0.1 W0.1 B0 B1.1 B1 W0 W1.1 W1"),
    ],
)
def test_orders_written_out(name, stage, p, m, v, order):
    assert text(schedule_from_name(name).order(stage, p, m, v)) == order


@pytest.mark.parametrize("name", CHUNKS)
def test_every_number_of_microbatches_runs_on_every_number_of_stages(name):
    for p, m, v in itertools.product([1, 2, 3, 5], [1, 2, 3, 4, 6, 7, 11], CHUNKS[name]):
        check_orders(schedule_from_name(name), p, m, v)


def test_positions():
    assert [schedule_from_name("1f1b").place(position, 3) for position in range(3)] == [(0, 0), (1, 0), (2, 0)]
    interleaved = [schedule_from_name("interleaved").place(position, 2) for position in range(6)]
    assert interleaved == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    zbv = [schedule_from_name("zbv").place(position, 3) for position in range(6)]
    assert zbv == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(("name", "p", "m"), [*itertools.product(CHUNKS, [1, 3], [2, 7]), ("zbv", 4, 5)])
def test_what_is_sent_is_what_is_received(name, p, m, forward_only):
    schedule, v = schedule_from_name(name), CHUNKS[name][0]
    programs = [action_list(schedule, stage, p, m, v, forward_only=forward_only) for stage in range(p)]
    sent = [step.sends for steps in programs for step in steps if step.sends]
    received = [step.receives for steps in programs for step in steps if step.receives]
    assert len(set(sent)) == len(sent) == (1 if forward_only else 2) * m * (p * v - 1)
    assert set(sent) == set(received)
    assert len(received) == len(sent)
    for stage, steps in enumerate(programs):
        assert all(step.sends.sender == stage for step in steps if step.sends)
        assert all(step.receives.receiver == stage for step in steps if step.receives)
        assert all(step.receives.position == step.position for step in steps if step.receives)
        inbox = incoming_messages(schedule, stage, p, m, v, forward_only=forward_only)
        assert stage not in inbox
        for sender in set(range(p)) - {stage}:
            wanted = [step.sends for step in programs[sender] if step.sends and step.sends.receiver == stage]
            assert inbox.get(sender, []) == wanted


def test_the_turn_of_a_v_is_handed_over_within_the_stage():
    steps = action_list(schedule_from_name("zbv"), 1, 2, 1, 2)
    turn = next(step for step in steps if step.action == Action(ActionKind.FORWARD, 0, 1))
    assert (turn.receives.sender, turn.receives.receiver, turn.receives.position) == (1, 1, 2)
    assert all(
        step.receives is None and step.sends is None for step in steps if step.action.kind is ActionKind.BACKWARD_WEIGHT
    )


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("1f1b", (2, 0, 1), "num_microbatches=0"),
        ("1f1b", (2, 4, 2), "pp_style='interleaved'"),
        ("gpipe", (2, 4, 2), "num_model_chunks=1"),
        ("interleaved", (2, 4, 1), "num_model_chunks=2 or more"),
        ("zbv", (2, 4, 3), "write num_model_chunks=2"),
    ],
)
def test_numbers_that_a_schedule_refuses(name, numbers, message):
    with pytest.raises(ConfigError, match=message):
        schedule_from_name(name).check(*numbers)
    with pytest.raises(ConfigError, match=message):
        action_list(schedule_from_name(name), 0, *numbers)


@pytest.fixture
def known_names(monkeypatch):
    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))


class BackwardAtOnce(PipelineSchedule):
    """One microbatch at a time."""

    name = "at-once"

    def order(self, stage, num_stages, num_microbatches, num_chunks):
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
        return [Action(kind, index) for index in range(num_microbatches) for kind in kinds]


@pytest.mark.usefixtures("known_names")
def test_own_schedule():
    register_schedule(BackwardAtOnce)
    assert schedule_names() == ["1f1b", "at-once", "gpipe", "interleaved", "zbv"]
    own = schedule_from_name("at-once")
    check_orders(own, 3, 4, 1)
    assert simulate(own, 3, 4).length == 4 * 3 * 3
    assert text(own.forward_order(1, 3, 4, 1)) == "F0 F1 F2 F3"


@pytest.mark.usefixtures("known_names")
def test_registering_mistakes():
    register_schedule(BackwardAtOnce)
    register_schedule(BackwardAtOnce)  # a module that is imported twice
    same = type("Other", (BackwardAtOnce,), {})
    with pytest.raises(ConfigError, match="give yours another name"):
        register_schedule(same)
    with pytest.raises(ConfigError, match="write name ="):
        register_schedule(type("Nameless", (PipelineSchedule,), {}))
    with pytest.raises(ConfigError, match="derive it from PipelineSchedule"):
        register_schedule(int)
    with pytest.raises(ConfigError, match="'1f1b', 'at-once', 'gpipe', 'interleaved', 'zbv', or"):
        schedule_from_name("2f2b")


def with_order(change, **attributes):
    """A schedule whose orders are those of 1F1B after a change."""

    def order(self, stage, num_stages, num_microbatches, num_chunks):
        return change(stage, schedule_from_name("1f1b").order(stage, num_stages, num_microbatches, num_chunks))

    return type("Changed", (PipelineSchedule,), {"name": "changed", "order": order, **attributes})()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (with_order(lambda stage, works: works[:-1]), r"for stage 0 of 2 leaves out B2,"),
        (with_order(lambda stage, works: works + works[stage : 2 * stage]), r"for stage 1 of 2 repeats B0,"),
        (with_order(lambda stage, works: [*works, Action(ActionKind.FORWARD, 3)]), r"beyond what there is to do, F3,"),
        (
            with_order(lambda stage, works: [*works, Action(ActionKind.BACKWARD_WEIGHT, 0)]),
            r"beyond what there is to do, W0,",
        ),
        (with_order(lambda stage, works: works[::-1]), r"has B2 before F2,"),
        (with_order(lambda stage, works: works, defers_weights=True), r"leaves out W0, W1, W2,"),
        (
            with_order(
                lambda stage, works: [Action(ActionKind.BACKWARD_WEIGHT, i) for i in range(3)] + works,
                defers_weights=True,
            ),
            r"has W0 before B0,",
        ),
        (with_order(lambda stage, works: works, position=lambda self, s, c, n: s + 1), r"numbers .* \[1, 2\]"),
        (with_order(lambda stage, works: works, place=lambda self, at, n: (1 - at, 0)), r"let them agree"),
        (
            with_order(
                lambda stage, works: works, forward_order=lambda self, *numbers: [Action(ActionKind.FORWARD, 0)]
            ),
            r"forward_order\(\) .* leaves out F1, F2,",
        ),
    ],
)
def test_orders_that_are_refused(schedule, message):
    with pytest.raises(ConfigError, match=message):
        check_orders(schedule, 2, 3, 1)


def test_orders_that_wait_for_each_other_are_refused():
    def change(stage, works):
        return [Action(work.kind, 2 - work.microbatch) for work in works] if stage == 1 else works

    own = with_order(change)
    # Stage 1 asks for microbatch 2 first, stage 0 wants a gradient back before it sends more than two.
    stuck = "stage 1 waits before F2 for F of microbatch 2 at position 0"
    with pytest.raises(ConfigError, match=stuck):
        simulate(own, 2, 3)
    with pytest.raises(ConfigError, match="stage 0 waits before B0 for B of microbatch 0 at position 1"):
        check_orders(own, 2, 3, 1)


def test_programs_are_remembered_by_schedule_and_attributes():
    class Reordered(PipelineSchedule):
        name = "reordered"

        def __init__(self, is_reversed):
            self.is_reversed = is_reversed

        def order(self, stage, num_stages, num_microbatches, num_chunks):
            indices = range(num_microbatches)[:: -1 if self.is_reversed else 1]
            return [Action(kind, index) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for index in indices]

    first, second = action_list(Reordered(False), 0, 2, 2, 1), action_list(Reordered(True), 0, 2, 2, 1)
    assert text(step.action for step in first) == "F0 F1 B0 B1"
    assert text(step.action for step in second) == "F1 F0 B1 B0"
    assert text(step.action for step in action_list(Reordered(False), 0, 2, 2, 1)) == "F0 F1 B0 B1"
    assert schedule_from_name("zbv") == schedule_from_name("zbv") != schedule_from_name("1f1b")


# Communicators that run their operations one after the other, as nccl's do: the worst case of Note [Ordered links] is a
# stage that starts a receive only when it needs it or sends behind it, and then waits for it.


def finishes(sizes, order, *, forward_only):
    """Returns whether all stages get through their actions, if they start their messages in an order."""
    schedule, num_stages, *_ = sizes
    directions = [(stage, is_later) for stage in range(num_stages) for is_later in (True, False)]
    planned = {key: [] for key in directions}
    for message in order:
        for stage in (message.sender, message.receiver):
            planned[stage, message.is_to_later_stage].append(message)
    started = {key: [] for key in directions}  # operations of a stage in a communicator that are not through
    through = set()

    def run_stage(stage):
        for step in action_list(schedule, stage, *sizes[1:], forward_only=forward_only):
            for message in (step.receives, step.sends):
                if message is None or message.sender == message.receiver:
                    continue
                due = planned[stage, message.is_to_later_stage]
                while message in due:
                    first = due.pop(0)
                    assert message == first or first.receiver == stage, "sends precede what is needed before them"
                    started[stage, message.is_to_later_stage].append(first)
                    while first.receiver == stage and first not in through:
                        yield

    def heads():
        found = [queue[0] for queue in started.values() if queue]
        return {message for message in found if found.count(message) == 2}

    running = [run_stage(stage) for stage in range(num_stages)]
    while True:
        before = len(through), len(running), sum(map(len, planned.values()))
        running = [one for one in running if next(one, "ended") != "ended"]
        for message in heads():
            through.add(message)
            for queue in started.values():
                if queue and queue[0] == message:
                    queue.pop(0)
        if before == (len(through), len(running), sum(map(len, planned.values()))):
            return not running and len(through) == len(order)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("num_stages", [2, 3, 4, 6])
@pytest.mark.parametrize("name", CHUNKS)
def test_two_communicators_are_enough_for_all_messages(name, num_stages, forward_only):
    for num_chunks, rounds in itertools.product(CHUNKS[name], (1, 2, 3)):
        sizes = (schedule_from_name(name), num_stages, num_stages * rounds, num_chunks)
        order = message_order(*sizes, forward_only=forward_only)
        assert len(order) == len(set(order))
        assert finishes(sizes, order, forward_only=forward_only)


def test_receives_too_far_ahead_block_what_is_sent_behind_them():
    sizes = (schedule_from_name("1f1b"), 3, 6, 1)
    order = sorted(message_order(*sizes), key=lambda one: (one.is_gradient, one.sender))
    assert not finishes(sizes, order, forward_only=False)
