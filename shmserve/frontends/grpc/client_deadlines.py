"""Cancels calls whose client keeps us waiting: for their message (`silent_calls`), or to take their
answer.

gRPC itself waits for ever, with a thread in the first case and the answer's bytes in the
second; only some clients set deadlines.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from functools import partial

from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.grpc.thread_pools import BoundedPool

_log = logging.getLogger(__name__)

_TICK_S = 1.0
_RESTING_S = 3600.0  # while nobody is waited for
_PRESSED_TICK_S = 0.1  # while calls wait for the threads of silent ones


class ClientDeadlines:
    """Who is waited for, and until when. `close` ends its thread."""

    def __init__(self) -> None:
        self._pools: tuple[BoundedPool, ...] = ()
        self._due: dict[RpcContext, float] = {}
        self._closing = False
        self._resting = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="overdue", daemon=True)

    def start(self, pools: Iterable[BoundedPool]) -> None:
        """Begin to look, at the silent calls of these pools, too."""
        self._pools = tuple(pools)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def __len__(self) -> int:
        return len(self._due)

    def expect(self, context: RpcContext, seconds: float) -> None:
        """The client of this call has so long to do its part."""
        self._due[context] = time.monotonic() + seconds
        if self._resting:
            self._wake.set()

    def met(self, context: RpcContext) -> None:
        """It has done it, or the call has ended."""
        self._due.pop(context, None)

    def expect_taken(self, context: RpcContext, seconds: float) -> None:
        """As `expect`, until the call has ended: its answer was taken."""
        self._due[context] = time.monotonic() + seconds
        if self._resting:
            self._wake.set()
        if not context.add_callback(partial(self.met, context)):
            self.met(context)

    def _run(self) -> None:
        pause_s = _TICK_S
        while True:
            woken = self._wake.wait(pause_s)
            self._stir()
            if self._closing:
                return
            try:
                self._end_overdue()
                pressed = any(pool.pressed for pool in self._pools)
                # Who was woken looks once more before it rests: else each call would wake it
                pause_s = _TICK_S if woken else self._rest()
                pause_s = _PRESSED_TICK_S if pressed else pause_s
            except Exception:  # nobody else would look
                _log.exception("looking for calls that are overdue failed")
                pause_s = _TICK_S

    def _rest(self) -> float:
        """How long nothing needs to be looked at; whoever has to wait from now on ends it."""
        self._resting = True
        for pool in self._pools:
            pool.silent.began = self._wake.set
        if not self._due and not any(len(pool.silent) or pool.starved for pool in self._pools):
            return _RESTING_S
        self._stir()
        return _TICK_S

    def _stir(self) -> None:
        self._resting = False
        for pool in self._pools:
            pool.silent.began = None
        self._wake.clear()

    def _end_overdue(self) -> None:
        for pool in self._pools:
            pool.look()
        now = time.monotonic()
        for context, due in list(self._due.items()):
            if now >= due:
                self.met(context)
                _log.info("cancelled a call: %s kept it waiting for too long", context.peer())
                context.cancel()
