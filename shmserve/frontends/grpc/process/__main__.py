"""``python -m shmserve.frontends.grpc.process``: started by the supervisor, never by hand."""

import argparse
import gc
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from setproctitle import setproctitle

from shmserve import config
from shmserve.core.control.silence import period_s
from shmserve.dispatch.process.dispatcher import Dispatcher
from shmserve.errors import ConfigError
from shmserve.frontends.grpc.http2_engine.engine import caller_by_socket
from shmserve.frontends.grpc.process import malloc_trim
from shmserve.frontends.grpc.process.listeners import AlreadyRuns, Listening
from shmserve.frontends.grpc.process.server import GrpcServer
from shmserve.observe import last_words, log_output, logs
from shmserve.transport.processes import follow, raise_fd_limit
from shmserve.transport.trust.peer_credentials import take_as_remote

_log = logging.getLogger("shmserve.grpc")

_TURN_S = 0.1  # seconds between checks whether the process is to stop


def main() -> int:
    parser = argparse.ArgumentParser(prog="shmserve.frontends.grpc.process")
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--master-fd", type=int, required=True)
    parser.add_argument("--listen-fds", type=int, nargs="*", default=[])
    parser.add_argument(
        "--turn-fd",
        type=int,
        default=-1,
        help="descriptor that has a byte when this process may listen",
    )
    arguments = parser.parse_args()
    settings = config.load()
    setproctitle(f"shmserve: grpc {arguments.number}")
    logs.setup(f"grpc {arguments.number}", settings.log_level, settings.log_format)
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the master, which drains
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    follow(arguments.master_fd, stop.set)
    raise_fd_limit()
    sockets = [socket.socket(fileno=fd) for fd in arguments.listen_fds]
    await_turn = partial(_await_turn, arguments.turn_fd, stop)
    return _serve(settings, arguments.number, sockets, stop, await_turn)


def _serve(
    settings: config.Settings,
    number: int,
    sockets: list[socket.socket],
    stop: threading.Event,
    await_turn: Callable[[], bool],
) -> int:
    dispatcher = Dispatcher(settings, "grpc")
    try:
        run_dir = config.run_dir(settings)
        listening = Listening(settings, run_dir, number, () if sockets else None)
        take_as_remote(settings.remote_binds)
        server = GrpcServer(dispatcher, settings, caller_by_socket)
        if not await_turn():
            _log.info("ending before its turn to listen")
            return 0
        bound = listening.bind(server.server.adopt)
        bound += [server.server.adopt(sock, listening.certificates) for sock in sockets]
    except AlreadyRuns:
        _log.info("another gRPC process has this number")
        return 0
    except ConfigError as ex:
        _log.error("no gRPC: %s", ex.message)
        last_words.tell(ex.message)
        return 1
    try:
        dispatcher.start()
        server.start(_fail)
        gc.collect()
        gc.freeze()  # modules and handlers live as long as the process
        beating = (server, listening, stop, period_s(settings.watchdog_s))
        threading.Thread(target=_beat, args=beating, daemon=True).start()
        _log.info("listening on %s", " ".join(bound))
        malloc_trim.trim_until(stop, settings.segment_idle_s)
        _log.info("draining")
        server.drain(settings.drain_timeout_s)
    finally:
        listening.close()
        dispatcher.close()
    return 0


def _fail() -> None:
    """End without a drain: nothing is served any more, and a successor starts soon."""
    try:
        log_output.end()
    finally:
        os._exit(1)


def _await_turn(fd: int, stop: threading.Event) -> bool:
    """Wait until this process may listen, and return True. Return False if the process must end
    instead: after a stop signal, or when the pipe has closed. The pipe closes with the
    supervisor, whose successor starts its own processes."""
    if fd < 0:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    events: list[tuple[int, int]] = []
    while not stop.is_set() and not events:
        events = poll.poll(_TURN_S * 1000)
    os.close(fd)
    return not stop.is_set() and any(event & select.POLLIN for _, event in events)


def _beat(server: GrpcServer, listening: Listening, stop: threading.Event, every_s: float) -> None:
    """Give signs of life while the server's loop turns, also while draining. Stop the process if
    the run directory has lost its files."""
    while True:
        time.sleep(every_s)
        if server.server.lives() and not listening.beat() and not stop.is_set():
            _log.error("run_dir: files have been removed, ending for a successor")
            stop.set()


if __name__ == "__main__":
    status = main()
    log_output.end()
    # Threads of extensions must not keep a finished process from ending.
    os._exit(status)
