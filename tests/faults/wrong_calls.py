"""Compares what every wrong call is told with config_errors.txt, or writes that file. Works under `python -O` too.

python tests/faults/wrong_calls.py --check
python tests/faults/wrong_calls.py --write
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "cases")]

from faults.mistakes.running import CallResult, defects, outcomes

SNAPSHOT = Path(__file__).with_name("config_errors.txt")
# What a message ends with tells what to write instead: a sentence or a part of one that begins with such a word.
_ADVICE = re.compile(
    r"(?:[:;.,]|\bor|\band|\bso|\bthen)\s+(?:\S+ )?(?:give|pass|write|use|choose|leave|set|build|call|add|take|make|"
    r"put|let|correct|boost|keep|save|run|load|start|reduce|compute|replace|skip|return|derive|move|begin|unset|wait|"
    r"remove|rename|exclude|ask|hold|warm|unrecognized|invalid|expected|ranks count|machines count|known|it takes|"
    r"did you mean|it must|there are|"
    r"the following arguments are required)\b",
    re.IGNORECASE,
)


def found_defects(found: dict[str, list[CallResult]]) -> list[str]:
    """Returns what is wrong with any of the refusals."""
    listed = [f"{name}: {defect}" for name, ranks in found.items() for defect in defects(ranks)]
    listed += [
        f"{name}: the message does not say what to write instead: {ranks[0].message}"
        for name, ranks in found.items()
        if _ADVICE.search(ranks[0].message) is None
    ]
    return listed


def snapshot_of(found: dict[str, list[CallResult]]) -> str:
    """Returns the text that is kept: a line for each wrong call."""
    lines = []
    for name, ranks in found.items():
        message = ranks[0].message.replace("\n", "\\n")
        lines.append(f"{name} | {message}\n")
    return "".join(lines)


def difference(found: dict[str, list[CallResult]]) -> str:
    """Returns how the messages differ from the kept ones; empty where they don't."""
    kept, now = SNAPSHOT.read_text().splitlines(), snapshot_of(found).splitlines()
    return "\n".join(difflib.unified_diff(kept, now, SNAPSHOT.name, "what is said now", lineterm="", n=0))


def main() -> int:
    """Makes all wrong calls and compares or writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--check", action="store_true", help="exit with 1 where anything differs")
    choice.add_argument("--write", action="store_true", help=f"write {SNAPSHOT.name}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = outcomes(Path(directory))
    if arguments.write:
        SNAPSHOT.write_text(snapshot_of(found))
    problems = [*found_defects(found), *difference(found).splitlines()]
    print("\n".join([*problems, f"{len(found)} wrong calls, {len(problems)} problems (optimize={sys.flags.optimize})"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
