"""Cuts what a process writes into whole lines, so that those of several processes don't run into each other."""

from __future__ import annotations

import re

__all__ = ["LineSplitter"]

_END = re.compile(rb"\r\n|\n|\r")
_LONGEST = 2**16  # a line beyond it is cut: nothing says that it ever ends


class LineSplitter:
    r"""Collects pieces of output and returns its lines as they become whole.

    A progress bar's "\r" ends a line, too, so that each of its states can have a prefix and still overwrite the last.

    Example:
        >>> splitter = LineSplitter()
        >>> splitter.add(b"one\ntw"), splitter.add(b"o\r"), splitter.rest()
        ([b'one\n'], [b'two\r'], [])
    """

    def __init__(self) -> None:
        self._begun = b""

    def add(self, piece: bytes) -> list[bytes]:
        """Returns the lines that the piece completes, each with its end."""
        text = self._begun + piece
        lines, start = [], 0
        for end in _END.finditer(text):
            if end.group() == b"\r" and end.end() == len(text) and not text[start : end.start()]:
                break  # nothing to show yet, and a "\n" may follow
            line = text[start : end.end()]
            if line != b"\r":  # a progress bar begins with it: its last state was ended by it
                lines.append(line)
            start = end.end()
        self._begun = text[start:]
        if len(self._begun) > _LONGEST:
            lines.append(self._begun + b"\n")
            self._begun = b""
        return lines

    def rest(self) -> list[bytes]:
        """Returns what was begun and not ended, as a line."""
        begun, self._begun = self._begun.strip(b"\r"), b""
        return [begun + b"\n"] if begun else []
