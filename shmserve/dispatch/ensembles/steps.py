"""The steps of one request to an ensemble: calls of their models, and what passes between these."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Generator, Iterator

from msgspec.structs import replace

from shmserve import extensions
from shmserve.core.registry import ModelEntry, require_ready
from shmserve.core.scheduling import ensemble_graph
from shmserve.core.scheduling.ensemble_progress import ONCE, GraphProgress, Run
from shmserve.dispatch.cache.cached_call import AnyCall
from shmserve.dispatch.calls.data_plane import DataPlane
from shmserve.dispatch.calls.request_counting import Account
from shmserve.dispatch.calls.step_call import StepTensor
from shmserve.dispatch.ensembles.ensemble_runs import StepRuns
from shmserve.dispatch.ensembles.ensemble_tensors import EnsembleTensors
from shmserve.dispatch.ensembles.step_threads import StepThreads
from shmserve.dispatch.outcome import Outcome, RunOptions
from shmserve.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ShmserveError,
    WorkLost,
)
from shmserve.protocol.control.data_messages import OutputPlace
from shmserve.tensor.spec import EnsembleStep, ModelSpec

MakeCall = Callable[[ModelEntry, RunOptions], AnyCall]


class EnsembleSteps:
    """For the thread of the request; what it runs may be in others.

    Args:
        options: of the request, with `outputs`, `timeout_s` and `stream`.
        account: of the request; what steps have cost is added to its receipt.

    Attributes:
        tensors, progress: with `runs.lock` held.
    """

    def __init__(
        self,
        spec: ModelSpec,
        options: RunOptions,
        account: Account,
        data: DataPlane,
        threads: StepThreads,
        make_call: MakeCall,
    ) -> None:
        assert options.timeout_s is not None
        assert options.stream is not None
        on_way = spec.max_inflight_requests or data.settings.stream_credit
        if options.places:
            on_way = 1  # the next answer is written where the client reads this one
        inputs = [tensor.name for tensor in spec.inputs]
        self.progress = GraphProgress(spec.steps, inputs, options.outputs, on_way)
        self.tensors = EnsembleTensors(data.memory)
        self.runs = StepRuns(self.progress, threads, self._perform, self._cancel_calls)
        self._spec = spec
        self._options = options
        self._timeout_s = options.timeout_s
        self._answer_s = options.stream.answer_s
        self._deadline = time.monotonic() + options.timeout_s
        self._account = account
        self._registry = data.executors.registry
        self._make_call = make_call
        self._last = ensemble_graph.last_step(spec)
        self._lock = self.runs.lock
        self._sent_first: Run | None = None  # to an executor
        self._sent_others = False
        self._calls: list[AnyCall] = []
        self._streams: dict[Run, tuple[AnyCall, Iterator[Outcome]]] = {}  # that go on

    def _perform(self, run: Run) -> bool:
        """Make a run, or one of a step that streams up to its next answer; whether it goes on."""
        step = self._spec.steps[run.step]
        try:
            if step.streams:
                return self._go_on(run)
            call = self._begin(run)
            try:
                self._take_answer(run, call)
            finally:
                self._over(call)
        except ShmserveError as ex:
            raise self._named(run, ex) from ex
        return False

    def _go_on(self, run: Run) -> bool:
        if run not in self._streams:
            call = self._begin(run)
            self._streams[run] = call, call.stream()
        call, answers = self._streams[run]
        answer = next(answers)
        last = run.step == self._last
        if answer.error is not None and not last:
            raise answer.error
        if answer.outputs or answer.error is not None or (last and not answer.final):
            self._keep(run, call, answer)
        if answer.final:
            del self._streams[run]
            next(answers, None)  # so that it ends
            self._over(call)
        return not answer.final

    def _take_answer(self, run: Run, call: AnyCall) -> None:
        """Have the one answer of a step as tensors of the ensemble."""
        given = False
        streams = call.entry.spec.decoupled
        for answer in call.stream() if streams else iter((call.execute(),)):
            if answer.error is not None:
                raise answer.error
            if not answer.outputs:
                continue
            if given:
                raise Internal("it gave more than one answer, and nobody has asked for a stream")
            given = True
            self._keep(run, call, answer)
        if not given:
            raise Internal("it gave no answer")

    def _keep(self, run: Run, call: AnyCall, answer: Outcome) -> None:
        """What a step has given goes to other steps, and into answers."""
        step = self._spec.steps[run.step]
        with self._lock:
            given = self._given(call, step)
            number = self.progress.gave(run)  # from now on others take it for granted
            if not set(self._options.outputs).isdisjoint(step.outputs.values()):
                error = self._named(run, answer.error) if answer.error is not None else None
                own = {t: v for t, v in given.items() if t in self._options.outputs}
                self.tensors.answer(number).add(own, answer.parameters, error)
            for tensor, value in given.items():
                if tensor in self.progress.passed:
                    self.tensors.add((tensor, number), value)
                    if tensor in self._options.outputs:
                        self.tensors.lease(value)

    def _given(self, call: AnyCall, step: EnsembleStep) -> dict[str, StepTensor]:
        """What it has given of what is wanted, by tensor of the ensemble, each with a lease.

        Raises:
            Internal: an output is missing that other steps need.
        """
        given: dict[str, StepTensor] = {}
        try:
            for name, tensor in step.outputs.items():
                passed = tensor in self.progress.passed
                value = call.give(name) if passed or tensor in self._options.outputs else None
                if value is not None:
                    given[tensor] = value
                elif passed:
                    raise Internal(f"it gave no output '{name}'")
        except BaseException:
            self.tensors.release(given.values())
            raise
        return given

    def _begin(self, run: Run) -> AnyCall:
        """The call of a step, with its inputs; what nobody else takes is its alone."""
        step = self._spec.steps[run.step]
        entry = self._model(step)
        call = self._make_call(entry, self._step_options(run, entry))
        with self._lock:
            self._calls.append(call)  # from now on `close` and `cancel` know it
            if self.runs.failed:
                raise Cancelled("the request is over")
            for name, tensor in step.inputs.items():
                value = self.tensors.get(self.progress.item(tensor, run))
                if value is not None:  # else it is optional
                    self._check(entry.spec, name, tensor, value.shape)
                    call.add_tensor(name, value)
            over = self.tensors.take(self.progress.began(run))
        self.tensors.release(over)
        return call

    def _over(self, call: AnyCall) -> None:
        with self._lock:
            if call not in self._calls:
                return
            self._calls.remove(call)
            self._account.receipt.add(call.receipt)
        call.close()

    def _check(self, taker: ModelSpec, name: str, tensor: str, shape: tuple[int, ...]) -> None:
        """Raises InvalidArgument of the client's tensors, Internal of the steps'."""
        problem = ensemble_graph.misfit(taker, name, tensor, shape)
        if problem:
            of_client = any(given.name == tensor for given in self._spec.inputs)
            raise InvalidArgument(problem) if of_client else Internal(problem)

    def _model(self, step: EnsembleStep) -> ModelEntry:
        snapshot = self._registry.current()
        entry = snapshot.ready_entries.get((step.model, step.version))
        return entry or require_ready(snapshot.model(step.model, step.version), step.version)

    def _sent(self, run: Run) -> None:
        if self._sent_first is None:
            self._sent_first = run
        self._sent_others = self._sent_others or run != self._sent_first
        if self._options.step and self._options.on_sent is not None:  # of the ensemble around it
            self._options.on_sent()

    def _step_options(self, run: Run, entry: ModelEntry) -> RunOptions:
        """What the model of a step is asked: what others need and, the last one, the client."""
        whole, step = self._options, self._spec.steps[run.step]
        wanted = {*self._options.outputs, *self.progress.passed}
        needed = [name for name, tensor in step.outputs.items() if tensor in wanted]
        outputs = tuple(needed or step.outputs)
        parameters = whole.parameters
        if run.step != self._last:
            forms = extensions.names(extensions.NATIVE_REQUESTS)
            streaming = {f"{form}_streaming" for form in forms}
            parameters = {k: v for k, v in parameters.items() if k not in streaming}
        elif len(outputs) == len(entry.spec.outputs):
            outputs = ()  # all that there are
        places = tuple(
            OutputPlace(name, place.at)
            for name, tensor in step.outputs.items()
            for place in whole.places
            if place.name == tensor
        )
        return replace(
            whole,
            on_sent=functools.partial(self._sent, run),
            outputs=outputs,
            parameters=parameters,
            places=places,
            timeout_s=self._left() if run.number == ONCE else self._answer_s,
            step=True,
            trace=self._account.trace,
        )

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"no answer within {self._timeout_s:g} s")
        return left

    def _named(self, run: Run, error: ShmserveError) -> ShmserveError:
        """The same error, which says where it was; where other steps have begun, none that promises
        that nothing has."""
        spec, step = self._spec, self._spec.steps[run.step]
        text = f"in {spec.platform} '{spec.name}', {error.message} (step '{step.model}')"
        if error.retry_after_s and (self._sent_others or self._sent_first not in (None, run)):
            return WorkLost(f"{text}; other steps have begun")
        return copy.copy(error).reword(text)

    def _cancel_calls(self) -> None:
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def end(self) -> None:
        """No step runs any more: those that do are cancelled."""
        if not self.progress.over:
            self.runs.fail(Cancelled("the request is over"))
        self.runs.stop()
        streams, self._streams = self._streams, {}
        for _, answers in streams.values():
            if isinstance(answers, Generator):
                answers.close()
        for call in list(self._calls):
            self._over(call)
