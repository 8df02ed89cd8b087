"""Command ``shmserve reload``: has a running service replace its processes (setting `reload`)."""

import argparse
import os
import signal
import time

from shmserve import config
from shmserve.config import Settings
from shmserve.errors import Unavailable
from shmserve.transport import rundir
from shmserve.transport.processes import has_ended, send_signal
from shmserve.transport.rundir import ReloadTerms

_LOOK_S = 0.05
_BEGIN_S = 8.0  # seconds for the master to fork
_UNKNOWN_GENERATION = "-"
_BEYOND_LOAD_S = 90.0  # seconds of a handover beyond the loading of models


def main(arguments: argparse.Namespace) -> int:
    settings = config.load()
    base = config.base_dir(settings)
    # wait first: after a handover, another process is the master, perhaps with other settings
    _await_earlier(_terms(settings, base), base)
    terms = _terms(settings, base)
    holder = rundir.lock(rundir.serving(base), "master").holder_pidfd()
    if holder is None:
        raise Unavailable(
            f"no server has the run directory {base}; SHMSERVE_CONFIG or SHMSERVE_RUN_DIR must be "
            "those of the server"
        )
    pid, master = holder
    if terms.reload == "workers":
        send_signal(master, signal.SIGHUP)
        print(f"the HTTP workers of pid {pid} are replaced (setting reload)")
        return 0
    outcome = _hand_over(terms, base, master)
    generation, _, state = outcome.partition(" ")
    if state != rundir.SERVES:
        raise Unavailable(f"the old generation serves on: {state.removeprefix('failed: ')}")
    print(f"generation {generation} serves, the old generation ends")
    return 0


def _terms(settings: Settings, base: str) -> ReloadTerms:
    """Return the settings of the running service. A service of an earlier version has not written
    them down: for such a service, return the caller's."""
    running = rundir.read_reload(rundir.serving(base))
    own = ReloadTerms(settings.reload, settings.load_timeout_s, settings.drain_timeout_s)
    return running or own


def _hand_over(terms: ReloadTerms, base: str, master: int) -> str:
    """Request a handover, wait for the end, and return the outcome."""
    lock = rundir.lock(base, "handover")
    before, served = rundir.handed_over(base), rundir.serving(base)
    send_signal(master, signal.SIGUSR2)
    begun = time.monotonic()
    seen = False
    while time.monotonic() < begun + terms.load_timeout_s + _BEYOND_LOAD_S:
        working = lock.holder() is not None
        outcome = rundir.handed_over(base)
        if outcome != before:
            return outcome
        seen = seen or working
        if seen and not working:
            return _outcome_of_killed(base, served)
        if not seen and has_ended(master):
            raise Unavailable("the server has ended")
        if not seen and time.monotonic() > begun + _BEGIN_S:
            raise Unavailable("the handover did not begin: the server's main process hangs")
        time.sleep(_LOOK_S)
    raise Unavailable("the handover does not end; the log says more")


def _outcome_of_killed(base: str, served: str) -> str:
    """Return the outcome of a handover whose process was killed: only its last step, which lets
    the new generation serve, changes anything."""
    serving = rundir.serving(base)
    if serving == served:
        return f"{_UNKNOWN_GENERATION} failed: the process of the handover was killed"
    return f"{os.path.basename(serving)} {rundir.SERVES}"


def _await_earlier(terms: ReloadTerms, base: str) -> None:
    """Wait for the end of an earlier handover: the end of either generation."""
    limit_s = terms.load_timeout_s + _BEYOND_LOAD_S + 3 * terms.drain_timeout_s + _BEGIN_S
    deadline = time.monotonic() + limit_s
    while (pid := rundir.lock(base, "handover").holder()) is not None:
        if time.monotonic() > deadline:
            raise Unavailable(f"an earlier reload does not end (pid {pid})")
        time.sleep(_LOOK_S)
