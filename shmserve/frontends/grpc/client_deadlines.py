"""Cancels calls whose client keeps us waiting: for their message, or to take their answer.

gRPC itself waits for ever, with a thread in the first case and the answer's bytes in the
second; only some clients set deadlines.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

from shmserve.frontends.grpc.rpc_methods import RpcContext

_log = logging.getLogger(__name__)

_TICK_S = 1.0


class ClientDeadlines:
    """Who is waited for, and until when. `close` ends its thread."""

    def __init__(self) -> None:
        self._due: dict[RpcContext, float] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="overdue", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def __len__(self) -> int:
        return len(self._due)

    def expect(self, context: RpcContext, seconds: float) -> None:
        """The client of this call has so long to do its part."""
        self._due[context] = time.monotonic() + seconds

    def met(self, context: RpcContext) -> None:
        """It has done it, or the call has ended."""
        self._due.pop(context, None)

    def expect_taken(self, context: RpcContext, seconds: float) -> None:
        """As `expect`, until the call has ended: its answer was taken."""
        self._due[context] = time.monotonic() + seconds
        if not context.add_callback(partial(self.met, context)):
            self.met(context)

    def _run(self) -> None:
        while not self._closing.wait(_TICK_S):
            now = time.monotonic()
            for context, due in list(self._due.items()):
                if now >= due:
                    self.met(context)
                    _log.info("cancelled a call: %s kept it waiting for too long", context.peer())
                    context.cancel()
