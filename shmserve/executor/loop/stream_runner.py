"""Stream runner: runs requests of a decoupled model, which may send many answers, from any thread.

The model takes its next requests as soon as `execute` has returned, up to `max_streams` open
streams. The thread that watches the channels sends the answers that come while the model runs.

The model runs in the executor's main thread, and a second thread watches the channels, not the
other way round: libraries that install signal handlers or event loops expect to run in the thread
that loaded them.

The watchdog (`execute_timeout_s`) looks at the stream that has been still for longest. A stream
that waits for its reader does not count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from shmserve.errors import Cancelled, ProtocolViolation, ShmserveError
from shmserve.executor.backend import Backend
from shmserve.executor.loop.runner import Key, Requested, RunOutcome, as_error
from shmserve.executor.loop.stream_book import StreamBook
from shmserve.executor.peers.frontend_connections import FrontendConnection
from shmserve.executor.tensors.request import ExecutorRequest
from shmserve.protocol.control.data_messages import Answer, Execute


class StreamRunner:
    """Implements `Runner`. `model_runs`: surrounds each call of the model, during which another
    thread looks after the channels."""

    def __init__(
        self, backend: Backend, book: StreamBook, model_runs: AbstractContextManager[None]
    ) -> None:
        self._backend = backend
        self._book = book
        self._model_runs = model_runs

    def run(self, batch: Sequence[Requested], now_ns: int) -> Sequence[RunOutcome]:
        """Run requests together. Their streams answer."""
        running = self._book.running
        for requested in batch:
            self._open(*requested)
        with self._model_runs:  # also while requests are read, which may take long
            requests, violations = self._begin()
            started_ns = time.monotonic_ns()
            error = self._execute(requests)
        for key, violation in violations:
            del running[key]
            self._book.violated(key, violation)
        if error is not None:
            for stream in running.values():
                stream.fail(error)
        self._book.count_run(time.monotonic_ns() - started_ns, is_over=True)
        outcomes = [self._outcome(*requested) for requested in batch]
        running.clear()
        return outcomes

    def withdraw(self, connection: FrontendConnection, answer: Answer) -> Answer | None:
        """End a paused stream with an error and return None. Return the answer to any other
        request."""
        stream = self._book.paused.pop((connection, answer.request), None)
        if stream is None:
            return answer
        stream.fail(Cancelled("cancelled"))
        return None

    def rest(self) -> None:
        """Do nothing: no request is prepared ahead of its run."""

    def _open(self, connection: FrontendConnection, message: Execute) -> None:
        """Add the stream of a request to the running streams, unless the stream cannot run."""
        key: Key = connection, message.request
        book = self._book
        stream = book.paused.pop(key, None)
        if stream is None:
            stream = book.open(connection, message)
        elif stream.rescheduled:
            stream.resume(message)
        else:  # a thread of the model has ended the stream
            stream = None
        if stream is not None:
            book.running[key] = stream

    def _begin(self) -> tuple[list[ExecutorRequest], list[tuple[Key, ProtocolViolation]]]:
        """Return the requests of the running streams, and the streams whose request broke the
        protocol."""
        requests, violations = [], []
        for key, stream in self._book.running.items():
            try:
                requests.append(stream.begin())
            except ProtocolViolation as ex:
                violations.append((key, ex))
            except Exception as ex:  # also OSError, when client memory is opened
                stream.fail(as_error(ex))
        return requests, violations

    def _execute(self, requests: list[ExecutorRequest]) -> ShmserveError | None:
        try:
            if requests:
                self._backend.execute(requests)
        except BaseException as ex:
            return as_error(ex).with_traceback(None)  # a traceback would keep views of inputs
        return None

    def _outcome(self, connection: FrontendConnection, message: Execute) -> RunOutcome:
        """Return the outcome of a request; pause the stream if the request is to run again."""
        key: Key = connection, message.request
        stream = self._book.running.get(key)
        has_failed = stream is None or stream.has_failed
        rescheduled = stream is not None and stream.rescheduled
        if stream is not None and rescheduled:
            stream.pause()
            self._book.paused[key] = stream
        return RunOutcome(connection, message, rescheduled=rescheduled, stream_failed=has_failed)
