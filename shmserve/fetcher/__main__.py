"""Entry point of the fetcher: ``python -m shmserve.fetcher``, started by the supervisor, never by
hand.

Each question of the coordinator is answered in a thread of a pool. The main thread only signals
that the process is alive.
"""

import argparse
import logging
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

from setproctitle import setproctitle

from shmserve import config, ids, model_places
from shmserve.config import Settings
from shmserve.core.control.silence import period_s
from shmserve.errors import ShmserveError
from shmserve.fetcher import stores
from shmserve.fetcher.cache import Cache
from shmserve.fetcher.rounds import Rounds
from shmserve.log_fields import log_fields
from shmserve.observe import flight_recorder, log_output, logs
from shmserve.protocol.control.messages import FromCoordinator
from shmserve.protocol.control.model_messages import FetchModels, ModelsFetched
from shmserve.transport import rundir
from shmserve.transport.link import Link, LinkHandlers
from shmserve.transport.processes import FileLock, follow

_log = logging.getLogger(__name__)

_SIDE_BY_SIDE = 4  # concurrent questions; the coordinator keeps the queue short
_TOLD, _TEXT = 150, 400  # limits of an answer: problems, and characters of each
# Bytes of memory. The libraries take in whatever a store answers to a listing, so an endless answer
# could take all memory of the host. A listing of 200,000 files takes at most 1.2 GB. If a listing
# beside it finds no memory, the next round lists again.
_MEMORY = 2 << 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="shmserve.fetcher")
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--master-fd", type=int, required=True)
    arguments = parser.parse_args()
    settings = config.load()
    setproctitle("shmserve: fetcher")
    logs.setup("fetcher", settings.log_level, settings.log_format)
    stores.quiet()
    _limit_memory()
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the master
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    follow(arguments.master_fd, stop.set)
    lock = rundir.lock(config.run_dir(settings), f"fetcher-{arguments.number}")
    if not lock.acquire():
        _log.info("another process fetches")
        return 0
    try:
        _serve(settings, lock, stop)
    finally:
        lock.release()
    return 0


def _limit_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY or soft > _MEMORY:
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, hard))


def _serve(settings: Settings, lock: FileLock, stop: threading.Event) -> None:
    run_dir = config.run_dir(settings)
    process = ids.new_process_id("fetcher", os.getpid())
    flight_recorder.start(run_dir, process)
    folder = model_places.cache_dir(settings)
    cache = Cache(folder, settings.repository_cache_bytes, process)
    link = _Desk(settings, cache, run_dir, process).link
    link.start()
    while not stop.wait(period_s(settings.watchdog_s)):
        if not lock.beat():
            _log.error("run_dir: files have been removed, ending for a successor")
            break
    link.close()


class _Desk:
    """Receiver of the coordinator's questions, called in the link's thread."""

    def __init__(self, settings: Settings, models: Cache, run_dir: str, process: str) -> None:
        self._rounds = Rounds(settings, models, lambda url: stores.Store(url, settings))
        self._threads = ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="round")
        self.link = Link(run_dir, "fetcher", process, LinkHandlers(on_message=self._take))

    def _take(self, message: FromCoordinator) -> None:
        if isinstance(message, FetchModels):
            self._threads.submit(self._answer, message)

    def _answer(self, message: FetchModels) -> None:
        try:
            done = self._rounds.run(message.names, message.keep)
            problems, unlisted = done.problems, done.unlisted
        except Exception as ex:  # answer after any error: the coordinator waits
            reason = ex.message if isinstance(ex, ShmserveError) else type(ex).__name__
            _log.error("models not fetched", extra=log_fields(reason=reason))
            problems, unlisted = {}, (f"model_repository: {reason}",)
        reasons = {name: reason[:_TEXT] for name, reason in list(problems.items())[:_TOLD]}
        self.link.send(ModelsFetched(message.ticket, reasons, tuple(w[:_TEXT] for w in unlisted)))


if __name__ == "__main__":
    status = main()
    log_output.end()
    # A running transfer must not keep a finished process alive. Complete files are kept.
    os._exit(status)
