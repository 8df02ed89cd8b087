"""``python -m shmserve.observe.last_words MODULE ...``: run a module whose end is explained.

A program's standard input, which it has no other use for, is a file in memory; its parent keeps it.
The exception that ends the program is written there, be it while the module is still imported.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from types import TracebackType
from typing import BinaryIO

_NAME = "shmserve-last-words"
_MOST_BYTES = 1000


def make() -> BinaryIO:
    """Open a file to be a program's standard input; the caller closes it."""
    return as_stdin(name=_NAME)


def as_stdin(data: bytes = b"", name: str = "stdin") -> BinaryIO:
    """Open a file in memory with `data`, to be a program's standard input: unlike a pipe it never
    blocks the caller, who closes it."""
    file = os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "w+b")
    file.write(data)
    file.seek(0)
    return file


def read(file: BinaryIO) -> str:
    """Return what the program has told; empty: nothing."""
    return os.pread(file.fileno(), _MOST_BYTES, 0).decode(errors="replace")


def tell(words: str) -> None:
    """Explain why this program ends, in a line; without effect if nobody keeps a file for that."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self/fd/0").startswith(f"/memfd:{_NAME}"):
            os.pwrite(0, words.encode()[:_MOST_BYTES], 0)


def main() -> None:
    """Run the module that the command line names, as a program with the remaining arguments."""
    sys.excepthook = _tell_and_print
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _tell_and_print(kind: type[BaseException], ex: BaseException, at: TracebackType | None) -> None:
    lines = "".join(traceback.format_exception_only(ex)).splitlines()
    tell(" ".join(line.strip() for line in lines))
    sys.__excepthook__(kind, ex, at)


if __name__ == "__main__":
    main()
