"""`shmserve serve` below a container runtime or a supervisor: a reload does not end the process."""

import os
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shmserve.transport import rundir
from tests.running_server import WATCHDOG_S, RunningServer, wait_until
from tests.servers import Server, Starting, only, output

SETTINGS: dict[str, Any] = {
    **only("noop"),
    "http_workers": 1,
    "pool_bytes": 64 << 20,
    "reload": "handover",
}
PIDNS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def reload(server: RunningServer, *within: str) -> None:
    """``shmserve reload``, and until the generation before has ended."""
    output(*within, sys.executable, "-m", "shmserve", "reload", environ=server.environ)
    one_generation(server)


def one_generation(server: RunningServer) -> None:
    wait_until(lambda: len(server.pids("master")) == 1, "the old master stays")
    wait_until(lambda: len(server.pids("supervisor")) == 1, "the old supervisor stays")
    # until then another reload is refused; a process that ends has its lock longer than its title
    lock = rundir.lock(server.run_dir, "handover")
    wait_until(lambda: lock.holder() is None, "the handover does not end")


@contextmanager
def requests(server: RunningServer) -> Iterator[list[str]]:
    """Client that opens a connection for each request; yields the list of failures."""
    lost: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                with urllib.request.urlopen(server.base_url + "/v2/models/noop", timeout=30) as got:
                    got.read()
            except (OSError, urllib.error.URLError) as ex:
                lost.append(repr(ex))

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield lost
    finally:
        stop.set()
        client.join()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.needs("pidns")
def test_pid_1_passes_signals_on_outlives_reloads_and_ends_with_the_service() -> None:
    with Starting(within=PIDNS, kept=True, **SETTINGS) as server:
        server.wait_ready()
        (keeper,) = server.pids("keeper")
        (first,) = server.pids("master")
        assert parent_of(first) == keeper
        with requests(server) as lost:
            reload(server, "nsenter", "-t", str(keeper), "-p", "-m")
            before = rundir.serving(server.run_dir)
            os.kill(keeper, signal.SIGUSR2)
            wait_until(lambda: rundir.serving(server.run_dir) != before, "SIGUSR2 is not heard")
            one_generation(server)
        assert lost == []
        (master,) = server.pids("master")
        wait_until(lambda: parent_of(master) == keeper, "the keeper has not adopted the master")

        os.kill(keeper, signal.SIGTTIN)
        wait_until(lambda: len(server.pids("http worker")) == 2, "SIGTTIN is not heard")
        os.kill(keeper, signal.SIGTTOU)
        wait_until(lambda: len(server.pids("http worker")) == 1, "SIGTTOU is not heard")
        workers = server.pids("http worker")
        os.kill(keeper, signal.SIGHUP)
        wait_until(lambda: server.pids("http worker") not in ([], workers), "SIGHUP is not heard")
        wait_until(lambda: len(server.pids("http worker")) == 1, "the old worker stays")
        os.kill(keeper, signal.SIGUSR1)
        server.wait_log("Handling signal: usr1")
        assert server.pids("master") == [master]
        os.kill(keeper, signal.SIGTERM)
        assert server.master is not None
        assert server.master.wait(WATCHDOG_S) == 0


def test_nothing_outlives_a_keeper_that_is_killed() -> None:
    """A supervisor such as supervisord may kill the process that it has started. Even a hanging
    master must then end."""
    with Server(kept=True, **SETTINGS) as server:
        assert server.master is not None
        reload(server)  # the next master gets the keeper's pipe from the master before
        assert server.master.poll() is None, "a supervisor like supervisord starts it again"
        (master,) = server.pids("master")
        lock = rundir.lock(rundir.serving(server.run_dir), "master")
        keeper = server.master.pid
        wait_until(lambda: parent_of(master) == keeper, "the keeper has not adopted the master")
        for _ in range(2):
            beat = lock.last_beat()
            wait_until(lambda beat=beat: lock.last_beat() != beat, "the master is silent")  # type: ignore[misc]
        os.kill(master, signal.SIGSTOP)
        server.master.kill()
        wait_until(lambda: not server.processes(), f"still there: {server.processes()}")


def test_a_service_whose_master_is_killed_is_back_once_and_then_ends_with_the_status() -> None:
    with Server(kept=True, grpc_processes=0, **SETTINGS) as server:
        assert server.master is not None
        (first,) = server.pids("master")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: server.pids("master") not in ([], [first]), "no other master")
        server.wait_ready()
        server.wait_linked()
        assert len(server.pids("supervisor")) == 1
        os.kill(server.pids("master")[0], signal.SIGKILL)
        assert server.master.wait(WATCHDOG_S) == 128 + signal.SIGKILL


def test_a_master_that_is_stopped_is_replaced() -> None:
    """HTTP workers that die while the master is stopped stay away until then."""
    limits = {"watchdog_s": 1, "drain_timeout_s": 2}
    with Server(kept=True, grpc_processes=0, **SETTINGS | limits) as server:
        (first,) = server.pids("master")
        os.kill(first, signal.SIGSTOP)
        os.kill(server.pids("http worker")[0], signal.SIGKILL)
        wait_until(lambda: server.pids("master") not in ([], [first]), "no other master")
        server.wait_ready()
        server.wait_log("the main process gives no sign of life")
        assert server.stop() == 0
