"""The supervisor with the stand-ins for coordinator and executor."""

import argparse
import os
import sys

from shmserve import config
from shmserve.observe import logs
from shmserve.supervisor.service import Supervisor
from shmserve.transport.notify import Notifier

HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--process-id", required=True)
    parser.add_argument("--master-fd", type=int, required=True)
    parser.add_argument("--notify-socket", default="")
    parser.add_argument("--watchdog-usec", type=int, default=0)
    arguments = parser.parse_args()
    if os.fork():
        os._exit(0)
    settings = config.load()
    logs.setup("supervisor", "info")
    return Supervisor(
        settings,
        config.run_dir(settings),
        arguments.process_id,
        arguments.master_fd,
        coordinator=[sys.executable, os.path.join(HERE, "coordinator.py")],
        executor=[sys.executable, os.path.join(HERE, "executor.py")],
        notifier=Notifier(arguments.notify_socket),
        watchdog_s=arguments.watchdog_usec / 1e6,
    ).run()


sys.exit(main())
