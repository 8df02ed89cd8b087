"""Logs whose other end nobody reads."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmserve.observe.log_stream import DroppingStream
from shmserve.testing.running_server import WATCHDOG_S

Ends = tuple[int, Callable[[int], bytes]]  # to write to; to read from


@pytest.fixture(params=["pipe", "socket"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    if request.param == "pipe":
        reading, writing = os.pipe()
        yield writing, lambda size: os.read(reading, size)
        os.close(reading)
        os.close(writing)
    else:
        ours, theirs = socket.socketpair()
        yield ours.fileno(), theirs.recv
        ours.close()
        theirs.close()


def test_lines_that_nobody_reads_are_dropped_and_counted(ends: Ends) -> None:
    fd, read = ends
    with open(fd, "w", closefd=False) as below:
        stream = DroppingStream(below, lambda text: f"<{text}>")
        handler = logging.StreamHandler(stream)
        line = "x" * 999
        for _ in range(1000):  # far more than either holds
            handler.emit(logging.makeLogRecord({"msg": line}))
        dropped = stream.dropped
        assert dropped > 0
        held = 0
        while held < (1000 - dropped) * 1000:
            held += len(read(1 << 16))
        handler.emit(logging.makeLogRecord({"msg": "again"}))
        handler.flush()
        told = b""
        while not told.endswith(b"again\n"):
            told += read(1 << 16)
        assert f"<({dropped} lines of the log were dropped)>\nagain\n".encode() in told
        assert stream.dropped == 0
        stream.close()


def test_a_file_is_written_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    with path.open("a") as below:
        stream = DroppingStream(below)
        stream.write("after\n")
        stream.flush()
    assert path.read_text() == "before\nafter\n"


def test_a_log_of_json_is_all_json() -> None:
    program = (
        "import logging, sys; from shmserve.observe import logs; logs.setup('x', 'info', 'json')\n"
        "for _ in range(1000): logging.getLogger('y').error('x' * 999)\n"
        "print('full', flush=True); sys.stdin.readline(); logging.getLogger('y').error('again')"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"full\n"
        timer = threading.Timer(WATCHDOG_S, process.kill)
        timer.start()
        told = process.stderr.read1(1 << 20)
        process.stdin.close()
        told += process.stderr.read()
        timer.cancel()
    messages = [json.loads(line)["message"] for line in told.splitlines()]
    assert "lines of the log were dropped" in messages[-2]
    assert messages[-1] == "again"


def test_a_process_whose_log_nobody_reads_goes_on() -> None:
    program = (
        "import logging, sys; from shmserve.observe import logs; logs.setup('x', 'info')\n"
        "for _ in range(1000): logging.getLogger('y').error('x' * 999)\n"
        "sys.stdout.write('done')"
    )
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=writing,
            timeout=WATCHDOG_S,
            check=True,
        )
    finally:
        os.close(reading)
        os.close(writing)
    assert done.stdout == b"done"
