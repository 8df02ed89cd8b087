"""Command ``shmserve reload``: has a running service replace its processes (setting `reload`)."""

from __future__ import annotations

import argparse
import signal
import time

from shmserve import config
from shmserve.config import Settings
from shmserve.errors import Unavailable
from shmserve.transport import rundir
from shmserve.transport.processes import has_ended, send_signal

_LOOK_S = 0.05
_BEGIN_S = 10.0  # seconds for the master to fork
_BEYOND_LOAD_S = 90.0  # seconds of a handover beyond the loading of models


def main(arguments: argparse.Namespace) -> int:
    settings = config.load()
    base = config.base_dir(settings)
    if settings.reload == "handover":
        # wait first: after a handover, another process is the master
        _await_earlier(settings, base)
    holder = rundir.lock(rundir.serving(base), "master").holder_pidfd()
    if holder is None:
        raise Unavailable(
            f"no server has the run directory {base}; SHMSERVE_CONFIG or SHMSERVE_RUN_DIR must be "
            "those of the server"
        )
    pid, master = holder
    if settings.reload == "workers":
        send_signal(master, signal.SIGHUP)
        print(f"the HTTP workers of pid {pid} are replaced (setting reload)")
        return 0
    outcome = _hand_over(settings, base, master)
    generation, _, state = outcome.partition(" ")
    if state != rundir.SERVES:
        raise Unavailable(f"the old generation serves on: {state.removeprefix('failed: ')}")
    print(f"generation {generation} serves, the old generation ends")
    return 0


def _hand_over(settings: Settings, base: str, master: int) -> str:
    """Request a handover, wait for the end, and return the outcome."""
    lock = rundir.lock(base, "handover")
    before = rundir.handed_over(base)
    send_signal(master, signal.SIGUSR2)
    begun = time.monotonic()
    seen = False
    while time.monotonic() < begun + settings.load_timeout_s + _BEYOND_LOAD_S:
        working = lock.holder() is not None
        outcome = rundir.handed_over(base)
        if outcome != before:
            return outcome
        seen = seen or working
        if (seen and not working) or (not seen and time.monotonic() > begun + _BEGIN_S):
            break
        if has_ended(master):
            raise Unavailable("the server has ended")
        time.sleep(_LOOK_S)
    raise Unavailable("the handover did not begin, or ended without a result; see the log")


def _await_earlier(settings: Settings, base: str) -> None:
    """Wait for the end of an earlier handover, which lasts until either of its generations has
    ended."""
    limit_s = settings.load_timeout_s + _BEYOND_LOAD_S + 3 * settings.drain_timeout_s + _BEGIN_S
    deadline = time.monotonic() + limit_s
    while (pid := rundir.lock(base, "handover").holder()) is not None:
        if time.monotonic() > deadline:
            raise Unavailable(f"an earlier reload does not end (pid {pid})")
        time.sleep(_LOOK_S)
