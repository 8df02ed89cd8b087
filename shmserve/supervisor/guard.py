"""Guard: a thread of each HTTP worker that replaces a dead or silent supervisor.

A guard, and so its worker, ends soon after the gunicorn master.
"""

import logging
import os
import random
import select
import signal
import threading
import time

from shmserve import config
from shmserve.config import Settings
from shmserve.core.control.silence import Silence, period_s
from shmserve.log_fields import log_fields
from shmserve.observe import flight_recorder
from shmserve.supervisor import launch
from shmserve.transport.processes import has_ended, send_signal

_log = logging.getLogger(__name__)

_AFTER_LAUNCH_S = 3.0  # a supervisor needs a moment until it holds its lock
_LAUNCHED_S = 0.5  # pause before the next look at the supervisor's lock
_AFTER_MASTER_S = 4.0  # for requests to end after the master's end


def start_guard(settings: Settings) -> None:
    """Start the thread. Called in an HTTP worker, after the fork."""
    threading.Thread(
        target=_watch, args=(settings, launch.master_fd()), name="shmserve-guard", daemon=True
    ).start()


def _watch(settings: Settings, master_fd: int) -> None:
    launched_at = time.monotonic()  # the master has just launched a supervisor
    look_s = period_s(settings.watchdog_s)
    silence = Silence(look_s)
    while not _has_ended(settings, master_fd, look_s):
        if time.monotonic() - launched_at < _AFTER_LAUNCH_S:
            continue
        try:
            if launch.ensure(settings, master_fd):
                launched_at = time.monotonic()
                flight_recorder.record("process ended", "supervisor", "another has been started")
                _log.warning("the supervisor was gone, started another")
            else:
                _end_if_silent(settings, silence)
        except Exception:  # try again: nothing else would
            _log.exception("the supervisor could not be started")
            launched_at = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)  # makes gunicorn finish accepted requests
    time.sleep(_AFTER_MASTER_S)
    os._exit(1)


def _has_ended(settings: Settings, master_fd: int, look_s: float) -> bool:
    """Return whether the master has ended. Waits for the end of the master or the supervisor, or
    until the supervisor's next sign of life is due."""
    holder = launch.supervisor_lock(settings).holder_pidfd()
    if holder is None:
        return has_ended(master_fd, _LAUNCHED_S)
    _, pidfd = holder
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(master_fd, select.POLLIN)
    try:
        ended = [fd for fd, _ in poll.poll(look_s * 1000)]
    finally:
        os.close(pidfd)
    # All guards see the supervisor's end. One comes first, and the others find the new supervisor.
    wait_s = random.uniform(0.0, _LAUNCHED_S) if ended else 0.0
    return master_fd in ended or has_ended(master_fd, wait_s)


def _end_if_silent(settings: Settings, silence: Silence) -> None:
    """Kill a supervisor that hangs or is stopped. The next turn starts another."""
    lock = launch.supervisor_lock(settings)
    seen = lock.holder(), lock.last_beat()
    if silence.seconds(seen, time.monotonic()) <= settings.watchdog_s:
        return
    holder = lock.holder_pidfd()
    if holder is None:
        return
    pid, pidfd = holder
    try:
        if pid == seen[0]:  # not a supervisor that another guard has started meanwhile
            about = log_fields(pid=pid)
            _log.error("the supervisor gives no sign of life, killing it", extra=about)
            flight_recorder.record("process killed", "supervisor", "it gives no sign of life")
            flight_recorder.keep(config.run_dir(settings))
            send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
