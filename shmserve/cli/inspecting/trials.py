"""Trials of `shmserve doctor`: parts of `cuda.device_trials`, run in processes with a deadline."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import IO, TypeVar

import msgspec

from shmserve.transport.processes import describe_status

DEADLINE_S = 60.0  # allows for the first import of a large library from a cold disk
_END_S = 1.0
_POLL_S = 0.02
_MOST = 1 << 20

T = TypeVar("T")


class TrialFailed(Exception):
    """Failure of a trial, with a text for operators."""


class Trial:
    """Running part of `cuda.device_trials`; a context manager that ends the process.

    Input and output are files instead of pipes. A process that hangs in the driver cannot be
    killed, so nothing may wait for its pipes.
    """

    def __init__(self, part: str, environ: Mapping[str, str], input_bytes: bytes = b"") -> None:
        """Start the process. `input_bytes`: content of standard input. If empty, standard input is
        a pipe that is closed to end the process."""
        self._files = contextlib.ExitStack()
        self._output, self._errors, source = (
            self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (closed with us)
            for _ in range(3)
        )
        source.write(input_bytes)
        source.seek(0)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shmserve.cuda.device_trials", part],
            env=dict(environ),
            stdin=source if input_bytes else subprocess.PIPE,
            stdout=self._output,
            stderr=self._errors,
        )

    def result(self, kind: type[T]) -> T:
        """Wait for the printed value and return it. Raise TrialFailed if the process died, or
        printed nothing by the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            ended = self._process.poll()
            line = _content(self._output)
            if line.endswith(b"\n"):
                return msgspec.json.decode(line, type=kind)
            if ended is not None:
                errors = _content(self._errors).decode(errors="replace").rstrip()
                last = errors.rpartition("\n")[2] or "no output"
                raise TrialFailed(f"a trial ended with {describe_status(ended)}: {last}")
            if time.monotonic() > deadline:
                raise TrialFailed(f"a trial gave no answer within {DEADLINE_S:g} s")
            time.sleep(_POLL_S)

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_END_S)
        self._files.close()


def _content(file: IO[bytes]) -> bytes:
    """Return the content so far. `pread` leaves the file position alone."""
    return os.pread(file.fileno(), _MOST, 0)
