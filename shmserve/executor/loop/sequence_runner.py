"""Sequence runner: keeps the states of sequences around each run of another runner."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shmserve.core.scheduling.sequence_queue import Step
from shmserve.executor.loop.runner import IsCancelled, Key, Requested, Runner, RunOutcome, cancelled
from shmserve.executor.loop.sequence_intake import SequenceIntake
from shmserve.executor.wrappers.sequence_backend import flags_of, sequence_of
from shmserve.executor.wrappers.sequence_tensors import States


class SequenceRunner:
    """Implements `Runner` around `inner`, a batch or stream runner. `states`: states of the
    sequences."""

    def __init__(
        self, inner: Runner, intake: SequenceIntake, states: States, is_cancelled: IsCancelled
    ) -> None:
        self._inner = inner
        self._intake = intake
        self._states = states
        self._is_cancelled = is_cancelled
        self.withdraw = inner.withdraw
        self.rest = inner.rest

    def run(self, batch: Sequence[Requested], now_ns: int) -> Sequence[RunOutcome]:
        """Run requests of different sequences, then let their next requests run."""
        for _, message in batch:
            if flags_of(message.parameters).start:  # also a living sequence may begin anew
                self._states.forget(sequence_of(message.parameters))
        outcomes = self._inner.run(batch, now_ns)
        again: dict[Key, Step[Key, Requested]] = {}
        for outcome in outcomes:
            connection, message = outcome.connection, outcome.message
            sequence = sequence_of(message.parameters)
            self._states.settle(sequence, not outcome.has_failed)
            if not outcome.rescheduled:
                continue
            if self._is_cancelled(connection, message.request):
                outcome.cancel(self._inner.withdraw(connection, cancelled(message.request)))
            else:
                again[connection, message.request] = self._intake.again(connection, message)
        self._intake.queue.done(time.monotonic_ns(), again)
        return outcomes
