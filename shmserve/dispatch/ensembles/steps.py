"""Steps of one request to an ensemble: calls of models, and the tensors passed between calls."""

import copy
import functools
import time
from collections.abc import Callable, Generator, Iterator

from msgspec.structs import replace

from shmserve import errors, extensions
from shmserve.core.registry import ModelEntry, require_ready
from shmserve.core.scheduling import ensemble_graph
from shmserve.core.scheduling.ensemble_progress import ONCE, GraphProgress, Run
from shmserve.dispatch.cache.cached_call import AnyCall
from shmserve.dispatch.calls.data_plane import DataPlane
from shmserve.dispatch.calls.request_counting import Account
from shmserve.dispatch.calls.step_call import StepTensor
from shmserve.dispatch.ensembles.ensemble_runs import StepRuns, StepThreads
from shmserve.dispatch.ensembles.ensemble_tensors import EnsembleTensors
from shmserve.dispatch.outcome import Outcome, RunOptions
from shmserve.protocol.control.data_messages import OutputPlace
from shmserve.tensor.spec import EnsembleStep, ModelSpec

MakeCall = Callable[[ModelEntry, RunOptions], AnyCall]


class EnsembleSteps:
    """Steps of one request. For the request's thread; runs may be made in other threads.

    Args:
        options: options of the request, with `outputs`, `timeout_s` and `stream`.
        account: account of the request; costs of steps are added to its receipt.

    Attributes:
        tensors, progress: use only with `runs.lock` held.
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
            # the next answer would overwrite the client's memory while the client reads
            on_way = 1
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
        self._began = options.began or self._registry.current()
        self._make_call = make_call
        self._last = ensemble_graph.last_step(spec)
        self._lock = self.runs.lock
        self._sent_first: Run | None = None  # first run sent to an executor
        self._sent_others = False
        self._calls: list[AnyCall] = []
        self._streams: dict[Run, tuple[AnyCall, Iterator[Outcome]]] = {}  # unfinished streams

    def _perform(self, run: Run) -> bool:
        """Make a run, or a run of a streaming step up to its next answer. Return True if the run
        goes on."""
        step = self._spec.steps[run.step]
        try:
            if step.streams:
                return self._go_on(run)
            call = self._begin(run)
            try:
                self._take_answer(run, call)
            finally:
                self._over(call)
        except errors.ShmserveError as ex:
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
            next(answers, None)  # end the generator
            self._over(call)
        return not answer.final

    def _take_answer(self, run: Run, call: AnyCall) -> None:
        """Keep the only answer of a step as tensors of the ensemble."""
        given = False
        streams = call.entry.spec.decoupled
        for answer in call.stream() if streams else iter((call.execute(),)):
            if answer.error is not None:
                raise answer.error
            if not answer.outputs:
                continue
            if given:
                raise errors.Internal(
                    "the model gave more than one answer, and the request asked for no stream"
                )
            given = True
            self._keep(run, call, answer)
        if not given:
            raise errors.Internal("the model gave no answer")

    def _keep(self, run: Run, call: AnyCall, answer: Outcome) -> None:
        """Pass a step's outputs on to other steps and to answers."""
        step = self._spec.steps[run.step]
        with self._lock:
            given = self._given(call, step)
            number = self.progress.gave(run)  # from now on other runs rely on the outputs
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
        """Return the wanted outputs of a step by tensor of the ensemble, each with a lease."""
        given: dict[str, StepTensor] = {}
        try:
            for name, tensor in step.outputs.items():
                passed = tensor in self.progress.passed
                value = call.give(name) if passed or tensor in self._options.outputs else None
                if value is not None:
                    given[tensor] = value
                elif passed and not self._optional(tensor):
                    raise errors.Internal(f"the model gave no output '{name}'")
        except BaseException:
            self.tensors.release(given.values())
            raise
        return given

    def _optional(self, tensor: str) -> bool:
        """Return True if all steps that take the tensor can run without the tensor."""
        return all(
            taken.optional
            for step in self._spec.steps
            if tensor in step.inputs.values()
            for taken in self._model(step).spec.inputs
            if step.inputs.get(taken.name) == tensor
        )

    def _begin(self, run: Run) -> AnyCall:
        """Return the call of a step with its inputs. Release tensors that no other step takes."""
        step = self._spec.steps[run.step]
        entry = self._model(step)
        call = self._make_call(entry, self._step_options(run, entry))
        with self._lock:
            self._calls.append(call)  # from now on `close` and `cancel` reach the call
            if self.runs.failed:
                raise errors.Cancelled("the request is over")
            for name, tensor in step.inputs.items():
                value = self.tensors.get(self.progress.item(tensor, run))
                if value is not None:  # an optional input may be missing
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
        """Check a tensor's shape against the input of a step. Raise InvalidArgument for a client's
        tensor, Internal for a step's."""
        problem = ensemble_graph.misfit(taker, name, tensor, shape)
        if problem:
            of_client = any(given.name == tensor for given in self._spec.inputs)
            raise errors.InvalidArgument(problem) if of_client else errors.Internal(problem)

    def _model(self, step: EnsembleStep) -> ModelEntry:
        """Return the model of a step. A model unloaded since the run began still runs: the
        coordinator keeps the executors for runs under way."""
        snapshot, key = self._registry.current(), (step.model, step.version)
        entry = snapshot.ready_entries.get(key) or self._began.ready_entries.get(key)
        return entry or require_ready(snapshot.model(step.model, step.version), step.version)

    def _sent(self, run: Run) -> None:
        if self._sent_first is None:
            self._sent_first = run
        self._sent_others = self._sent_others or run != self._sent_first
        # options of the outer ensemble
        if self._options.step and self._options.on_sent is not None:
            self._options.on_sent()

    def _step_options(self, run: Run, entry: ModelEntry) -> RunOptions:
        """Return the options of a step's call. Only outputs for other steps and for the client are
        requested."""
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
            outputs = ()  # empty means all outputs
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
            timeout_s=self._remaining_s() if run.number == ONCE else self._answer_s,
            step=True,
            began=self._began,
            trace=self._account.trace,
        )

    def _remaining_s(self) -> float:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise errors.DeadlineExceeded(f"no answer within {self._timeout_s:g} s")
        return remaining_s

    def _named(self, run: Run, error: errors.ShmserveError) -> errors.ShmserveError:
        """Return the error with the ensemble and step named. If other steps have begun, return an
        error that does not promise that nothing has run."""
        spec, step = self._spec, self._spec.steps[run.step]
        text = f"in {spec.platform} '{spec.name}', {error.message} (step '{step.model}')"
        if error.retry_after_s and (self._sent_others or self._sent_first not in (None, run)):
            return errors.WorkLost(f"{text}; other steps have begun")
        return copy.copy(error).reword(text)

    def _cancel_calls(self) -> None:
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def end(self) -> None:
        """End all steps. Running steps are cancelled."""
        if not self.progress.over:
            self.runs.fail(errors.Cancelled("the request is over"))
        self.runs.stop()
        streams, self._streams = self._streams, {}
        for _, answers in streams.values():
            if isinstance(answers, Generator):
                answers.close()
        for call in list(self._calls):
            self._over(call)
