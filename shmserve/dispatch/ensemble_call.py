"""One request through the models of an ensemble, or of a pipeline, which is one in a row.

A step is a call of its model. It begins when all of its inputs are there, so steps that do not
need each other run side by side. What passes between them stays in the slots of the executor that
wrote it: this process leases those and tells the next executor where they are.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from shmserve import extensions, waiting
from shmserve.core.memory.slots import Slot
from shmserve.core.registry import ModelEntry, require_ready
from shmserve.core.scheduling import ensemble_graph
from shmserve.core.scheduling.ensemble_graph import GraphProgress
from shmserve.dispatch.cached_call import AnyCall, CachedCall
from shmserve.dispatch.call import DataPlane
from shmserve.dispatch.outcome import Outcome, RunOptions, StreamLimits
from shmserve.dispatch.receipt import Receipt
from shmserve.dispatch.request_counting import Account
from shmserve.dispatch.response_cache import ResponseCache
from shmserve.dispatch.step_call import StepCall, StepTensor
from shmserve.dispatch.step_threads import StepThreads
from shmserve.errors import Cancelled, DeadlineExceeded, Internal, InvalidArgument, ShmserveError
from shmserve.protocol.control.data_messages import OutputPlace, Parameter, RegionRef
from shmserve.tensor.spec import EnsembleStep, ModelSpec


class EnsemblePlane(Struct, frozen=True):
    """What all ensembles' calls of a process have in common. `cache`: of answers; None: none
    are kept."""

    data: DataPlane
    threads: StepThreads
    cache: ResponseCache | None

    def call(self, entry: ModelEntry, options: RunOptions, cancellable: bool) -> AnyCall:
        """A request to a model, which may be a step, or an ensemble."""
        call: AnyCall = (
            EnsembleCall(self, entry, options)
            if entry.spec.steps
            else StepCall(self.data, entry, options, cancellable)
        )
        if self.cache is None or not entry.spec.caches_answers:
            return call
        return CachedCall(self.cache, call, options, self.data.executors.registry.current)


class EnsembleCall:
    """One request; itself a step where ensembles are nested. A context manager.

    Attributes:
        receipt: of the whole, with what its steps have cost; the frontend adds its own.
    """

    def __init__(self, plane: EnsemblePlane, entry: ModelEntry, options: RunOptions) -> None:
        data, spec = plane.data, entry.spec
        self.entry = entry
        self.receipt = Receipt()
        self.account = Account(data.counting, data.tracer, entry, self.receipt)
        self._plane = plane
        self._memory = data.memory
        self._options = options
        self._timeout_s = options.timeout_s or data.settings.request_timeout_s
        self._deadline = time.monotonic() + self._timeout_s
        self._reserved: list[Slot] = []  # that are not written yet
        self._wanted = options.outputs or tuple(output.name for output in spec.outputs)
        self._last = ensemble_graph.last_step(spec)
        self._parameters: dict[str, Parameter] = {}  # of the answer
        self._threads: list[waiting.Task] = []
        # What threads of one request share, with the lock held
        self._lock = threading.Lock()
        self._progress = GraphProgress(spec.steps, frozenset(self._wanted))
        self._tensors: dict[str, StepTensor] = {}
        self._calls: list[AnyCall] = []
        self._error: BaseException | None = None

    # ------------------------------------------------------------------- inputs

    def reserve(self, nbytes: int) -> Slot:
        """As `Call.reserve`."""
        slot = self._memory.reserve(nbytes)
        self._reserved.append(slot)
        return slot

    def adopt(self, slot: Slot) -> Slot:
        """As `Call.adopt`."""
        self._reserved.append(slot)
        return slot

    def add_input(self, name: str, datatype: str, shape: tuple[int, ...], slot: Slot) -> None:
        """As `Call.add_input`."""
        self._memory.seal_and_lease(slot)
        self._reserved.remove(slot)
        self._tensors[name] = StepTensor(datatype, shape, slot)

    def add_region_input(
        self, name: str, datatype: str, shape: tuple[int, ...], at: RegionRef
    ) -> None:
        """As `Call.add_region_input`."""
        self._tensors[name] = StepTensor(datatype, shape, at)

    def add_tensor(self, name: str, tensor: StepTensor) -> None:
        """As `StepCall.add_tensor`."""
        if isinstance(tensor.at, Slot):
            self._memory.lease(tensor.at)
        self._tensors[name] = tensor

    # ------------------------------------------------------------------ running

    def execute(self) -> Outcome:
        """As `Call.execute`; the error of any step is the ensemble's."""
        try:
            held = self._run()
            (outcome,) = self._answers(held, streaming=False)
        except BaseException as ex:
            self.account.failed(ex)
            raise
        finally:
            self._count()
        self.account.succeeded = True
        return outcome

    def stream(self) -> Iterator[Outcome]:
        """As `Call.stream`; the step that gives all outputs may answer more than once."""
        try:
            held = self._run()
            for answer in self._answers(held, streaming=True):
                if answer.final and answer.error is not None:
                    self.account.failed(answer.error)
                elif answer.final:
                    self.account.succeeded = True
                    self.account.answered()
                yield answer
        except GeneratorExit:
            self.account.failed(Cancelled("nobody wants further answers"))
            raise
        except BaseException as ex:
            self.account.failed(ex)
            raise
        finally:
            self._count()

    def _run(self) -> int | None:
        """Run all steps; but the last one, which is returned, of an ensemble that streams."""
        spec = self.entry.spec
        self.account.request_id = self._options.request_id
        self.account.sent_ns = time.monotonic_ns()
        held = self._last if spec.decoupled else None
        self._advance(self._progress.arrived(tensor.name for tensor in spec.inputs), held)
        for thread in self._threads:  # some of which add others
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame: a circle with all that the callers have
        return held

    def _answers(self, held: int | None, streaming: bool) -> Iterator[Outcome]:
        """What the ensemble answers, all steps but `held` having run."""
        if held is None:
            there = [(name, self._tensors[name]) for name in self._wanted if name in self._tensors]
            yield Outcome(tuple(t.output(name) for name, t in there), self._parameters)
            return
        step = self.entry.spec.steps[held]
        try:
            call = self._begin(held)
            for answer in call.stream() if streaming else iter((call.execute(),)):
                yield self._renamed(step, answer)
        except ShmserveError as ex:
            raise self._named(step, ex) from ex

    def _advance(self, runnable: list[int], held: int | None) -> None:
        """Run these steps and what they lead to: one after the other in this thread, and as far
        as there are threads side by side."""
        try:
            while runnable := [index for index in runnable if index != held]:
                index, *others = runnable
                runnable = [other for other in others if not self._beside(other, held)]
                runnable += self._step(index)
        except BaseException as ex:
            self._fail(ex)

    def _beside(self, index: int, held: int | None) -> bool:
        thread = self._plane.threads.start(partial(self._advance, [index], held))
        if thread is not None:
            self._threads.append(thread)
        return thread is not None

    def _step(self, index: int) -> list[int]:
        """Run a step that has its inputs; the steps that have theirs because of it."""
        step = self.entry.spec.steps[index]
        try:
            call = self._begin(index)
            try:
                self._take_answer(step, call)
            finally:
                with self._lock:
                    self._calls.remove(call)
                    self.receipt.add(call.receipt)
                call.close()
        except ShmserveError as ex:
            raise self._named(step, ex) from ex
        with self._lock:
            return self._progress.arrived(step.outputs.values())

    def _begin(self, index: int) -> AnyCall:
        """The call of a step, with its inputs; what nobody else takes is its alone."""
        step = self.entry.spec.steps[index]
        entry = self._model(step)
        call = self._plane.call(entry, self._step_options(index, entry), cancellable=True)
        with self._lock:
            self._calls.append(call)  # from now on `close` and `cancel` know it
            if self._error is not None:
                raise copy.copy(self._error)
            for name, tensor in step.inputs.items():
                value = self._tensors.get(tensor)
                if value is not None:  # else it is optional
                    self._check(entry.spec, name, tensor, value.shape)
                    call.add_tensor(name, value)
            over = [self._tensors.pop(t, None) for t in self._progress.began(index)]
        self._release(over)
        return call

    def _check(self, taker: ModelSpec, name: str, tensor: str, shape: tuple[int, ...]) -> None:
        """Raises InvalidArgument of the client's tensors, Internal of the steps'."""
        problem = ensemble_graph.misfit(taker, name, tensor, shape)
        if problem:
            of_client = any(given.name == tensor for given in self.entry.spec.inputs)
            raise InvalidArgument(problem) if of_client else Internal(problem)

    def _model(self, step: EnsembleStep) -> ModelEntry:
        snapshot = self._plane.data.executors.registry.current()
        entry = snapshot.ready_entries.get((step.model, step.version))
        return entry or require_ready(snapshot.model(step.model, step.version), step.version)

    def _step_options(self, index: int, entry: ModelEntry) -> RunOptions:
        """What the model of a step is asked: what others need and, the last one, the client."""
        whole, step = self._options, self.entry.spec.steps[index]
        needed = [name for name, tensor in step.outputs.items() if self._progress.needed(tensor)]
        outputs = tuple(needed or step.outputs)
        parameters = whole.parameters
        if index != self._last:
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
            outputs=outputs,
            parameters=parameters,
            places=places,
            timeout_s=self._left(),
            stream=whole.stream or StreamLimits(self._timeout_s, self.account.sent_ns),
        )

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"no answer within {self._timeout_s:g} s")
        return left

    def _take_answer(self, step: EnsembleStep, call: AnyCall) -> None:
        """Have the one answer of a step as tensors of the ensemble."""
        streams = call.entry.spec.decoupled
        given = False
        for answer in call.stream() if streams else iter((call.execute(),)):
            if answer.error is not None:
                raise answer.error
            if not answer.outputs:
                continue
            if given:
                raise Internal("it gave more than one answer, which only the last step may")
            given = True
            self._keep(step, call)
            if not set(self._wanted).isdisjoint(step.outputs.values()):
                self._parameters |= answer.parameters
        if not given:
            raise Internal("it gave no answer")

    def _keep(self, step: EnsembleStep, call: AnyCall) -> None:
        for name, tensor in step.outputs.items():
            with self._lock:
                if not self._progress.needed(tensor):
                    continue
                before = self._tensors.pop(tensor, None)  # an input of a pipeline
                value = call.give(name)
                if value is not None:
                    self._tensors[tensor] = value
            self._release([before])
            if value is None and self._progress.awaited(tensor):
                raise Internal(f"it gave no output '{name}'")

    def give(self, name: str) -> StepTensor | None:
        """As `StepCall.give`."""
        held = self._calls[-1] if self._calls else None  # the last step, if it streams
        if held is not None:
            outputs = self.entry.spec.steps[self._last or 0].outputs
            return held.give(next(own for own, tensor in outputs.items() if tensor == name))
        tensor = self._tensors.get(name)
        if tensor is not None and isinstance(tensor.at, Slot):
            self._memory.lease(tensor.at)
        return tensor

    def _renamed(self, step: EnsembleStep, answer: Outcome) -> Outcome:
        """An answer of the last step as the ensemble's."""
        outputs = tuple(
            replace(o, name=step.outputs[o.name]) for o in answer.outputs if o.name in step.outputs
        )
        error = self._named(step, answer.error) if answer.error is not None else None
        return replace(answer, outputs=outputs, error=error)

    def _named(self, step: EnsembleStep, error: ShmserveError) -> ShmserveError:
        """The same error, which says where it was."""
        spec = self.entry.spec
        named = copy.copy(error)
        named.message = f"in {spec.platform} '{spec.name}', step '{step.model}': {error.message}"
        named.args = (named.message,)
        return named

    # ------------------------------------------------------------------- ending

    def _count(self) -> None:
        """Add what the last step has cost, if it is still open."""
        for call in self._calls:
            self.receipt.add(call.receipt)

    def answered(self) -> None:
        """As `Call.answered`; of steps that are over that is known already."""
        for call in self._calls:
            call.answered()
        self.account.answered()

    def failed(self, error: BaseException) -> None:
        """As `Call.failed`."""
        self.account.failed(error)

    def lend(self) -> Callable[[], None]:
        """As `Call.lend`."""
        if self._calls:  # the last step, which streams
            return self._calls[-1].lend()
        tensors, self._tensors = self._tensors, {}
        return partial(self._release, list(tensors.values()))

    def cancel(self) -> None:
        """As `Call.cancel`: steps that run give up at once, others never begin."""
        self._fail(Cancelled("the request was cancelled"))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def _release(self, tensors: list[StepTensor | None]) -> None:
        for tensor in tensors:
            if tensor is not None and isinstance(tensor.at, Slot):
                self._memory.release(tensor.at.number, tensor.at.generation)

    def close(self) -> None:
        """Give every slot back. Idempotent; views of outputs are void afterwards."""
        calls, self._calls = self._calls, []
        for call in calls:
            call.close()
        tensors, self._tensors = self._tensors, {}
        self._release(list(tensors.values()))
        reserved, self._reserved = self._reserved, []
        for slot in reserved:
            self._memory.reclaim(slot)
        self.account.close()

    def __enter__(self) -> EnsembleCall:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.failed(error)
        self.close()
