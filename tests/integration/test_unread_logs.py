"""Server log without a reader: requests are answered, watchdogs act, and the service ends."""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.running_server import RunningServer, wait_until
from tests.servers import Server

REPOSITORY = Path(__file__).parents[1] / "repositories" / "basic"
REQUESTS = 2000
# A server without the right to reopen a pipe of another user, as after `su` or below supervisord
WITHOUT_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
SETTINGS: dict[str, Any] = {
    "http_workers": 2,
    "watchdog_s": 4,
    "access_log": "true",
    "drain_timeout_s": 5,
}
DROPPED = re.compile(r"\((\d+) lines of the log were dropped\)")


class UnreadPipe:
    """Full pipe that belongs to another user and is read only when a test says so."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        self._own = os.open(f"/proc/self/fd/{self.writing}", flags)  # not the server's descriptor
        if os.geteuid() == 0:
            os.fchown(self.writing, 65534, 65534)
        os.fchmod(self.writing, 0)
        self.text = ""

    def fill(self) -> None:
        for size in (4096, 1):
            try:
                while True:
                    os.write(self._own, b"\n" * size)
            except BlockingIOError:
                continue

    def read(self) -> str:
        try:
            while data := os.read(self._reading, 1 << 20):
                self.text += data.decode(errors="replace")
        except BlockingIOError:
            pass
        return self.text

    def close(self) -> None:
        for fd in (self._reading, self.writing, self._own):
            os.close(fd)


@pytest.fixture
def pipe() -> Iterator[UnreadPipe]:
    unread = UnreadPipe()
    yield unread
    unread.close()


def refused(server: RunningServer, number: int) -> int:
    """Return the status of a request for a missing model, whose long name makes a long log line."""
    path = f"/v2/models/none-{number:04}-{'x' * 1500}/ready"
    return server.request("GET", path)[0]


def test_a_server_whose_log_nobody_reads_serves_watches_and_ends(pipe: UnreadPipe) -> None:
    pipe.fill()
    within = WITHOUT_CAPABILITIES if os.geteuid() == 0 else ()
    server = Server(REPOSITORY, within=within, output=pipe.writing, **SETTINGS)
    with server, ThreadPoolExecutor(8) as clients:
        statuses = list(clients.map(lambda n: refused(server, n), range(REQUESTS)))
        assert statuses == [404] * REQUESTS

        def accounted() -> int:
            dropped = sum(map(int, DROPPED.findall(pipe.read())))
            return len(re.findall(r"none-\d{4}-x{1500}/ready", pipe.text)) + dropped

        def all_accounted() -> bool:
            server.lives()  # the next line of either worker reports the number of dropped lines
            return accounted() >= REQUESTS

        wait_until(all_accounted, f"lines that are there or counted: {REQUESTS}")
        assert DROPPED.search(pipe.text)
        first_line = "master gunicorn.error: Listening at"
        wait_until(lambda: first_line in pipe.read(), "the master's first line")

        first = server.pids("supervisor")  # a new supervisor writes the master's lines from now on
        os.kill(first[0], signal.SIGKILL)
        wait_until(lambda: bool(set(server.pids("supervisor")) - set(first)), "another supervisor")
        worker = server.pids("http worker")[0]
        os.kill(worker, signal.SIGKILL)
        killed = f"Worker (pid:{worker}) was sent SIGKILL"
        wait_until(lambda: killed in pipe.read(), "the master's line")
        wait_until(lambda: len(server.pids("http worker")) == 2, "another worker")

        pipe.fill()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            before = server.pids("http worker")
            os.kill(before[0], number)
            wait_until(
                lambda gone=before[0]: gone not in server.processes(),  # type: ignore[misc]
                f"the end of a worker after {number.name}",
            )
            wait_until(lambda: len(server.pids("http worker")) == 2, "another worker")
        wait_until(server.ready, "readiness")
        assert refused(server, 0) == 404
    assert server.master is not None
    assert server.master.returncode == 0
    pipe.read()


def test_a_log_whose_reader_is_gone_ends_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with Server(REPOSITORY, output=writing, **SETTINGS) as server:
        os.close(writing)
        assert [refused(server, number) for number in range(20)] == [404] * 20
        os.kill(server.pids("http worker")[0], signal.SIGKILL)
        wait_until(lambda: len(server.pids("http worker")) == 2, "another worker")
        assert refused(server, 0) == 404
    assert server.master is not None
    assert server.master.returncode == 0
