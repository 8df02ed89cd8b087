"""Channel watch: a second thread that looks after the channels while the model runs.

The loop's thread always holds the lock of the channels, except while the model runs, inside `with
watch:`. Then the watching thread takes the lock, and attends to the channels until the model has
returned. So the two threads never touch channels, scheduler or streams at the same time.
"""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class ChannelWatch:
    """Hands the channels to the watching thread and back. `attend`: looks after the channels once,
    for a bounded time. `wake`: makes a waiting `attend` return. `disconnect`: closes all channels,
    after a defect in `attend`."""

    def __init__(
        self,
        attend: Callable[[], None],
        wake: Callable[[], None],
        disconnect: Callable[[], None],
    ) -> None:
        self._attend = attend
        self._wake = wake
        self._disconnect = disconnect
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # released once for each turn of the second thread
        self._turn.acquire()
        self._model_runs = False
        self._is_over = False
        self._is_broken = False

    def serve(self, serve: Callable[[], None]) -> None:
        """Call `serve`, the loop itself, until it returns. Meanwhile this thread holds the
        channels."""
        threading.Thread(target=self._run, name="watch", daemon=True).start()
        try:
            with self._lock:
                serve()
        finally:
            self._is_over = True
            self._give_turn()

    def __enter__(self) -> None:
        self._model_runs = True
        self._lock.release()
        self._give_turn()

    def __exit__(self, *_: object) -> None:
        self._model_runs = False
        self._wake()
        self._lock.acquire()
        if self._is_broken:
            raise RuntimeError("the thread that looked after the channels has failed")

    def _give_turn(self) -> None:
        if self._turn.locked():  # else the second thread has not used the last turn yet
            self._turn.release()

    def _run(self) -> None:
        try:
            while True:
                self._turn.acquire()
                with self._lock:
                    if self._is_over:
                        return
                    while self._model_runs:
                        self._attend()
        except BaseException:
            log.critical("the executor's loop is broken", exc_info=True)
            self._is_broken = True  # `__exit__` then raises, which ends the process
            self._disconnect()  # frontends see EOF at once
            raise
