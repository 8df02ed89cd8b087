"""GRPS users' programs against a running server, and its online flag through deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.testing.server import WATCHDOG_S, RunningServer, free_port, wait_until

ROOT = Path(__file__).parents[2]
REPOSITORY = ROOT / "tests" / "grps_repository"


@pytest.fixture
def grps_server() -> Iterator[RunningServer]:
    bind = f"127.0.0.1:{free_port()}"
    with RunningServer(REPOSITORY, grpc_bind=bind, http_workers=2) as server:
        yield server
    assert server.leaks() == []


def test_a_program_written_from_the_documentation(grps_server: RunningServer) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "tests" / "e2e" / "grps_client.py")),
            f"{grps_server.http_host}:{grps_server.http_port}",
            grps_server.environ["SHMSERVE_GRPC_BIND"],
        ],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["http", "grpc"]


def is_ready(server: RunningServer) -> bool:
    return server.get("/grps/v1/health/ready")[0] == 200


def test_the_online_flag_is_one_and_survives_the_coordinator(grps_server: RunningServer) -> None:
    assert not is_ready(grps_server)
    assert grps_server.get("/grps/v1/health/online")[0] == 200
    for _ in range(6):  # whichever HTTP worker answers
        assert is_ready(grps_server)
    (coordinator,) = grps_server.pids("coordinator")
    os.kill(coordinator, signal.SIGKILL)
    wait_until(
        lambda: grps_server.pids("coordinator") not in ([], [coordinator]), "no new coordinator"
    )
    # Asked while it may still be starting: the question waits, and is asked again
    assert grps_server.get("/grps/v1/health/online")[0] == 200
    wait_until(lambda: is_ready(grps_server), "not ready again")
    os.kill(grps_server.pids("coordinator")[0], signal.SIGKILL)
    wait_until(lambda: is_ready(grps_server), "the flag was lost")
    assert grps_server.get("/grps/v1/health/offline")[0] == 200
    assert not is_ready(grps_server)


def test_online_from_the_start() -> None:
    with RunningServer(REPOSITORY, grps_online="true", grpc_processes=0) as server:
        assert is_ready(server)
        body = b'{"str_data": "x"}'
        kind = {"Content-Type": "application/json"}
        status, fields, answer = server.request(
            "POST", "/grps/v1/infer/predict?streaming=true", body, kind
        )
        assert (status, fields["transfer-encoding"]) == (200, "chunked")
        assert b'"str_data":"x"' in answer
    assert server.leaks() == []
