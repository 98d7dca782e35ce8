"""JSON that is read in one way only, and within limits."""

from __future__ import annotations

import json

import pytest

from booster.checkpoint_io.formats import json as strict_json
from booster.checkpoint_io.formats.json import parse_document, parse_json
from booster.errors import CheckpointError

GOOD = [
    '{"a": [1, -2.5, "x", null, true], "b\\n": {"c": []}}',
    '"\\\\"',
    '"\\\\\\" ]]]]]]]]]] \\" {{{{{{{{{{"',
    '["[[[[[[[[[[[[", "\\"[[[[[[[[[[[[[["]',
    '"\\ud83d\\ude00 \u00e9"',
    f"[{2**63 - 1}, {-(2**63)}]",
    "[[[[[[[[1]]]]]]]]",
]
BAD = {
    "twice": '{"a": 1, "b": {"c": 1, "c": 1}}',
    "NaN": "[NaN]",
    "infinity": "-Infinity",
    "fp64": "1e999",
    "64 bits": str(2**63),
    "minus 64 bits": str(-(2**63) - 1),
    "many digits": "1" * 500,
    "half a pair": '"\\ud800"',
    "halves the wrong way": '{"\\ude00\\ud83d": 1}',
    "nine levels": "[" * 9 + "]" * 9,
    "levels behind a quote": '["\\\\", [[[[[[[[1]]]]]]]]]',
    "control characters": '"\n"',
    "trailing": "{} {}",
    "nothing": "",
}


@pytest.mark.parametrize("text", GOOD)
def test_what_is_good_is_read_as_any_parser_does(text):
    assert parse_json(text.encode(), "x") == json.loads(text)


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_what_readers_may_disagree_about_is_refused(text):
    with pytest.raises(CheckpointError, match="x cannot be read as JSON"):
        parse_json(text.encode(), "x")


@pytest.mark.parametrize("scan_bytes", [2, 3, 4, 5, 7])
def test_parts_of_a_text_may_end_anywhere(monkeypatch, scan_bytes):
    monkeypatch.setattr(strict_json, "_SCAN_BYTES", scan_bytes)
    for text in GOOD:
        assert parse_json(text.encode(), "x") == json.loads(text)
    for name in ("nine levels", "levels behind a quote"):
        with pytest.raises(CheckpointError, match="nested deeper"):
            parse_json(BAD[name].encode(), "x")


def test_documents_hold_what_users_keep_in_them():
    text = '{"seed": 99999999999999999999, "name": "\\ud800", "deep": ' + "[" * 200 + "]" * 200 + "}"
    assert parse_document(text.encode(), "x")["seed"] == 99999999999999999999
    for bad in ("[" * 300 + "]" * 300, "[NaN]", '{"a": 1, "a": 1}'):
        with pytest.raises(CheckpointError):
            parse_document(bad.encode(), "x")


def test_the_number_of_values_is_bounded(monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_VALUES", 100)
    assert len(parse_json(b"[" + b'",,,,[[[[",' * 90 + b"1]", "x")) == 91
    with pytest.raises(CheckpointError, match="more than 100 values"):
        parse_json(b"[" + b"1," * 100 + b"1]", "x")
