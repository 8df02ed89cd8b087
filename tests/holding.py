"""Helpers for tests with a running server.

Requests that a model works on until the test releases the model (the models' command `hold`),
counts of requests, and processes that are killed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.running_server import RunningServer, wait_until


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
    name = "shmserve_request_failures_total"
    labels = (f"reason={reason}" for reason in ("cancelled", "deadline"))
    return sum(int(metric(server, name, f"model={model}", label)) for label in labels)


def samples(page: bytes) -> dict[tuple[str, ...], float]:
    """Return the samples of a page of metrics, by name and labels: ("a_total", "model=m")."""
    return {
        (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def metric(server: RunningServer, name: str, *labels: str) -> float:
    """Return the sum of a metric's samples that have all these labels."""
    status, _, page = server.request("GET", "/metrics")
    assert status == 200, page
    return sum(
        n for key, n in samples(page).items() if key[0] == name and set(labels) <= set(key[1:])
    )


def statistics(server: RunningServer, model: str) -> Any:
    """Return the statistics of a model with one version."""
    status, document = server.get(f"/v2/models/{model}/stats")
    assert status == 200, document
    (stats,) = document["model_stats"]
    return stats


def kill_executor(server: RunningServer, instance: str) -> None:
    (pid,) = server.pids(f"executor {instance}")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in server.processes(), "it lives on")


def replace(server: RunningServer, role: str) -> None:
    """Kill the only process of a role, and wait for its successor."""
    (pid,) = server.pids(role)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.pids(role) not in ([], [pid]), f"another {role}")
