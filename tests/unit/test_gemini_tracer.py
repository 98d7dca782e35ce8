"""The record of an iteration: what it answers about the future, how it is written, and how it is followed."""

from __future__ import annotations

import random

import pytest

from booster.plugins.gemini.placement import Cursor, Trace, TraceEvent, Tracer


def moment(*chunks, is_backward=False, other_bytes=0):
    return TraceEvent(chunks=chunks, is_backward=is_backward, other_bytes=other_bytes)


def random_record(generator, num_chunks=6, max_moments=30):
    moments = []
    for _ in range(generator.randrange(1, max_moments)):
        if moments and generator.random() < 0.4:
            chunks = moments[-1].chunks
        else:
            chunks = tuple(generator.sample(range(num_chunks), generator.choice([0, 1, 1, 1, 2, 3])))
        moments.append(moment(*chunks, is_backward=generator.random() < 0.5, other_bytes=generator.randrange(1000)))
    return Trace(tuple(moments))


def naive_next_use(record, chunk, now):
    endless = list(record.events) + list(record.events)
    return next((at for at in range(now, len(endless)) if chunk in endless[at].chunks), None)


def naive_upcoming(record, now, limit):
    found = []
    for later in record.events[now:]:
        found += [chunk for chunk in later.chunks if chunk not in found]
    return found[: max(limit, 0)]


@pytest.mark.parametrize("seed", range(200))
def test_the_record_answers_as_a_plain_search_through_it(seed):
    generator = random.Random(seed)
    record = random_record(generator)
    num_moments = len(record.events)
    for now in range(num_moments + 1):
        for chunk in range(7):
            assert record.next_use(chunk, now) == naive_next_use(record, chunk, now)
        for limit in (-1, 0, 1, 2, 10):
            assert record.upcoming(now, limit) == naive_upcoming(record, now, limit)
        until = generator.randrange(num_moments + 3)
        values = [later.other_bytes for later in record.events[now:until]]
        assert record.peak_other_bytes(now, until) == (max(values) if values else 0)


def test_a_use_now_counts_and_one_that_has_passed_is_of_the_next_iteration():
    record = Trace((moment(0), moment(1), moment(0)))
    assert [record.next_use(0, now) for now in range(4)] == [0, 2, 2, 3]
    assert [record.next_use(1, now) for now in range(4)] == [1, 1, 4, 4]
    assert record.next_use(2, 0) is None


def test_an_empty_record_needs_nothing():
    record = Trace(())
    assert record.next_use(0, 0) is None
    assert record.upcoming(0, 3) == []
    assert record.peak_other_bytes(0, 2) == 0
    assert Cursor(record).advance([0], False) == 0


def test_upcoming_chunks_are_those_of_this_iteration():
    record = Trace((moment(0), moment(1), moment(1, 2), moment(0)))
    assert record.upcoming(0, 9) == [0, 1, 2]
    assert record.upcoming(2, 9) == [1, 2, 0]
    assert record.upcoming(4, 9) == []


def test_equal_records_are_equal_whatever_they_computed():
    first, second = Trace((moment(0), moment(1))), Trace((moment(0), moment(1)))
    assert first == second
    assert hash(first) == hash(second)
    assert first != Trace((moment(1), moment(0)))
    assert repr(first) == f"Trace(events={first.events!r})"


def test_the_tracer_writes_down_what_happens():
    tracer = Tracer()
    tracer.record_other_bytes(5)  # the batch
    tracer.record_use([3, 1, 3], False)
    tracer.record_other_bytes(2)
    tracer.record_use(iter([1]), False)
    for num_bytes in (7, 9, 8):
        tracer.record_other_bytes(num_bytes)
    tracer.record_use([], True)
    tracer.record_use([1], True)
    tracer.record_other_bytes(4)
    assert tracer.trace() == Trace(
        (
            TraceEvent(chunks=(3, 1), is_backward=False, other_bytes=5),
            TraceEvent(chunks=(1,), is_backward=False, other_bytes=9),
            TraceEvent(chunks=(), is_backward=True, other_bytes=0),
            TraceEvent(chunks=(1,), is_backward=True, other_bytes=4),
        )
    )


def follow(cursor, moments):
    cursor.restart()
    return [cursor.advance(later.chunks, later.is_backward) for later in moments]


@pytest.mark.parametrize("seed", range(200))
def test_the_cursor_follows_iterations_that_leave_modules_out(seed):
    generator = random.Random(seed)
    record = random_record(generator)
    cursor = Cursor(record)
    assert follow(cursor, record.events) == list(range(len(record.events)))
    taken = [later for later in record.events if generator.random() < 0.6]
    reached = follow(cursor, taken)
    # What is left over of a sequence can be found in it in order, and the earliest way to do so is the cursor's.
    assert reached == sorted(set(reached))
    for at, later in zip(reached, taken, strict=True):
        assert (record.events[at].chunks, record.events[at].is_backward) == (later.chunks, later.is_backward)


@pytest.mark.parametrize("seed", range(200))
def test_the_cursor_survives_any_other_iteration(seed):
    generator = random.Random(seed)
    record, other = random_record(generator), random_record(generator, num_chunks=9)
    cursor = Cursor(record, lookahead=generator.choice([1, 2, 64]))
    reached = follow(cursor, other.events)
    assert reached == sorted(reached)
    assert all(0 <= at < len(record.events) for at in reached)
    assert cursor.now == reached[-1]
    follow(cursor, [])
    assert cursor.now == 0


def test_the_cursor_stays_at_what_the_record_does_not_foresee():
    cursor = Cursor(Trace((moment(0), moment(1), moment(2), moment(2, is_backward=True))))
    unforeseen = (moment(0), moment(7), moment(1), moment(1), moment(0), moment(2, is_backward=True))
    assert follow(cursor, unforeseen) == [0, 0, 1, 1, 1, 3]


def test_forward_and_backward_of_a_module_are_told_apart():
    cursor = Cursor(Trace((moment(0), moment(0, is_backward=True), moment(0))))
    assert follow(cursor, (moment(0), moment(0))) == [0, 2]
    assert follow(cursor, (moment(0, is_backward=True),)) == [1]


def test_the_cursor_looks_ahead_a_bounded_way_and_catches_up():
    record = Trace((*(moment(0) for _ in range(100)), *(moment(chunk) for chunk in range(1, 101))))
    cursor = Cursor(record, lookahead=10)
    cursor.advance([0], False)
    # 99 moments are left out; every miss lets the next search go 10 further.
    reached = [cursor.advance([chunk], False) for chunk in range(1, 101)]
    first_hit = next(index for index, at in enumerate(reached) if at)
    assert reached[:first_hit] == [0] * first_hit
    assert reached[first_hit:] == list(range(100 + first_hit, 200))
    assert first_hit == 10  # after 10 misses the search goes from moment 1 to before 111, and this is 110
    cursor.restart()
    assert cursor.advance([1], False) == 0
