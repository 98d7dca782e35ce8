"""Line buffering of process output, so that lines of several processes do not interleave."""

from __future__ import annotations

import re

__all__ = ["LineSplitter"]

_END = re.compile(rb"\r\n|\n|\r")
_LONGEST = 2**16  # bytes; a longer line is broken, as it may never end


class LineSplitter:
    r"""Buffer for process output that returns complete lines.

    The "\r" of a progress bar ends a line as well, so that each state gets a prefix and still overwrites the last.

    Example:
        >>> splitter = LineSplitter()
        >>> splitter.add(b"one\ntw"), splitter.add(b"o\r"), splitter.rest()
        ([b'one\n'], [b'two\r'], [])
    """

    def __init__(self) -> None:
        self._begun = b""

    def add(self, piece: bytes) -> list[bytes]:
        """Append output and return the lines completed by it, with their line ends."""
        text = self._begun + piece
        lines, start = [], 0
        for end in _END.finditer(text):
            if end.group() == b"\r" and end.end() == len(text) and not text[start : end.start()]:
                break  # an empty line whose "\n" may follow
            line = text[start : end.end()]
            if line != b"\r":  # leads each state of a progress bar, and ended the last one
                lines.append(line)
            start = end.end()
        self._begun = text[start:]
        if len(self._begun) > _LONGEST:
            lines.append(self._begun + b"\n")
            self._begun = b""
        return lines

    def rest(self) -> list[bytes]:
        """Return the incomplete last line, if any, as a line."""
        begun, self._begun = self._begun.strip(b"\r"), b""
        return [begun + b"\n"] if begun else []
