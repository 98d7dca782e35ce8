"""The text of messages: first lines of errors, lists of names and of ranks."""

from __future__ import annotations

from booster.errors import add_note, first_line, format_list, format_ranks


def test_the_first_line_of_an_error():
    assert first_line(ValueError("\n one \ntwo")) == "one"
    assert first_line(ValueError()) == ""


def test_lists_are_limited():
    assert format_list([]) == ""
    assert format_list(["a", "b"], 2) == "a, b"
    assert format_list(iter("abcd"), 2) == "a, b and 2 more"
    assert format_list(range(11)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 1 more"


def test_ranks():
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([1, 2]) == "ranks 1, 2"
    assert format_ranks(range(20), 3) == "ranks 0, 1, 2 and 17 more"


class WithoutNotes(ValueError):
    """An error as Python 3.10 has them."""

    @property
    def add_note(self):
        raise AttributeError


def test_a_note_is_seen_on_any_python():
    noted = ValueError("why")
    add_note(noted, "where")
    assert "where" in [*getattr(noted, "__notes__", []), *str(noted).splitlines()]
    old = WithoutNotes("why")
    add_note(old, "where")
    assert str(old) == "why\nwhere"
    add_note(several := WithoutNotes(1, "why"), "where")
    assert several.args == (1, "why", "where")
