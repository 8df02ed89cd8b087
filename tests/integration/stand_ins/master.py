"""Stand-in for the gunicorn master and one HTTP worker, without gunicorn."""

import os
import signal
import sys
import threading

from shmserve import config
from shmserve.supervisor import guard, launch

HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    launch.SUPERVISOR[:] = [sys.executable, os.path.join(HERE, "supervisor.py")]
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    settings = config.load()
    launch.prepare(settings)
    launch.begin(settings)
    guard.start_guard(settings)
    stopped.wait(120)
    launch.end(settings)


main()
