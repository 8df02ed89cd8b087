"""Stand-in for the gunicorn master and one HTTP worker, without gunicorn."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import BinaryIO

from shmserve import config
from shmserve.supervisor import guard, launch
from shmserve.transport.processes import spawn

HERE = os.path.dirname(os.path.abspath(__file__))


def spawn_stand_in(
    role: str,
    arguments: Sequence[str],
    *,
    keep: Sequence[int],
    stdin: BinaryIO | None,
    environ: dict[str, str],
    new_session: bool,
) -> subprocess.Popen[bytes]:
    script = os.path.join(HERE, f"{role}.py")
    return spawn(
        [sys.executable, script, *arguments],
        keep=keep,
        stdin=stdin,
        environ=environ,
        new_session=new_session,
    )


def main() -> None:
    vars(launch)["spawn_role"] = spawn_stand_in
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    settings = config.load()
    launch.prepare(settings)
    launch.begin(settings)
    guard.start_guard(settings)
    stopped.wait(120)
    launch.end(settings)


main()
