"""The record of negotiated collectives: when a pass is replayed, and what a rank does that leaves it."""

from __future__ import annotations

from booster.plugins.sharding.collective_order import OrderReplay


class _Rank:
    """One rank that negotiates alone: the outcome of a request is its capital letter."""

    def __init__(self):
        self.participated = []
        self.replay = OrderReplay(self.participated.append)

    def run(self, requests, kind="forward", digest=None):
        """Runs a pass and returns the requests that were negotiated."""
        negotiated = []
        found = self.replay.digest(kind)
        self.replay.begin(kind, replays=found != 0 and digest in (None, found))
        for request in requests:
            outcome = self.replay.replay(request)
            if outcome is None:
                outcome = request.upper()
                self.replay.record(request, outcome)
                negotiated.append(request)
            assert outcome == request.upper()
        self.replay.replay_rest()
        self.replay.end(all_repeat=self.replay.repeats)
        return "".join(negotiated)


def test_a_pass_is_replayed_after_it_has_repeated():
    rank = _Rank()
    assert [rank.run("abc") for _ in range(4)] == ["abc", "abc", "", ""]
    assert rank.participated == []


def test_kinds_of_passes_have_their_own_records():
    rank = _Rank()
    for _ in range(2):
        rank.run("abc"), rank.run("cba", kind="backward")
    assert (rank.run("abc"), rank.run("cba", kind="backward"), rank.run("abc", kind="evaluation")) == ("", "", "abc")


def test_a_rank_that_skips_requests_takes_part_in_their_collectives():
    rank = _Rank()
    rank.run("abcd"), rank.run("abcd")
    assert rank.run("ad") == ""
    assert rank.participated == ["B", "C"]


def test_a_rank_with_another_request_takes_part_in_all_and_negotiates():
    rank = _Rank()
    rank.run("abcd"), rank.run("abcd")
    assert rank.run("axbcd") == "xbcd"
    assert rank.participated == ["B", "C", "D"]


def test_a_rank_that_ends_early_takes_part_in_the_rest():
    rank = _Rank()
    rank.run("abcd"), rank.run("abcd")
    assert rank.run("ab") == ""
    assert rank.participated == ["C", "D"]


def test_after_a_change_a_pass_must_repeat_twice_as_often():
    rank = _Rank()
    rank.run("abc"), rank.run("abc"), rank.run("ab")
    assert [rank.run("abc") for _ in range(4)] == ["abc", "abc", "abc", ""]
    rank.run("ab")
    assert [rank.run("abc") for _ in range(6)] == ["abc"] * 5 + [""]


def test_other_passes_or_ranks_stop_a_replay():
    rank = _Rank()
    rank.run("abc"), rank.run("abc")
    assert rank.run("abc", digest=-1) == "abc"  # another rank has another record
    assert rank.replay.digest("forward") != 0
    rank.replay.begin("forward", replays=True)
    rank.replay.abort()
    assert rank.replay.digest("forward") == 0
    assert [rank.run("abc") for _ in range(3)] == ["abc", "abc", ""]


def test_a_rank_whose_pass_fails_alone_takes_part_in_the_rest_later():
    rank = _Rank()
    rank.run("abcd"), rank.run("abcd")
    rank.replay.begin("forward", replays=True)
    assert rank.replay.replay("a") == "A"
    rank.replay.abort(others_go_on=True)
    assert rank.participated == []
    assert rank.replay.replay("a") is None  # before it negotiates
    assert rank.participated == ["B", "C", "D"]


def test_the_digest_tells_outcomes_apart():
    ranks = [_Rank(), _Rank(), _Rank()]
    for rank, requests in zip(ranks, ("abc", "abc", "abx"), strict=True):
        rank.run(requests), rank.run(requests)
    first, second, third = (rank.replay.digest("forward") for rank in ranks)
    assert first == second != third


def test_requests_outside_of_a_pass_are_not_recorded():
    rank = _Rank()
    rank.replay.record("a", "A")
    assert rank.replay.replay("a") is None
    rank.replay.end(all_repeat=False)
    assert rank.replay.digest("forward") == 0
