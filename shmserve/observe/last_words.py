"""``python -m shmserve.observe.last_words MODULE ...``: run a module and record why it ended.

The program has no other use for its standard input. So standard input is a file in memory, which
the parent keeps. An exception that ends the program is written to this file, even if the module is
still being imported.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from types import TracebackType
from typing import BinaryIO

from shmserve.observe import log_output, logs

_NAME = "shmserve-last-words"
_MAX_BYTES = 1000


def make() -> BinaryIO:
    """Open a file for a program's standard input. The caller closes the file."""
    return as_stdin(name=_NAME)


def as_stdin(data: bytes = b"", name: str = "stdin") -> BinaryIO:
    """Open a file in memory with `data`, for a program's standard input.

    Unlike a pipe, the file never blocks the caller. The caller closes the file.
    """
    file = os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "w+b")
    file.write(data)
    file.seek(0)
    return file


def read(file: BinaryIO) -> str:
    """Return the text that the program has written, or an empty text."""
    return os.pread(file.fileno(), _MAX_BYTES, 0).decode(errors="replace")


def tell(words: str) -> None:
    """Record in a line why this program ends. Without effect if the parent keeps no file."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self/fd/0").startswith(f"/memfd:{_NAME}"):
            os.pwrite(0, words.encode()[:_MAX_BYTES], 0)


def main() -> None:
    """Run the module named on the command line as a program with the remaining arguments.

    From here on nothing that the program prints blocks the program: a process with a traceback
    that nobody reads must end.
    """
    log_output.begin(logs.printed, forks=False)
    sys.excepthook = _tell_and_print
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _tell_and_print(kind: type[BaseException], ex: BaseException, at: TracebackType | None) -> None:
    lines = "".join(traceback.format_exception_only(ex)).splitlines()
    tell(" ".join(line.strip() for line in lines))
    sys.__excepthook__(kind, ex, at)


if __name__ == "__main__":
    main()
