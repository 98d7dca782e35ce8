"""A hang in words: who is missing from which communication, from what the ranks say of themselves."""

from __future__ import annotations

from booster.fault_tolerance.progress import CollectiveInfo, Progress
from booster.monitor.watchdog import RankStatus, format_report, status_from_json, status_to_json


def operation(number, name="all_reduce", ranks=(0, 1, 2), peer=None):
    return CollectiveInfo(name=name, number=number, ranks=ranks, peer=peer)


def at(current=None, last=None, **arguments):
    place = Progress(phases=("backward", "communication"), seconds=3.0, operation=current, last_operation=last)
    return RankStatus(step=7, idle_seconds=5.0, progress=place, **arguments)


def test_a_note_comes_back_as_it_was():
    one = at(operation(4), operation(3, "send", peer=1), line="train.py:5 in main", num_collectives=9)
    assert status_from_json(status_to_json(one)) == one
    assert status_from_json(status_to_json(at())) == at()


def test_who_has_not_come_is_missing():
    everyone = {0: at(operation(4)), 1: at(None, operation(3), line="train.py:5 in main"), 2: at(operation(4))}
    text = format_report(everyone, 3)
    assert "ranks 0, 2 wait in all_reduce number 4 of ranks 0, 1, 2; missing: rank 1\n" in text
    assert "rank 1 finished step 7 and is in communication in backward for 3.0 s" in text
    assert "at train.py:5 in main" in text


def test_who_gave_no_sign_is_missing_and_named_first():
    text = format_report({0: at(operation(4)), 2: at(operation(4))}, 3)
    assert "missing: rank 1\n  rank 1 did not report" in text


def test_who_was_there_is_not_missing():
    everyone = {0: at(operation(4)), 1: at(None, operation(4)), 2: at(operation(5, name="all_reduce"))}
    assert "rank 0 waits in all_reduce number 4 of ranks 0, 1, 2; all its ranks have entered it" in format_report(
        everyone, 3
    )


def test_an_operation_of_another_group_or_kind_is_another():
    everyone = {0: at(operation(4, ranks=(0, 1))), 1: at(operation(4, ranks=(1, 2))), 2: at(operation(4, "broadcast"))}
    text = format_report(everyone, 3)
    assert "rank 0 waits in all_reduce number 4 of ranks 0, 1; missing: rank 1" in text
    assert "rank 1 waits in all_reduce number 4 of ranks 1, 2; missing: rank 2" in text
    assert "rank 2 waits in broadcast number 4 of ranks 0, 1, 2; missing: ranks 0, 1" in text


def test_the_other_end_of_a_message_is_missing_or_there():
    receiving = at(operation(2, "receive", peer=1))
    assert "missing: rank 1" in format_report({0: receiving, 1: at(None, operation(1, "send", peer=0))}, 2)
    assert "all its ranks have entered it" in format_report(
        {0: receiving, 1: at(None, operation(2, "send", peer=0))}, 2
    )
    assert "missing: rank 1" in format_report({0: receiving, 1: at(None, operation(2, "send", peer=2))}, 3)


def test_the_backends_count_finds_who_is_behind_where_no_operation_is_known():
    everyone = {0: at(num_collectives=10), 1: at(num_collectives=9), 2: at(num_collectives=10)}
    assert "has started 10 collectives of the world group on some ranks; missing: rank 1 (9)" in format_report(
        everyone, 3
    )
    assert "no rank is in a collective of this library" in format_report(
        {0: at(num_collectives=9), 1: at(num_collectives=9)}, 2
    )


def test_who_has_left_says_so():
    text = format_report({0: at(operation(4, ranks=(0, 1))), 1: at(has_left=True)}, 2)
    assert "missing: rank 1" in text
    assert "rank 1 left the Monitor's block after step 7" in text


def test_a_large_world_is_cut_short():
    text = format_report({0: at(operation(1, ranks=tuple(range(64))))}, 64)
    assert "and 47 more" in text
    assert "and 48 more ranks" in text
    assert len(text.splitlines()) < 20
