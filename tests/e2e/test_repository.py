"""A Triton repository runs on this server unchanged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import triton_repository
from tests.running_server import WATCHDOG_S, RunningServer

PROGRAM = Path(__file__).with_name("repository_program.py")
MODELS = ["batched", "completed", "bare", "colours", "dynamic", "words", "versions"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return triton_repository.write(tmp_path_factory.mktemp("repository"))


@pytest.fixture
def triton_server(repository: Path) -> Iterator[RunningServer]:
    with RunningServer(repository, http_workers=1, grpc_processes=0) as server:
        yield server
    assert server.leaks() == []


def test_it_runs_unchanged(triton_server: RunningServer, repository: Path) -> None:
    files = sorted(str(path) for path in repository.rglob("*"))
    done = subprocess.run(
        [sys.executable, str(PROGRAM), f"{triton_server.http_host}:{triton_server.http_port}"],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
    )
    assert done.returncode == 0, done.stderr[-3000:] + triton_server.log()[-3000:]
    assert done.stdout.split() == MODELS
    triton_server.stop()
    log = triton_server.log()
    assert "printed by batched" in log
    assert "executor batched/1/0 shmserve.model: finalized" in log
    hint = "configuration: optimization.input_pinned_memory: no effect (shared memory"
    assert log.count(hint) == 1
    assert sorted(str(path) for path in repository.rglob("*")) == files  # nothing was written


def test_check_tells_of_hints_without_effect(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shmserve", "check"],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        env={"PATH": "/usr/bin", "SHMSERVE_MODEL_REPOSITORY": str(repository)},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    notes = [line for line in done.stdout.splitlines() if line.startswith("note")]
    assert all(line.startswith("note  model batched version 1: ") for line in notes), notes
    assert "optimization.input_pinned_memory" in "".join(notes)
