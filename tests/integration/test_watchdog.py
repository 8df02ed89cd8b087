"""Stopped processes are replaced, unless the whole machine was stopped."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from tests.running_server import wait_until
from tests.servers import SMALL, Server, only

LIMIT_S = 4
SETTINGS: dict[str, Any] = {**only("identity"), "watchdog_s": LIMIT_S, "http_workers": 2}


def steady(server):
    """Wait until every role is there and linked."""
    roles = {"master": 1, "supervisor": 1, "coordinator": 1, "http": 2, "grpc": 1, "executor id": 1}
    wait_until(lambda: all(len(server.pids(r)) == n for r, n in roles.items()), "all processes")
    server.wait_linked()


def test_a_stopped_process_is_killed_and_replaced_whichever_it_is():
    with Server(**SETTINGS) as server:
        for title in ("grpc", "http worker", "supervisor", "coordinator"):
            steady(server)
            stopped = server.pids(title)[0]
            os.kill(stopped, signal.SIGSTOP)
            wait_until(lambda pid=stopped: pid not in server.processes(), f"the end of {title}")  # type: ignore[misc]
        steady(server)
        wait_until(server.ready, "readiness")


def test_nobody_is_killed_for_having_been_stopped_with_the_whole_machine():
    """Watchers continue first, when the other processes look dead to them."""
    with Server(**SETTINGS) as server:
        steady(server)
        time.sleep(1.5)  # for everybody's first signs of life
        before = server.processes()
        watchers = {*server.pids("master"), *server.pids("supervisor"), *server.pids("http")}
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(LIMIT_S + 2)
        for group in (watchers, before.keys() - watchers):
            for pid in sorted(group):
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)
        time.sleep(LIMIT_S)
        assert server.processes().keys() == before.keys(), server.log()


def test_a_service_whose_run_directory_was_emptied_ends_and_another_can_begin():
    """Cleaners of /tmp empty run directories. Two supervisors would fight over every process."""
    with Server(**{**SETTINGS, **SMALL}) as server:
        supervisors = set(server.pids("supervisor"))
        for path in Path(server.run_dir).iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "log":
                path.unlink()
        seen = set()

        def ended():
            seen.update(server.pids("supervisor"))
            return server.master.poll() is not None and not server.processes()

        wait_until(ended, "the service's end")
        server.wait_log("run_dir: its files have been removed")
        assert seen <= supervisors
        server.start()
