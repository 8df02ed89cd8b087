"""Frontends that never serve: the service is not ready, gives the reason, and a start fails."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.shm.registry_page import RegistryReader
from tests.holding import replace
from tests.running_server import ROOT, RunningServer, wait_until
from tests.servers import run_shmserve

# Stands in for the package that only gRPC processes import. Fails at import while a file "broken"
# exists.
GRPC = """
import os, sys
here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.exists(os.path.join(here, "broken")):
    raise ImportError("of no use here")
sys.path.remove(here)
del sys.modules["grpc"]
import grpc
"""


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """File that keeps gRPC processes from importing gRPC while the file exists."""
    package = tmp_path / "grpc"
    package.mkdir()
    (package / "__init__.py").write_text(GRPC)
    return tmp_path / "broken"


@pytest.fixture
def server(broken: Path) -> Iterator[RunningServer]:
    made = RunningServer(
        ROOT / "workers", {"PYTHONPATH": str(broken.parent)}, load_models="identity", http_workers=1
    )
    try:
        yield made
    finally:
        made.kill_all()


def doctor(server: RunningServer) -> tuple[int, str]:
    """Return the exit status of `shmserve doctor` and its line about the service."""
    done = run_shmserve("doctor", environ=server.environ)
    (line,) = [line for line in done.stdout.splitlines() if " service: " in line]
    return done.returncode, line


def test_a_start_without_grpc_ends_with_status_1(server: RunningServer, broken: Path) -> None:
    broken.touch()
    server.start(wait_ready=False)
    assert server.master is not None
    ready: list[int] = []

    def has_ended() -> bool:
        with contextlib.suppress(OSError):
            ready.append(server.get("/v2/health/ready")[0])
        return server.master is not None and server.master.poll() is not None

    wait_until(has_ended, "the start ends")
    assert server.master.returncode == 1
    assert set(ready) == {503}
    wait_until(lambda: not server.processes(), "processes are left")
    log = server.log()
    sentence = "gRPC cannot be served: grpc 0 ended with status 1 (ImportError: of no use here)"
    assert f"shmserve: {sentence}" in log.splitlines()[-1]
    assert "all models ready" not in log
    assert server.leaks() == []


def test_grpc_that_breaks_and_comes_back(server: RunningServer, broken: Path) -> None:
    server.start()
    assert doctor(server) == (0, "ok    service: ready")
    reader = RegistryReader(server.run_dir)

    def end() -> None:
        replace(server, "grpc")

    published = reader.current().generation
    end()  # a restart that works is not logged
    assert reader.current().generation == published

    broken.touch()
    os.kill(server.pids("grpc")[0], signal.SIGKILL)
    wait_until(lambda: not server.ready(), "it is not ready")
    status, answer = server.get("/v2/health/ready")
    assert status == 503
    assert answer == {"error": "the server is not ready: no gRPC process serves"}
    told = run_shmserve("ready", environ=server.environ).stdout
    assert told == "the server is not ready: no gRPC process serves\n"
    assert server.get("/v2/health/live")[0] == 200
    reason = "grpc 0 ended with status 1 (ImportError: of no use here)"
    status, line = doctor(server)
    assert status == 1
    assert line.startswith(
        f"FAIL  service: not ready: no gRPC process serves; gRPC process: {reason}"
    )

    replace(server, "coordinator")
    server.show("models")
    assert not server.ready()

    broken.unlink()
    server.wait_ready()
    assert doctor(server) == (0, "ok    service: ready")
    log = server.log()
    assert log.count(f"not ready: no gRPC process serves: {reason}") == 1
    assert log.count("gRPC is served again") == 1
    assert server.stop() == 0
    assert server.leaks() == []
