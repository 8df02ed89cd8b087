"""Calls of other models by the model of an executor, which uses dispatch as a frontend does.

The first call opens a dispatcher: an arena with a part of the pool's budget, a view of the
registry, and channels. So a call is counted like any other request, and all memory of a call comes
back when either process dies. This module alone connects an executor with `shmserve.dispatch`.

Inputs are copied once, into the arena. Outputs are views of the called executor's slots, and are
given back when the last array on the view is gone. Finalizers may interrupt any code, so a
finalizer only queues the action for `settle`.

A call may take the time left to the calling requests, and is cancelled when all calling requests
are cancelled. The answers of a stream have no common deadline, so a decoupled model's calls may
take `request_timeout_s`. Errors that leave a model lose their frames first, as frames would keep
arrays.

Circular calls: `Execute.callers` names the waiting models, their depth, and which of their
executors are blocked meanwhile. Blocked executors are not asked again. If no other instance is
left, the call is refused at once. A call deeper than `MAX_DEPTH` models is refused, too. Two
models that call each other for two clients at the same moment end with their deadlines: neither
request can know of the other.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from shmserve import errors
from shmserve.config import Settings
from shmserve.core.caller import UNKNOWN_CALLER, caller_number
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.dispatch.outcome import Outcome, RunOptions
from shmserve.dispatch.process.dispatcher import Dispatcher
from shmserve.executor.calling import CallAnswer, CallingRequest, ModelCall
from shmserve.executor.process.call_tensors import CallInput, Loan, borrowed, check_call
from shmserve.protocol.control.data_messages import CallingModel, Parameter
from shmserve.protocol.oip import load_request
from shmserve.protocol.oip.model_signature import make_signature

log = logging.getLogger(__name__)

MAX_CALLS = 256  # limit of concurrent calls from one instance to other models
MAX_DEPTH = 8  # limit of models that call each other for one request


class ModelCalls:
    """The calls of one executor to other models; implements `calling.OtherModels`. `model`: name of
    the executor's own model. `process`: name of the executor process."""

    def __init__(self, settings: Settings, model: str, process: str) -> None:
        self._settings = settings
        self._model = model
        self._process = process
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the next four attributes
        self._dispatcher: Dispatcher | None = None
        self._threads: ThreadPoolExecutor | None = None
        # a reference, so that no running call is collected as garbage
        self._running: set[DispatchedCall] = set()
        self._closed = False
        self._over: deque[Callable[[], None]] = deque()  # filled by finalizers

    def begin(self, call: ModelCall, calling: Sequence[CallingRequest]) -> DispatchedCall:
        self._check_process()
        self.settle()
        callers = self._callers(call, calling)
        timeout_s = self._timeout_s(call, calling)
        parameters, owner = self._of_sequence(call, calling)
        dispatcher = self._opened()
        entry = dispatcher.ready_model(call.model, call.version)
        try:
            tensors = [CallInput(tensor) for tensor in call.inputs]
            check_call(call, make_signature(entry.spec), tensors, self._settings)
            running = DispatchedCall(self, call, calling)
            options = RunOptions(
                call.id,
                tuple(call.outputs),
                parameters,
                on_wait=lambda: running.wanted,
                timeout_s=timeout_s,
                callers=callers,
                caller_number=caller_number("model", self._model),
                sequence_owner=owner,
                traceparent=next((r.traceparent for r in calling if r.traceparent), ""),
            )
            self._admit(running)
        except BaseException as ex:
            dispatcher.refused(entry, ex)
            raise
        try:
            running.open(dispatcher.call(entry, options, cancellable=True), tensors)
        except BaseException:
            self.ended(running)
            raise
        return running

    def settle(self) -> None:
        while self._over and os.getpid() == self._pid:
            try:
                action = self._over.popleft()
            except IndexError:  # another thread was quicker
                return
            try:
                action()
            except errors.ShmserveError as ex:
                log.warning("memory of a call was not given back: %s", ex)

    def is_ready(self, model: str, version: str = "") -> bool:
        try:
            return bool(self._opened().ready_model(model, version).instances)
        except (errors.NotFound, errors.Unavailable):
            return False

    def load(self, model: str, parameters: Mapping[str, Parameter | bytes]) -> None:
        load_request.check_name(model, self._settings)
        config, files = load_request.overrides(model, parameters, self._settings)
        self._opened().coordinator.load_model(model, config, files)

    def unload(self, model: str, dependents: bool = False) -> None:
        load_request.check_name(model, self._settings)
        self._opened().coordinator.unload_model(model, dependents)

    def close(self) -> None:
        """Cancel running calls and release everything. Idempotent."""
        with self._lock:
            self._closed = True
            dispatcher, self._dispatcher = self._dispatcher, None
            threads, running = self._threads, list(self._running)
        for call in running:
            call.give_up()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        self.settle()
        if dispatcher is not None:
            dispatcher.close()

    # ------------------------------------------------------------- for its calls

    def ended(self, running: DispatchedCall) -> None:
        """Forget a call that is over."""
        with self._lock:
            self._running.discard(running)

    def later(self, action: Callable[[], None]) -> None:
        """Have `settle` run the action. Takes no lock, as a finalizer may interrupt any code."""
        self._over.append(action)
        dispatcher = self._dispatcher
        if dispatcher is not None:  # the dispatcher's maintenance calls `settle`
            dispatcher.rest.end()

    def submit(self, running: DispatchedCall) -> Future[CallAnswer | None]:
        """Wait for the next answer on another thread. There is a thread for each call that may
        run."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="model-call")
            return self._threads.submit(running.next)

    # ------------------------------------------------------------------- inside

    def _check_process(self) -> None:
        # the fork shares the executor's sockets, but not the executor's threads
        if os.getpid() != self._pid:
            raise errors.Unavailable("a process that the model has forked cannot call models")

    def _opened(self) -> Dispatcher:
        self._check_process()
        with self._lock:
            if self._closed:
                raise errors.Unavailable("the calling model is ending")
            if self._dispatcher is None:
                dispatcher = Dispatcher(self._settings, "model", self.settle)
                dispatcher.start()
                self._dispatcher = dispatcher
            return self._dispatcher

    def _admit(self, running: DispatchedCall) -> None:
        with self._lock:
            if len(self._running) >= MAX_CALLS:
                raise errors.QueueFull(f"the model has {MAX_CALLS} calls under way")
            self._running.add(running)

    def _callers(
        self, call: ModelCall, calling: Sequence[CallingRequest]
    ) -> tuple[CallingModel, ...]:
        """Return the models that wait for the answer; this model is the last."""
        waiting_models = dict.fromkeys(caller for request in calling for caller in request.callers)
        depth = 1 + max((caller.depth for caller in waiting_models), default=0)
        if depth > MAX_DEPTH:
            raise errors.ResourceExhausted(
                f"model '{call.model}' cannot be called: more than {MAX_DEPTH} models would"
                " wait for each other"
            )
        # A decoupled model can serve other requests meanwhile, except while `execute` runs.
        own_thread = threading.current_thread() is threading.main_thread()
        blocked = any(request.responses is None or own_thread for request in calling)
        return (*waiting_models, CallingModel(self._model, self._process, depth, blocked))

    def _of_sequence(
        self, call: ModelCall, calling: Sequence[CallingRequest]
    ) -> tuple[dict[str, Parameter], int]:
        """Return the call's parameters, and the owner of the named sequence.

        The id of a calling request stands for the request's sequence. No batch has two owners'
        requests with equal ids (`SequenceNames`, `BatchIntake`). Any other id names a sequence of
        the calling model.
        """
        parameters = call.parameters
        if self._settings.shared_sequences or "sequence_id" not in parameters:
            return parameters, UNKNOWN_CALLER
        id = parameters["sequence_id"]
        for request in calling:
            sequence = request.sequence
            if sequence is not None and request.parameters.get("sequence_id") == id:
                return {**parameters, "sequence_id": sequence.id}, sequence.owner
        return parameters, caller_number("model", self._model)

    def _timeout_s(self, call: ModelCall, calling: Sequence[CallingRequest]) -> float:
        """Return the time limit of the call, in seconds: at most the time left to the calling
        requests. Streams are left out, as their deadline is that of the next answer, which does
        not bound calls."""
        limit_s = call.timeout_s or self._settings.request_timeout_s
        deadlines = [request.deadline_ns for request in calling if request.responses is None]
        if not deadlines or not all(deadlines):
            return limit_s
        remaining_s = (max(deadlines) - time.monotonic_ns()) / 1e9
        if remaining_s <= 0:
            raise errors.DeadlineExceeded(
                f"model '{call.model}' cannot be called: the calling request's deadline has passed"
            )
        return min(limit_s, remaining_s)


class DispatchedCall:
    """A call to another model; implements `calling.RunningCall`."""

    def __init__(
        self, calls: ModelCalls, call: ModelCall, calling: Sequence[CallingRequest]
    ) -> None:
        self._calls = calls
        self._calling = calling
        self._model = call.model
        self._is_stream = call.stream
        self._turn = threading.Lock()  # held by the thread that uses the call
        self._call: InferenceCall | None = None
        self._answers: Iterator[CallAnswer] = iter(())

    def open(self, call: InferenceCall, inputs: Sequence[CallInput]) -> None:
        """Copy the inputs into slots of the call. The call is closed if that fails."""
        try:
            began_ns = time.monotonic_ns()
            for tensor in inputs:
                slot = call.reserve(tensor.nbytes)
                tensor.fill(slot.view)
                call.add_input(tensor.name, tensor.datatype, tensor.shape, slot)
                call.receipt.copied_in += tensor.nbytes
            call.receipt.receive_ns = time.monotonic_ns() - began_ns
        except BaseException as ex:
            call.account.failed(ex)
            call.close()
            raise
        self._call = call
        self._answers = self._stream(call) if self._is_stream else self._single(call)

    @property
    def wanted(self) -> bool:
        return not self._calling or not all(request.cancelled for request in self._calling)

    def next(self) -> CallAnswer | None:
        with self._turn:
            try:
                answer = next(self._answers, None)
            except BaseException:
                self._end()
                raise
            if answer is None or not self._is_stream:
                self._end()
            return answer

    def next_soon(self) -> Future[CallAnswer | None]:
        return self._calls.submit(self)

    def cancel(self) -> None:
        call = self._call
        if call is not None:
            call.cancel()

    def abandoned(self) -> None:
        if self._call is not None:
            self._calls.later(self.give_up)

    def give_up(self) -> None:
        """Cancel the call and give back its memory. Idempotent."""
        self.cancel()
        with self._turn:
            self._end()

    def _end(self) -> None:
        """Close the call. Everything but lent outputs is given back."""
        call, self._call = self._call, None
        answers, self._answers = self._answers, iter(())
        if call is not None:
            if isinstance(answers, Generator):
                answers.close()
            call.close()
            self._calls.ended(self)

    def _single(self, call: InferenceCall) -> Iterator[CallAnswer]:
        outcome = call.execute()
        call.account.answered()
        yield self._answer(call, outcome)

    def _stream(self, call: InferenceCall) -> Iterator[CallAnswer]:
        for outcome in call.stream():
            if outcome.final and outcome.error is not None:
                try:
                    raise outcome.error
                finally:
                    # else the traceback of the error would keep this frame and all callers of this
                    # frame
                    del outcome
            yield self._answer(call, outcome)

    def _answer(self, call: InferenceCall, outcome: Outcome) -> CallAnswer:
        loan = Loan(call.lend(), self._calls.later)
        outputs = tuple(borrowed(tensor, self._model, loan) for tensor in outcome.outputs)
        return CallAnswer(outputs, outcome.parameters, outcome.error)
