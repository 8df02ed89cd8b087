"""Ensemble call: one request through the models of an ensemble or of a pipeline (an ensemble in a
row).

Each step is a call of a model. A step begins when all of its inputs are available, so independent
steps run side by side. A step behind a streaming step runs once for each answer of the stream.
Tensors between steps stay in the slots of the executor that wrote them. This process leases the
slots and tells the next executor where the tensors are.

`Dispatcher.call` makes an `EnsembleCall` for a model whose spec has steps (`tensor.spec`). A step
is a `StepCall`, or a nested `EnsembleCall` (`steps`). A pipeline is an ensemble made from a
setting (`core.scheduling.pipeline_wiring`). `core.scheduling.ensemble_graph` has the rules about
the graph, `core.scheduling.ensemble_progress` the order of steps. Only the coordinator decides
whether an ensemble can be used, given its models (`core.control.compositions`). A streaming step
is asked for one answer after another, and each answer is a piece of work like a run of the steps
behind it.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

from msgspec.structs import replace

from shmserve.core.memory.slots import Slot
from shmserve.core.registry import ModelEntry
from shmserve.core.scheduling.ensemble_progress import ONCE
from shmserve.dispatch.calls.data_plane import DataPlane
from shmserve.dispatch.calls.request_counting import Account, CallScope
from shmserve.dispatch.calls.step_call import StepTensor
from shmserve.dispatch.ensembles.ensemble_runs import StepThreads
from shmserve.dispatch.ensembles.steps import EnsembleSteps, MakeCall
from shmserve.dispatch.outcome import Outcome, RunOptions, StreamLimits
from shmserve.dispatch.receipt import Receipt
from shmserve.dispatch.traced_request import BACKEND_OUTPUT
from shmserve.errors import Cancelled
from shmserve.protocol.control.data_messages import RegionRef

_GRACE_S = 0.25  # time for a late step to report its own timeout


class EnsembleCall(CallScope):
    """A request to an ensemble, which may itself be a step of an outer ensemble. A context manager.
    `receipt`: receipt of the whole request, including its steps; the frontend adds its own
    costs."""

    def __init__(
        self,
        data: DataPlane,
        threads: StepThreads,
        make_call: MakeCall,
        entry: ModelEntry,
        options: RunOptions,
    ) -> None:
        """`make_call`: returns a cancellable call of the model of a step."""
        spec = entry.spec
        self.entry = entry
        self.receipt = Receipt()
        self.account = Account(data.counting, data.tracer, entry, self.receipt)
        self._settings = data.settings
        self._memory = data.memory
        self._counting = data.counting
        self._batch = 1  # elements of the request
        self._options = options
        self._timeout_s = options.timeout_s or data.settings.request_timeout_s
        self._limits = options.stream or StreamLimits(self._timeout_s, time.monotonic_ns())
        self._reserved: list[Slot] = []  # not written yet
        self._given: dict[str, StepTensor] = {}  # outputs of the latest answer
        self._wanted = options.outputs or tuple(output.name for output in spec.outputs)
        self._steps = EnsembleSteps(
            spec,
            replace(options, outputs=self._wanted, timeout_s=self._timeout_s, stream=self._limits),
            self.account,
            data,
            threads,
            make_call,
        )
        self._tensors = self._steps.tensors
        self._run = self._counting.run_begun()

    # ------------------------------------------------------------------- inputs

    def reserve(self, nbytes: int) -> Slot:
        """Reserve a slot, as `Call.reserve`."""
        return self.adopt(self._memory.reserve(nbytes))

    def adopt(self, slot: Slot) -> Slot:
        """Take over a slot, as `Call.adopt`."""
        self._reserved.append(slot)
        return slot

    def add_input(
        self, name: str, datatype: str, shape: tuple[int, ...], at: Slot | RegionRef
    ) -> None:
        """Add an input, as `Call.add_input`."""
        if not isinstance(at, RegionRef):
            self._memory.seal_and_lease(at)
            self._reserved.remove(at)
        self._add(name, StepTensor(datatype, shape, at))

    def add_tensor(self, name: str, tensor: StepTensor) -> None:
        """Add a tensor of the outer ensemble, as `StepCall.add_tensor`."""
        self._tensors.lease(tensor)
        self._add(name, tensor)

    def _add(self, name: str, tensor: StepTensor) -> None:
        self._tensors.add((name, ONCE), tensor)
        if self.entry.spec.max_batch_size and tensor.shape:
            self._batch = tensor.shape[0]

    # ------------------------------------------------------------------ running

    def execute(self) -> Outcome:
        """Run all steps and return the answer, as `Call.execute`. An error of any step is the
        ensemble's error."""
        try:
            (outcome,) = self._answers()
        except BaseException as ex:
            self.account.failed(ex)
            raise
        finally:
            self._steps.end()
        self.receipt.finish()
        self._counting.ran(self.entry, self._batch, self.receipt)
        return outcome

    def stream(self) -> Iterator[Outcome]:
        """Run all steps and yield every answer, as `Call.stream`."""
        try:
            for answer in self._answers():
                if answer.final and answer.error is not None:
                    self.account.failed(answer.error)
                elif answer.final:
                    self.receipt.finish()
                    self._counting.ran(self.entry, self._batch, self.receipt)
                    self.account.answered()
                yield answer
        except GeneratorExit:
            self.account.failed(Cancelled("nobody wants further answers"))
            raise
        except BaseException as ex:
            self.account.failed(ex)
            raise
        finally:
            self._steps.end()

    def _answers(self) -> Iterator[Outcome]:
        """Run all steps and yield the answers. The outputs of an answer stay valid until the next
        answer is asked for."""
        account, runs, progress = self.account, self._steps.runs, self._steps.progress
        account.begin(self._options, self._tensors.of_request())
        streams = self.entry.spec.decoupled
        due, final = self._due(time.monotonic() + self._timeout_s), False
        while (number := runs.next_answer(not streams, *due)) is not None:
            with runs.lock:
                answer = self._tensors.take_answer(number)
                final = progress.over and not progress.follows(number)
            self._given = answer.tensors
            there = [(name, answer.tensors[name]) for name in self._wanted if name in self._given]
            outputs = tuple(tensor.output(name) for name, tensor in there)
            if account.trace is not None:
                account.trace.add_tensors(BACKEND_OUTPUT, outputs)
            yield Outcome(outputs, answer.parameters, final, answer.error)
            if final:
                return
            given, self._given = self._given, {}
            self._tensors.release(given.values())
            with runs.lock:
                progress.answered(number)
            due = self._due(time.monotonic() + self._limits.answer_s)
        yield Outcome()

    def _due(self, at: float) -> tuple[float, str]:
        """Return the monotonic deadline of the next answer, in seconds, and the error text for a
        miss."""
        whole_s = self._settings.stream_timeout_s
        ends = self._limits.began_ns / 1e9 + whole_s
        if self.entry.spec.decoupled and whole_s and ends < at:
            return ends + _GRACE_S, "the stream took longer than stream_timeout_s"
        name, answer_s = self.entry.spec.name, self._limits.answer_s
        return at + _GRACE_S, f"model '{name}' gave no answer within {answer_s:g} s"

    # ------------------------------------------------------------------- ending

    def give(self, name: str) -> StepTensor | None:
        """Return an output with a lease, as `StepCall.give`."""
        tensor = self._given.get(name)
        if tensor is not None:
            self._tensors.lease(tensor)
        return tensor

    def lend(self) -> Callable[[], None]:
        """Lend the outputs, as `Call.lend`."""
        given, self._given = self._given, {}
        return partial(self._tensors.release, list(given.values()))

    def cancel(self) -> None:
        """Cancel the request, as `Call.cancel`. Running steps give up at once; other steps never
        begin."""
        self._steps.runs.fail(Cancelled("the request was cancelled"))

    def close(self) -> None:
        """Give every slot back. Idempotent. Views of outputs are void afterwards."""
        self._steps.end()
        self.lend()()
        self._tensors.close()
        reserved, self._reserved = self._reserved, []
        for slot in reserved:
            self._memory.reclaim(slot)
        self._counting.run_over(self._run)
        self.account.close()
