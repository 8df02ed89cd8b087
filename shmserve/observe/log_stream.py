"""Text streams in place of `sys.stdout` and `sys.stderr`.

Output of logging's handlers, warnings, tracebacks and prints becomes whole lines for a writer that
never blocks.
"""

import io
import os
import threading
from collections.abc import Callable
from typing import Any, TextIO

_LONGEST = 8192  # characters without a line end


class LogStream(io.TextIOBase):
    """Stream that passes on whole lines. Output of C code goes to the descriptor directly. `below`:
    the replaced stream."""

    def __init__(self, below: TextIO) -> None:
        self._below = below
        self._write_lines: Callable[[str], object] = below.write
        self._begun = ""
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._forked)

    def use(self, write_lines: Callable[[str], object]) -> None:
        """Set the function that takes texts of one or more whole lines."""
        self._write_lines = write_lines

    def write(self, text: str) -> int:
        """Pass on the complete lines and keep the incomplete line."""
        with self._lock:
            lines, end, self._begun = (self._begun + text).rpartition("\n")
            if end:
                self._take(lines)
            if len(self._begun) > _LONGEST:
                self.flush_begun()
        return len(text)

    def flush(self) -> None:
        """Do nothing: only an incomplete line is held back."""

    def flush_begun(self) -> None:
        """End the incomplete line and pass it on."""
        with self._lock:
            if self._begun:
                begun, self._begun = self._begun, ""
                self._take(begun)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._below.fileno()

    def isatty(self) -> bool:
        return self._below.isatty()

    @property
    def buffer(self) -> io.RawIOBase:
        return _Bytes(self)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._below.encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)  # for attributes such as errors and reconfigure

    def _forked(self) -> None:
        """Begin anew in a fork: a thread may have held the lock; the parent ends the line."""
        self._lock = threading.RLock()
        self._begun = ""

    def _take(self, lines: str) -> None:
        """Pass on complete lines, given without the last line end."""
        self._write_lines(f"{lines}\n")


class _Bytes(io.RawIOBase):
    """The `buffer` of a stream: bytes become lines of the stream, too."""

    def __init__(self, stream: LogStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raw = bytes(data)
        self._stream.write(raw.decode(errors="replace"))
        return len(raw)
