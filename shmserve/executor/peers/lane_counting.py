"""Counts of lane requests and outcomes, kept by the executor, as no frontend takes part."""

import os
import time
from collections.abc import Callable

from shmserve.core.stats.counter_pages import UNCOUNTED_WORD
from shmserve.core.stats.request_counters import (
    Reason,
    RequestCounters,
    nwords,
    reason_of,
    reason_of_answer,
)
from shmserve.errors import ShmserveError
from shmserve.executor.peers.lane import LaneCall
from shmserve.protocol.control.lane_messages import LaneAnswer
from shmserve.protocol.control.stats_messages import CounterPage
from shmserve.shm.counter_page import OwnCounterPage
from shmserve.tensor.spec import ModelSpec

Tell = Callable[..., None]  # called with (message, fds)


class LaneCounting:
    """A counter page for lane requests. The coordinator is told of the page with the first lane,
    and again after each restart of the coordinator. For the loop's thread."""

    def __init__(self, spec: ModelSpec, epoch: str, tell: Tell) -> None:
        self._spec = spec
        self._epoch = epoch
        self._tell = tell
        self._page: OwnCounterPage | None = None
        self._counters: RequestCounters | None = None
        self._announced = False

    def open(self) -> None:
        """Create the page of counters, and tell the coordinator. Idempotent. Raise OSError if no
        descriptor is left."""
        if self._page is None:
            self._page = OwnCounterPage(self._epoch, nwords(1))
            self._counters = RequestCounters(self._page.words)
        if not self._announced:
            self.announce()

    def announce(self) -> None:
        """Tell the coordinator of the page, if the page exists."""
        self._announced = False
        if self._page is None:
            return
        fd = self._page.reader_fd()
        if fd is not None:
            try:
                self._tell(CounterPage(self._page.nbytes), [fd])
            finally:
                os.close(fd)
        self._announced = True

    def sending(self, call: LaneCall) -> None:
        """Show that the last answer to a request is sent before the request is counted by
        `answered`. If the process is killed in between, the request stays uncounted."""
        if self._page is not None:
            self._page.words[UNCOUNTED_WORD] = call.began_ns

    def add(self, call: LaneCall, answer: LaneAnswer) -> None:
        """Add the copied bytes of an answer to the copied bytes of the request."""
        before, receipt = call.copied, answer.receipt
        call.copied = (
            before[0] + receipt.copied_in,
            before[1] + receipt.copied_batch,
            before[2] + receipt.copied_out,
            before[3] + receipt.copied_device,
        )

    def answered(self, call: LaneCall, answer: LaneAnswer, now_ns: int) -> None:
        """Count a request whose last answer was sent at `now_ns`."""
        receipt = answer.receipt
        copied: tuple[int, ...] = (
            receipt.copied_in,
            receipt.copied_batch,
            receipt.copied_out,
            receipt.copied_device,
        )
        if call.credit:
            self.add(call, answer)
            copied = call.copied
        reason = reason_of_answer(answer.code) if answer.code else None
        self._ended(reason, now_ns - call.began_ns, copied)
        if self._page is not None:
            self._page.words[UNCOUNTED_WORD] = 0

    def refused(self, error: ShmserveError) -> None:
        """Count a refused request."""
        self._ended(reason_of(error))

    def lost(self, call: LaneCall) -> None:
        """Count a request whose caller has gone."""
        now = time.monotonic_ns()
        reason = Reason.DEADLINE if now >= call.deadline_ns else Reason.CANCELLED
        self._ended(reason, now - call.began_ns, call.copied)

    def _ended(self, reason: Reason | None, ns: int = 0, copied: tuple[int, ...] = ()) -> None:
        if self._counters is not None:
            self._counters.ended(self._spec.name, self._spec.version, reason, ns, copied)

    def close(self) -> None:
        """Close the page. Processes that were given the page can still read the last counts."""
        if self._page is not None:
            self._page.close()
            self._page, self._counters = None, None
