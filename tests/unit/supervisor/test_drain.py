"""The end of a service whose requests hang: the exporter has its own time, and one life."""

import os
import signal
import subprocess
import sys

import pytest

from shmserve.transport import rundir
from tests.running_server import wait_until

SUPERVISOR = r"""
import logging, os, sys
from shmserve.config import Settings
from shmserve.observe import logs
from shmserve.shm.registry_page import RegistryReader
from shmserve.supervisor.announce import Announcer
from shmserve.supervisor.service import Commands, Inherited, Supervisor
from shmserve.transport import rundir
from shmserve.transport.notify import Notifier
from shmserve.transport.processes import pidfd_open

run_dir, told = sys.argv[1:]
settings = Settings(run_dir=run_dir, grpc_processes=1, drain_timeout_s=1.0)
logs.setup("supervisor", "info")
python = [sys.executable, "-c"]
commands = Commands(
    coordinator=[*python, "import time; time.sleep(60)"],
    executor=[],
    grpc=[*python, "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"],
    exporter=[
        *python,
        "import os, signal, sys, time\n"
        "def tell(text): os.write(fd, text.encode())\n"
        "def end(*_): time.sleep(1.5); tell('exported '); os._exit(0)\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
        "signal.signal(15, end)\n"
        "tell(f'{os.getpid()} ')\n"
        "time.sleep(60)",
        told,
    ],
)
master_fd = pidfd_open(os.getppid())
lock_fd = rundir.lock(run_dir, "supervisor").pin()
announcer = Announcer(Notifier(""), RegistryReader(run_dir), 0.0)
inherited = Inherited(master_fd, lock_fd)
os._exit(Supervisor(settings, run_dir, "supervisor-0-a", inherited, commands, announcer).run())
"""


@pytest.mark.parametrize("killed", [False, True])
def test_the_exporter_has_time_after_a_drain_that_took_all_of_its(tmp_path, killed: bool) -> None:
    run_dir, told, log = tmp_path / "run", tmp_path / "told", tmp_path / "log"
    rundir.prepare(str(run_dir))
    rundir.write_epoch(str(run_dir), "0" * 8)
    with log.open("wb") as file:
        command = [sys.executable, "-c", SUPERVISOR, str(run_dir), str(told)]
        supervisor = subprocess.Popen(command, stderr=file)
    try:
        wait_until(lambda: told.exists() and told.read_text().endswith(" "), "an exporter")
        pid = told.read_text().strip()
        supervisor.terminate()
        if killed:
            wait_until(lambda: "draining" in log.read_text(), "the drain")
            os.kill(int(pid), signal.SIGKILL)
        assert supervisor.wait(60) == 0, log.read_text()
    finally:
        supervisor.kill()
        supervisor.wait()
    assert told.read_text().split() == ([pid] if killed else [pid, "exported"])
