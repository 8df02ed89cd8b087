"""The supervisor with the stand-ins for coordinator and executor."""

import argparse
import os
import sys

from shmserve import config
from shmserve.observe import log_output, logs
from shmserve.shm.registry_page import RegistryReader
from shmserve.supervisor.announce import Announcer
from shmserve.supervisor.service import Commands, Inherited, Supervisor
from shmserve.transport.notify import Notifier

HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--process-id", required=True)
    parser.add_argument("--master-fd", type=int, required=True)
    parser.add_argument("--lock-fd", type=int, required=True)
    parser.add_argument("--grpc-fds", type=int, nargs="*", default=[])
    parser.add_argument("--notify-socket", default="")
    parser.add_argument("--watchdog-usec", type=int, default=0)
    parser.add_argument("--begun", type=float)
    for address in ("--http", "--grpc"):
        parser.add_argument(address, nargs="*", default=[])
    arguments = parser.parse_args()
    if os.fork():
        os._exit(0)
    settings = config.load()
    logs.setup("supervisor", "info")
    run_dir = config.run_dir(settings)
    commands = Commands(
        coordinator=[sys.executable, os.path.join(HERE, "coordinator.py")],
        executor=[sys.executable, os.path.join(HERE, "executor.py")],
    )
    notifier = Notifier(arguments.notify_socket)
    announcer = Announcer(notifier, RegistryReader(run_dir), arguments.watchdog_usec / 1e6)
    inherited = Inherited(arguments.master_fd, arguments.lock_fd)
    process = arguments.process_id
    return Supervisor(settings, run_dir, process, inherited, commands, announcer).run()


status = main()
log_output.end()
os._exit(status)  # as shmserve.supervisor does
