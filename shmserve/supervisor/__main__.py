"""``python -m shmserve.supervisor``: started by `shmserve.supervisor.launch`, never by hand."""

import argparse
import os
import sys
from functools import partial


def main() -> int:
    parser = argparse.ArgumentParser(prog="shmserve.supervisor")
    add = parser.add_argument
    add("--process-id", required=True)
    add("--master-fd", type=int, required=True)
    add("--lock-fd", type=int, required=True)
    add("--log-fd", type=int, default=-1, help="the master sends its log lines there")
    add("--grpc-fds", type=int, nargs="*", default=[])
    add("--report-fd", type=int, default=-1, help="the old generation waits there for the result")
    add("--patient-until", type=float, default=0.0, help="clients wait so long (monotonic time)")
    add("--stored", nargs="*", default=[], help="NAME=FD of each descriptor that systemd has kept")
    add("--notify-socket", default="")
    add("--watchdog-usec", type=int, default=0)
    add("--main-is-master", action="store_true", help="the service has no keeper")
    add("--begun", type=float, help="monotonic time of the service's start; absent: long ago")
    add("--http", nargs="*", default=[], help="addresses for the greeting")
    add("--grpc", nargs="*", default=[], help="gRPC addresses for the greeting")
    add("--detach", action="store_true", help="run as a process without a parent")
    arguments = parser.parse_args()
    if arguments.detach and os.fork():
        # The caller waits for this half only. The other half is no child of gunicorn, which must
        # not reap it.
        os._exit(0)
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    # imported after the fork, so that the first half exits soon
    from setproctitle import setproctitle

    from shmserve import config, model_places
    from shmserve.observe import log_output, logs
    from shmserve.shm.registry_page import RegistryReader
    from shmserve.supervisor import launch
    from shmserve.supervisor.announce import Announcer
    from shmserve.supervisor.greeting import Doors, StartReport
    from shmserve.supervisor.service import Commands, Inherited, Supervisor
    from shmserve.transport import rundir
    from shmserve.transport.notify import Notifier

    settings = config.load()
    setproctitle(f"shmserve: supervisor ({config.run_dir(settings)})")
    logs.setup("supervisor", settings.log_level, settings.log_format)
    if arguments.log_fd >= 0:
        log_output.receive(arguments.log_fd)
    run_dir = config.run_dir(settings)
    python = [sys.executable, "-P", "-m"]
    commands = Commands(
        coordinator=[*python, "shmserve.coordinator"],
        executor=[*python, "shmserve.executor.process"],
        grpc=[*python, "shmserve.observe.last_words", "shmserve.frontends.grpc.process"],
        template=(*python, "shmserve.executor.process.template"),
        exporter=[*python, "shmserve.exporter"] if settings.exports else None,
        fetcher=[*python, "shmserve.fetcher"] if model_places.fetches(settings) else None,
    )
    notifier = Notifier(arguments.notify_socket)
    report = None
    if arguments.begun is not None:
        doors = Doors(tuple(arguments.http), tuple(arguments.grpc), settings.dashboard)
        report = StartReport(arguments.begun, doors)
    watchdog_s = arguments.watchdog_usec / 1e6
    speaks = partial(launch.serves, settings)
    main_pid = 0  # stays 0 in the first generation, and where a keeper is the main process
    if arguments.main_is_master and run_dir != config.base_dir(settings):
        main_pid = rundir.lock(run_dir, "master").holder() or 0
    reader = RegistryReader(run_dir)
    announcer = Announcer(notifier, reader, watchdog_s, report, speaks, main_pid)
    inherited = Inherited(
        *(arguments.master_fd, arguments.lock_fd, tuple(arguments.grpc_fds)),
        *(arguments.report_fd, arguments.patient_until, _named(arguments.stored)),
        begins=arguments.begun is not None,
    )
    process = arguments.process_id
    return Supervisor(settings, run_dir, process, inherited, commands, announcer).run()


def _named(stored: list[str]) -> tuple[tuple[str, int], ...]:
    return tuple((name, int(fd)) for name, _, fd in (text.rpartition("=") for text in stored))


if __name__ == "__main__":
    status = main()
    from shmserve.observe import log_output

    log_output.end()
    # Python's own exit waits for other threads, and nothing of a finished supervisor may stay.
    os._exit(status)
