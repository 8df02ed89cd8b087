"""Requests that a model works on until the test releases the model: see the models' command
`hold`."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from shmserve.testing.running_server import RunningServer, wait_until


class Hold:
    """File whose path a model gets. The model goes on once the file is deleted.

    with Hold(tmp_path) as hold:
        ...  # send f"hold:{hold.path}" in another thread
        hold.wait_begun()
        hold.let_go()
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "hold"
        self._begun = folder / "hold.begun"

    def __enter__(self) -> Hold:
        self.path.touch()
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def wait_begun(self) -> None:
        """Wait until a model waits for the file."""
        wait_until(self._begun.exists, "the model has not begun")

    def let_go(self) -> None:
        self.path.unlink(missing_ok=True)


def in_flight(server: RunningServer, instance: str) -> int:
    """Return the number of unanswered requests at an instance, over all frontends."""
    rows = server.show("queues")
    return sum(row.get("in_flight", 0) for row in rows if row.get("instance") == instance)


def given_up(server: RunningServer, model: str) -> int:
    """Return the number of requests to a model that were cancelled or missed their deadline.

    A request is counted after its executor has been told.
    """
    _, _, text = server.request("GET", "/metrics")
    labels = f'(?=[^}}]*model="{model}")(?=[^}}]*reason="(?:cancelled|deadline)")[^}}]*'
    sample = rf"^shmserve_request_failures_total\{{{labels}\}} (\S+)"
    return sum(int(float(value)) for value in re.findall(sample, text.decode(), re.M))


def kill_executor(server: RunningServer, instance: str) -> None:
    (pid,) = server.pids(f"executor {instance}")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in server.processes(), "it lives on")
