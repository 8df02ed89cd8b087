"""Programs that end with an exception, with nobody to read their output."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from shmserve.observe import last_words
from shmserve.testing.running_server import WATCHDOG_S


def full_pipe() -> tuple[int, int]:
    """Return both ends of a pipe without room for another byte."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"\n" * size)
    os.set_blocking(writing, True)
    return reading, writing


def test_a_program_whose_traceback_nobody_reads_ends(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise ImportError('of no use')")
    reading, writing = full_pipe()
    with last_words.make() as words:
        program = subprocess.Popen(
            [sys.executable, "-m", "shmserve.observe.last_words", "program"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stdin=words,
            stderr=writing,
        )
        try:
            assert program.wait(WATCHDOG_S) == 1
        finally:
            program.kill()
            program.wait()
            os.close(reading)
            os.close(writing)
        assert last_words.read(words) == "ImportError: of no use"
