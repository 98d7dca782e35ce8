"""Words that docs/glossary.md retires appear in no source, docstring or message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from import_graph import ROOT

FOLDERS = ("booster", "plugins", "kernels", "checkpoint_io", "examples", "tests", "benchmarks")
RETIRED = (
    r"how manieth",
    r"farewells?",
    r"meetings?",
    r"patience",
    r"imagined",
    r"whereabouts",
    r"carved?",
    r"stand[_ -]ins?",
    r"rooms?",
    r"number formats?",
    r"nobody",
    r"whoever",
    r"(?<!there )(?<!There )is no(?! longer)",
    r"under way",
    r"on its way",
    r"for good",
    r"(?<!train_)micro[_-]batch(es)?",  # train_micro_batch_size_per_gpu is DeepSpeed's
    r"goes on",
    r"lets go of",
    r"gives up",
    r"(?<!_)signs?(?! extension)",
)
# A heartbeat was called a sign: what is one in mathematics stays.
SIGN = re.compile(
    r"sign (bit|of|[|?=])|signs (of|differ|alternate|agree|only)|(opposite|any|its|gradient's) sign"
    r"|torch\.sign|\.sign_?\(",
    re.IGNORECASE,
)
WORDS = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(RETIRED)})(?![A-Za-z])", re.IGNORECASE)


def retired_words(text: str) -> list[str]:
    """Return the lines with retired words."""
    return [
        line.strip()
        for line in text.splitlines()
        if any(not match[0].lower().startswith("sign") or not SIGN.search(line) for match in WORDS.finditer(line))
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_source_uses_a_retired_word(folder):
    found = {}
    for pattern in ("*.py", "*.cpp", "*.h", "*.md"):
        for path in sorted((ROOT / folder).rglob(pattern)):
            if path == Path(__file__):
                continue
            lines = retired_words(path.read_text())
            if lines:
                found[str(path.relative_to(ROOT))] = lines
    assert not found, "use the words of docs/glossary.md"


@pytest.mark.parametrize(
    "text", ["# rank 1 gave no sign", "stand_in = 1", "f'{x} is no number'", "micro_batches", "room left"]
)
def test_the_search_finds_retired_words(text):
    assert retired_words(text)


@pytest.mark.parametrize(
    "text", ["there is no file", "is no longer", "the sign of a corner", "x.sign()", "microbatch", "assign"]
)
def test_the_search_leaves_the_rest(text):
    assert not retired_words(text)
