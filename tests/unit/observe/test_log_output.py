"""Logs with an unread other end, in separate programs."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.running_server import WATCHDOG_S, wait_until

# 2,000 lines of 999 characters exceed a queue. `done` shows that the program was not blocked.
PROGRAM = """
import logging, os, sys, threading
from shmserve.observe import log_output, logs
logs.setup("x", "info", sys.argv[1], forks=sys.argv[2] == "forks")
log = logging.getLogger(logs.ACCESS_GRPC)  # without a bound
for _ in range(2000):
    log.error("x" * 999)
os.write(int(sys.argv[3]), b"done")
sys.stdin.readline()
log.error("again")
log_output.end()
"""
DROPPED = re.compile(r"\((\d+) lines of the log were dropped\)")


class Output:
    """A file of some kind; `fd` takes nothing until `read` reads the other end."""

    def __init__(self, fd: int, reading: int) -> None:
        self.fd = fd
        self._reading = reading
        self.text = ""

    def read(self) -> str:
        os.set_blocking(self._reading, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reading, 1 << 20):
                self.text += data.decode()
        return self.text


def _ends(kind: str) -> tuple[int, int]:
    if kind == "socket":
        ours, theirs = socket.socketpair()
        return ours.detach(), theirs.detach()
    if kind == "terminal":
        master, slave = pty.openpty()
        attributes = termios.tcgetattr(slave)
        attributes[1] &= ~termios.OPOST  # a line's end stays as it is
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        return slave, master
    reading, writing = os.pipe()
    if kind == "pipe of another user":
        os.fchown(writing, 65534, 65534)
        os.fchmod(writing, 0)
    elif kind == "non-blocking pipe":
        os.set_blocking(writing, False)
    return writing, reading


@pytest.fixture
def output(request):
    kind = getattr(request, "param", "pipe")
    if kind == "pipe of another user" and os.geteuid():
        kind = "pipe"
    fd, reading = _ends(kind)
    yield Output(fd, reading)
    os.close(fd)
    os.close(reading)


class Program:
    """A program that logs to `stderr`, and reports the end of its work through a pipe."""

    def __init__(self, program: str, stderr: int, *words: str) -> None:
        self._reading, writing = os.pipe()
        within = []
        if os.geteuid() == 0:  # else it could open any pipe anew
            within = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
        self.process = subprocess.Popen(
            [*within, sys.executable, "-c", program, *words, str(writing)],
            stdin=subprocess.PIPE,
            stdout=stderr,
            stderr=stderr,
            pass_fds=(writing,),
        )
        os.close(writing)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._reading)

    def done(self) -> bool:
        """Return whether the program reports its end in time."""
        return bool(select.select([self._reading], [], [], WATCHDOG_S)[0]) and (
            os.read(self._reading, 4) == b"done"
        )

    def go_on(self) -> None:
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def end(self) -> int:
        self.process.communicate(timeout=WATCHDOG_S)
        return self.process.returncode


@pytest.mark.parametrize(
    "output",
    ["pipe", "pipe of another user", "non-blocking pipe", "socket", "terminal"],
    indirect=True,
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_that_nobody_reads_are_dropped_and_counted(output: Output, form: str) -> None:
    """Two processes share the output: the other process may take room that the first process has
    seen."""
    words = (output.fd, form, "threads")
    with Program(PROGRAM, *words) as one, Program(PROGRAM, *words) as other:
        assert one.done()
        assert other.done()
        wait_until(lambda: len(output.read()) > 2_000_000, "room in both queues, of 1 MiB each")
        one.go_on()
        other.go_on()
        wait_until(lambda: output.read().count("again") == 2, "the last lines")
        assert (one.end(), other.end()) == (0, 0)
    lines = output.text.splitlines()
    if form == "json":
        lines = [json.loads(line)["message"] for line in lines]
    whole = [line for line in lines if line.endswith("x" * 999)]
    dropped = sum(map(int, DROPPED.findall(output.text)))
    assert dropped > 0
    assert len(whole) + dropped == 4000


@pytest.mark.parametrize("role", ["threads", "forks"])
def test_a_process_whose_log_nobody_reads_ends(output: Output, role: str) -> None:
    with Program(PROGRAM, output.fd, "text", role) as program:
        assert program.done()
        assert program.end() == 0


@pytest.mark.parametrize("role", ["threads", "forks"])
def test_a_process_whose_logs_reader_is_gone_ends(role: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with Program(PROGRAM, writing, "text", role) as program:
        os.close(writing)
        assert program.done()
        assert program.end() == 0


def run(program: str, path: Path) -> str:
    """Return the program's output, with both streams in one file."""
    with path.open("wb") as file:
        ended = subprocess.run(
            [sys.executable, "-c", program], stdout=file, stderr=file, timeout=WATCHDOG_S
        )
    assert ended.returncode in (0, 1)
    return path.read_text()


def test_the_order_of_lines_stays_whichever_stream_they_took(tmp_path) -> None:
    program = """
import logging, sys, warnings
from shmserve.observe import logs
logs.setup("x", "info")
for number in range(500):
    print(number, "printed")
    logging.getLogger(logs.ACCESS_GRPC).error("%d logged", number)  # lines without a bound
    sys.stdout.buffer.write(b"%d bytes\\n" % number)
warnings.warn("minded")
print("begun", end="")
"""
    lines = run(program, tmp_path / "log").splitlines()
    words = ("printed", "logged", "bytes")
    assert [line.split(": ")[-1] for line in lines[:1500]] == [
        f"{number} {word}" for number in range(500) for word in words
    ]
    assert "UserWarning: minded" in lines[1500]
    assert lines[-1] == "begun"


def test_a_fork_writes_its_own_lines_and_not_those_of_its_parent(tmp_path) -> None:
    program = """
import logging, os
from shmserve.observe import logs
logs.setup("x", "info")
log = logging.getLogger("y")
for _ in range(100):
    log.error("parent")
    if os.fork() == 0:
        log.error("child")
        os._exit(0)
    os.wait()
"""
    text = run(program, tmp_path / "log")
    assert (text.count("y: parent"), text.count("y: child")) == (100, 100)


def test_a_master_without_threads_hands_its_lines_to_another_process(tmp_path) -> None:
    """In order; the master itself writes lines not received by the master's end."""
    program = """
import logging, os, sys, threading, time
from shmserve.observe import log_output, logs
logs.setup("master", "info", forks=True)
log = logging.getLogger("y")
log.error("one"); log.error("two")
if os.fork() == 0:
    logs.setup("supervisor", "info")
    log_output.receive(log_output.relayed_to())
    while "two" not in open("/proc/self/fd/2").read():
        time.sleep(0.01)
    log.error("received")
    log_output.end()
    os._exit(0)
os.wait()
assert threading.active_count() == 1
log.error("three")
sys.exit("why it ends")
"""
    lines = run(program, tmp_path / "log").splitlines()
    assert [line.split(": ")[-1] for line in lines] == [
        *("one", "two", "received", "three", "why it ends")
    ]
    assert "supervisor" in lines[2]
    assert "master" in lines[3]


def test_a_process_without_standard_streams_can_log() -> None:
    program = "from shmserve.observe import logs; logs.setup('x', 'info'); print('no one hears')"
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", program]
    assert subprocess.run(command, timeout=WATCHDOG_S).returncode == 0
