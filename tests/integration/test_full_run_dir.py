"""Run directory on a full file system: dead processes are replaced and the coordinator lives on."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.holding import replace
from tests.running_server import ROOT, WATCHDOG_S, RunningServer, wait_until
from tests.servers import Server

pytestmark = pytest.mark.needs("mounts")
REQUEST = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}]}


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """File system for the run directory, small in bytes and inodes."""
    folder = tmp_path / "run"
    folder.mkdir()
    options = "size=4m,nr_inodes=80,mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


# Stands in for the package that only gRPC processes import.
GRPC = """
import contextlib, os
path = os.path.join(os.environ["SHMSERVE_RUN_DIR"], "filling")
with open(path, "ab", buffering=0) as file, contextlib.suppress(OSError):
    while True:
        file.write(bytes(4096))
raise ImportError("of no use here")
"""


def fill(folder: Path) -> None:
    """Take the last byte, and then the last inode."""
    with (folder / "filling").open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    with suppress(OSError):
        for number in range(1000):
            (folder / f"filling-{number}").touch()


def test_a_full_run_directory_stops_nobody(tmp_path: Path, run_dir: Path) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    (repository / "echo").symlink_to(ROOT / "tests/repositories/basic/echo")
    server = Server(repository, run_dir=run_dir, http_workers=1, grpc_processes=1)
    server.log_path = tmp_path / "log"

    def answers() -> bool:
        return server.infer("echo", REQUEST)[0] == 200

    with server:
        coordinator = server.pids("coordinator")
        fill(run_dir)
        for role in ("executor", "executor", "grpc", "http worker", "supervisor"):
            replace(server, role)
            wait_until(lambda: server.lives() and answers(), f"answers without that {role}")
            assert server.pids("coordinator") == coordinator
        # the executor's socket has an inode, and the new supervisor hears of no executor
        for role in ("supervisor", "coordinator", "executor"):
            os.kill(server.pids(role)[0], signal.SIGKILL)
        wait_until(lambda: server.lives() and answers(), "answers with all of them replaced")
        replace(server, "coordinator")
        replace(server, "executor")
        wait_until(answers, "answers with another coordinator")

        coordinator = server.pids("coordinator")
        for room in run_dir.glob("*.new"):  # as if other processes had been quicker
            room.unlink()
        fill(run_dir)
        os.kill(server.pids("executor")[0], signal.SIGKILL)  # the next ones find no room, and end
        line = "trying again file=registry.msgpack reason=No space left on device"
        server.wait_log(line)
        assert server.ready()
        for filling in run_dir.glob("filling*"):
            filling.unlink()
        server.wait_log("written again file=registry.msgpack")
        wait_until(answers, "answers with space")
        assert server.log().count(line) == 1
        assert server.pids("coordinator") == coordinator
        assert "Traceback" not in server.log()


def test_a_start_that_fails_ends_with_status_1_all_the_same(tmp_path: Path, run_dir: Path) -> None:
    package = tmp_path / "grpc"
    package.mkdir()
    (package / "__init__.py").write_text(GRPC)
    environ = {"PYTHONPATH": str(tmp_path)}
    server = RunningServer(
        ROOT / "workers", environ, run_dir=run_dir, load_models="identity", http_workers=1
    )
    server.log_path = tmp_path / "log"
    try:
        server.start(wait_ready=False)
        assert server.master is not None
        assert server.master.wait(WATCHDOG_S) == 1
        assert "shmserve: gRPC cannot be served: grpc 0" in server.log().splitlines()[-1]
        assert (run_dir / "filling").exists()
        wait_until(lambda: not server.processes(), "processes are left")
    finally:
        server.kill_all()
