"""Pages of the documentation and their code blocks; docs/development.md has the directives in comments."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
_PARTS = re.compile(
    r"<!-- (?P<directive>.*?)-->|^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.S | re.M
)


@dataclass
class Page:
    """Code of a page: Python that runs in one namespace, files, commands, and blocks that are not run.

    Attributes:
        name: Path relative to the repository.
        num_ranks: Ranks that run the Python blocks; 0 for a process without a launch.
        python: Python blocks, by the number of their first line.
        files: Texts of files by name.
        commands: Lines of the command blocks.
        not_run: Blocks that are not run, with the reason.
    """

    name: str
    num_ranks: int = 1
    python: list[tuple[int, str]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    not_run: list[tuple[str, str]] = field(default_factory=list)

    @property
    def source(self) -> str:
        """All Python blocks as one program, with the line numbers of the page."""
        lines: list[str] = []
        for first, text in self.python:
            lines += [""] * (first - 1 - len(lines)) + text.splitlines()
        return "\n".join(lines) + "\n"


def read_page(path: Path) -> Page:
    """Return the code of a page."""
    text, page, pending = path.read_text(), Page(path.relative_to(ROOT).as_posix()), ""
    for found in _PARTS.finditer(text):
        directive, body = found["directive"], textwrap.dedent(found["text"] or "")
        if directive is None:
            _take_block(page, found["language"], body, pending, text.count("\n", 0, found.start("text")) + 1)
            pending = ""
        elif directive.startswith("setup\n"):
            first = text.count("\n", 0, found.start("directive")) + 2
            page.python.append((first, textwrap.dedent(directive.removeprefix("setup\n"))))
        elif directive == "run in a new process ":
            page.num_ranks = 0
        elif ranks := re.fullmatch(r"run on (\d+) ranks ", directive):
            page.num_ranks = int(ranks[1])
        else:
            pending = directive.strip()
    return page


def _take_block(page: Page, language: str, body: str, directive: str, first: int) -> None:
    kind, _, value = directive.partition(": ")
    if kind == "not run":
        page.not_run.append((body, value))
    elif kind == "file":
        page.files[value] = body
    elif language == "python":
        page.python.append((first, body))
    elif language == "bash":
        page.commands += [line for line in body.splitlines() if line and not line.startswith("#")]
