"""Each HTTP worker's guard: a thread that replaces a dead supervisor and outlives no master."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

from shmserve.config import Settings
from shmserve.supervisor import launch
from shmserve.transport.processes import has_ended

_log = logging.getLogger(__name__)

_PERIOD_S = 0.5
_AFTER_LAUNCH_S = 3.0  # a supervisor needs a moment until it holds its lock
_AFTER_MASTER_S = 4.0  # for requests to end once the master is gone


def start_guard(settings: Settings) -> None:
    """Start the thread; call it in an HTTP worker, after the fork."""
    threading.Thread(
        target=_watch, args=(settings, launch.master_fd()), name="shmserve-guard", daemon=True
    ).start()


def _watch(settings: Settings, master_fd: int) -> None:
    launched_at = time.monotonic()  # the master has just launched one
    while not has_ended(master_fd, _PERIOD_S):
        if time.monotonic() - launched_at < _AFTER_LAUNCH_S:
            continue
        try:
            if launch.ensure(settings, master_fd):
                launched_at = time.monotonic()
                _log.warning("the supervisor was gone, started another")
        except Exception:  # try again: nobody else would
            _log.exception("the supervisor could not be started")
            launched_at = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)  # gunicorn's way to finish what was accepted
    time.sleep(_AFTER_MASTER_S)
    os._exit(1)
