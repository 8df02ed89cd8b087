"""Processor time and memory of processes and models in /metrics."""

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.running_server import ROOT, wait_until
from tests.servers import SMALL, Server, only

MODELS = ROOT / "tests/repositories/basic"


@pytest.fixture(scope="module", params=[True, False], ids=["history", "no history"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(MODELS, **SMALL, **only("echo"), dashboard=request.param) as server:
        yield server


def samples(server: Server) -> dict[str, float]:
    """Return the values of /metrics by name and labels."""
    status, _, body = server.request("GET", "/metrics")
    assert status == 200
    found = re.findall(r"^(shmserve_(?:process|model)_\S+) (\S+)$", body.decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}


def of_role(what: str, role: str) -> str:
    return f'shmserve_process_{what}{{role="{role}"}}'


def of_echo(what: str) -> str:
    return f'shmserve_model_{what}{{model="echo",version="1"}}'


def test_they_are_there_and_processor_time_never_falls(server: Server) -> None:
    roles = ("http", "executor", "coordinator", "supervisor")
    first = {of_echo("private_bytes"), *(of_role("private_bytes", role) for role in roles)}
    wait_until(lambda: first <= samples(server).keys(), "the first sample of all")
    server.infer("echo", tensor())
    told = samples(server)
    for role in roles:
        assert told[of_role("cpu_seconds_total", role)] >= 0
        assert 0 < told[of_role("private_bytes", role)] < told[of_role("resident_bytes", role)]
    for what in ("cpu_seconds_total", "private_bytes", "resident_bytes"):
        assert told[of_echo(what)] == told[of_role(what, "executor")], "there is no other executor"
    (pid,) = server.pids("executor")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.pids("executor") not in ([], [pid]), "the next one")
    server.wait_linked()
    least = told[of_echo("cpu_seconds_total")]

    def counted() -> bool:
        for _ in range(20):
            server.infer("echo", tensor())
        now = samples(server)
        assert now[of_echo("cpu_seconds_total")] >= least
        return now[of_echo("private_bytes")] > 0 and now[of_echo("cpu_seconds_total")] > least

    wait_until(counted, "the next executor counts as well")


def tensor() -> Any:
    return {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}
