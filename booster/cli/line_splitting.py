"""Line buffering of process output, so that lines of several processes do not interleave."""

from __future__ import annotations

import re

__all__ = ["LineBuffer"]

_LINE_END = re.compile(rb"\r\n|\n|\r")
_MAX_LINE_BYTES = 2**16  # bytes; a longer line is broken, as it may never end


class LineBuffer:
    r"""Buffer for process output that returns complete lines.

    The "\r" of a progress bar ends a line as well, so that each state gets a prefix and still overwrites the last.

    Example:
        >>> splitter = LineSplitter()
        >>> splitter.add(b"one\ntw"), splitter.add(b"o\r"), splitter.rest()
        ([b'one\n'], [b'two\r'], [])
    """

    def __init__(self) -> None:
        self._partial = b""

    def add(self, data: bytes) -> list[bytes]:
        """Append output and return the lines completed by it, with their line ends."""
        text = self._partial + data
        lines, start = [], 0
        for end in _LINE_END.finditer(text):
            if end.group() == b"\r" and end.end() == len(text) and not text[start : end.start()]:
                break  # an empty line whose "\n" may follow
            line = text[start : end.end()]
            if line != b"\r":  # leads each state of a progress bar, and ended the last one
                lines.append(line)
            start = end.end()
        self._partial = text[start:]
        if len(self._partial) > _MAX_LINE_BYTES:
            lines.append(self._partial + b"\n")
            self._partial = b""
        return lines

    def flush(self) -> list[bytes]:
        """Return the incomplete last line, if any, as a line."""
        partial, self._partial = self._partial.strip(b"\r"), b""
        return [partial + b"\n"] if partial else []
