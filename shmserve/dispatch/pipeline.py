"""Pipelines: models that run one after the other, each on what the one before has given.

To frontends a pipeline is a model: `PipelineDispatcher` finds it among them, and `PipelineCall`
is its request. Tensors between two models stay in the slots of the executor that wrote them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
from msgspec import Struct

from shmserve import extensions
from shmserve.config import Settings
from shmserve.core.registry import LiveInstance, ModelEntry, ModelState, require_ready
from shmserve.core.scheduling import pipeline_wiring
from shmserve.core.scheduling.pipeline_wiring import Joint
from shmserve.dispatch.call import Call, DataPlane
from shmserve.dispatch.dispatcher import Dispatcher
from shmserve.dispatch.executor_pool import ExecutorPool
from shmserve.dispatch.forwarded_outputs import ForwardedOutput, ForwardingMemory
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.dispatch.outcome import NO_OPTIONS, Outcome, RunOptions
from shmserve.dispatch.receipt import Receipt
from shmserve.errors import Cancelled, ConfigError, DeadlineExceeded, Internal, NotFound
from shmserve.protocol.control.data_messages import Descriptor, WireTensor
from shmserve.protocol.triton_config import document
from shmserve.tensor.config_document import ConfigDocument
from shmserve.tensor.spec import ModelSpec

PLATFORM = "pipeline"


class Steps(Struct, frozen=True):
    """A pipeline whose models are all there. `joints`: between each and the next."""

    name: str
    entries: tuple[ModelEntry, ...]
    joints: tuple[tuple[Joint, ...], ...]


def _spec(steps: Steps) -> ModelSpec:
    """The first model's inputs and the last one's outputs."""
    first, last = steps.entries[0].spec, steps.entries[-1].spec
    modes = {entry.spec.parameters.get("client_shm_mode") for entry in steps.entries}
    parameters = {"client_shm_mode": "off"} if "off" in modes else {}
    for form in extensions.names(extensions.NATIVE_REQUESTS):  # such as messages, not tensors
        if form in first.parameters and first.parameters[form] == last.parameters.get(form):
            parameters[form] = first.parameters[form]
    return document.completed(
        ModelSpec(
            name=steps.name,
            version="1",
            platform=PLATFORM,
            backend=PLATFORM,
            max_batch_size=first.max_batch_size,
            inputs=first.inputs,
            outputs=last.outputs,
            decoupled=last.decoupled,
            parameters=parameters,
            config=ConfigDocument(name=steps.name, platform=PLATFORM),
        )
    )


class StepCall(Call):
    """A request to one model of a pipeline, whose tensors come from the step before."""

    def __init__(
        self,
        plane: DataPlane,
        memory: ForwardingMemory,
        entry: ModelEntry,
        options: RunOptions,
        cancellable: bool,
    ) -> None:
        super().__init__(plane, entry, options, cancellable)
        self._forwarding = memory

    def add_forwarded_input(
        self, name: str, datatype: str, shape: tuple[int, ...], output: ForwardedOutput
    ) -> None:
        """An input that another executor has written. Inputs keep this order."""
        self._forwarding.lease(output)
        self._slots.append(output)
        at = Descriptor(output.segment, output.number, 0, output.offset, output.nbytes)
        self._inputs.append(WireTensor(name, datatype, shape, at))

    def pass_on(self, name: str) -> ForwardedOutput:
        """Have an output of the latest answer as an input of another call, where it is.

        It stays there until that call is done, whenever this one is closed.
        """
        tensor = next(tensor for tensor in self._answer.outputs if tensor.name == name)
        at, pool = tensor.at, self._pool
        assert pool is not None
        assert isinstance(at, Descriptor)
        if tensor.alias >= 0:
            self._output(tensor)  # that it lies within the input it names
            return self._forwarding.pass_slot(self._slots[tensor.alias], at.offset, at.nbytes)
        lease, nbytes = (at.slot, at.generation), at.nbytes
        output = self._forwarding.pass_on(
            pool.segments.mapping(at), at, lambda: pool.release([lease], nbytes)
        )
        self._held.remove(lease)
        self._held_bytes -= nbytes
        return output


class PipelineCall:
    """One request through a pipeline; a `StepCall` for each of its models.

    Args:
        call: of the model of a step; the options are what it is asked.

    Attributes:
        receipt: of the whole. What the frontend adds to it before the answer counts for the
            first model, what it adds then for the last one.
        reserve, adopt, add_input, add_region_input: the first model's.
    """

    def __init__(
        self,
        call: Callable[[ModelEntry, RunOptions], StepCall],
        steps: Steps,
        options: RunOptions,
        timeout_s: float,
    ) -> None:
        self._call = call
        self._steps = steps
        self._options = options
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._cancelled = False
        self._calls = [call(steps.entries[0], self._step(0))]
        self._asked = self._calls[0]  # who has the request, or has answered last
        self.entry = steps.entries[-1]
        self.receipt = Receipt()
        first = self._calls[0]
        self.reserve, self.add_input, self.adopt = first.reserve, first.add_input, first.adopt
        self.add_region_input = first.add_region_input

    def _step(self, index: int) -> RunOptions:
        """What the model of a step is asked: the last one what the client asks for."""
        whole, timeout_s = self._options, self._left()
        if index == len(self._steps.joints):
            return msgspec.structs.replace(whole, timeout_s=timeout_s)
        names = tuple(joint.output for joint in self._steps.joints[index])
        streaming = {f"{form}_streaming" for form in extensions.names(extensions.NATIVE_REQUESTS)}
        own = {k: v for k, v in whole.parameters.items() if k not in streaming}
        return RunOptions(whole.request_id, names, own, (), whole.on_wait, timeout_s, whole.callers)

    def execute(self) -> Outcome:
        """As `Call.execute`; an error of any model is the pipeline's."""
        last = self._run_up()
        try:
            return last.execute()
        finally:
            self.receipt.add(last.receipt)

    def stream(self) -> Iterator[Outcome]:
        """As `Call.stream`: only the last model streams."""
        last = self._run_up()
        try:
            yield from last.stream()
        finally:
            self.receipt.add(last.receipt)

    def _run_up(self) -> StepCall:
        """Run all models but the last, whose call, with its inputs, is returned."""
        first, whole = self._calls[0].receipt, self.receipt
        first.copied_in, whole.copied_in = whole.copied_in, 0
        first.receive_ns, whole.receive_ns = whole.receive_ns, 0
        for index, joints in enumerate(self._steps.joints):
            call = self._calls[-1]
            answers = call.stream() if call.entry.spec.decoupled else iter((call.execute(),))
            following = self._call(self._steps.entries[index + 1], self._step(index + 1))
            self._calls.append(following)
            if self._cancelled:
                raise Cancelled("the request was cancelled")
            self._join(call, answers, following, joints)
            self._asked = following
            self.receipt.add(call.receipt)
        return self._calls[-1]

    def _join(
        self,
        call: StepCall,
        answers: Iterator[Outcome],
        following: StepCall,
        joints: tuple[Joint, ...],
    ) -> None:
        """Have the one answer of a model as the inputs of the next."""
        given = False
        for answer in answers:
            if answer.error is not None:
                raise answer.error
            if not answer.outputs:
                continue
            if given:
                raise self._wrong(call, "gave more than one answer, which only the last may")
            given = True
            for joint in joints:
                tensor = next((t for t in answer.outputs if t.name == joint.output), None)
                if tensor is None:
                    raise self._wrong(call, f"gave no output '{joint.output}'")
                pipeline_wiring.check(self._steps.name, joint, following.entry.spec, tensor.shape)
                output = call.pass_on(joint.output)
                following.add_forwarded_input(
                    joint.input.name, tensor.datatype, tensor.shape, output
                )
        if not given:
            raise self._wrong(call, "gave no answer")

    def _wrong(self, call: StepCall, text: str) -> Internal:
        return Internal(f"pipeline '{self._steps.name}': model '{call.entry.spec.name}' {text}")

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"pipeline '{self._steps.name}' gave no answer within {self._timeout_s:g} s"
            )
        return left

    def answered(self) -> None:
        """As `Call.answered`; of the models before the last one that is known already."""
        self._count_copies()
        self._calls[-1].answered()

    def _count_copies(self) -> None:
        """What the frontend has copied of the answer is the last model's."""
        counted = sum(call.receipt.copied_out for call in self._calls)
        self._calls[-1].receipt.copied_out += max(self.receipt.copied_out - counted, 0)

    def failed(self, error: BaseException) -> None:
        """As `Call.failed`: it counts for the model that had the request."""
        self._asked.failed(error)

    def cancel(self) -> None:
        """As `Call.cancel`; models that have not begun never will."""
        self._cancelled = True
        for call in list(self._calls):
            call.cancel()

    def lend(self) -> Callable[[], None]:
        """As `Call.lend`, of the last model."""
        return self._calls[-1].lend()

    def close(self) -> None:
        """Give every slot back, those of the last model first."""
        self._count_copies()
        for call in reversed(self._calls):
            call.close()

    def __enter__(self) -> PipelineCall:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.failed(error)
        self.close()


class PipelineDispatcher(Dispatcher):
    """A dispatcher for which the settings' pipelines (name -> "name" or "name/version" of models)
    are models, too."""

    def _make_memory(self) -> ForwardingMemory:
        self._forwarding = ForwardingMemory(self._link, self._epoch, self._link.arena_bytes)
        return self._forwarding

    def _pool(self, instance: LiveInstance, path: str) -> ExecutorPool:
        limit = self.settings.max_queue
        return ExecutorPool(instance, path, self.process, self.memory, limit, keep=True)

    def model(self, name: str, version: str = "") -> ModelEntry:
        """As of any model; a pipeline is in the state of its first model that is not READY.

        Raises:
            NotFound: also: one of a pipeline's models is not in the repository.
            ConfigError: two of a pipeline's models do not fit together.
        """
        line = name in self.settings.pipelines and name not in self.snapshot().models
        if not line or version not in ("", "1"):
            return super().model(name, version)
        steps = self._steps(name)
        last = steps.entries[-1]
        waits = next((e for e in steps.entries if e.state is not ModelState.READY), last)
        ready = waits.state is ModelState.READY
        reason = "" if ready else f"model '{waits.spec.name}' is not ready"
        return ModelEntry(_spec(steps), waits.state, last.instances, reason)

    def _steps(self, name: str) -> Steps:
        """The models of a pipeline and how they fit; raises as `model`."""
        entries = []
        for model in self.settings.pipelines[name]:
            try:
                step, _, version = model.partition("/")
                entries.append(super().model(step, version))
            except NotFound as ex:
                raise NotFound(f"pipeline '{name}': {ex.message}") from None
            if entries[-1].spec.platform == PLATFORM:
                raise ConfigError(f"pipeline '{name}': '{model}' is a pipeline itself")
        pairs = itertools.pairwise(entries)
        wires = tuple(pipeline_wiring.join(name, giver.spec, taker.spec) for giver, taker in pairs)
        return Steps(name, tuple(entries), wires)

    def ready_model(self, name: str, version: str = "") -> ModelEntry:
        return require_ready(self.model(name, version), version)

    def call(
        self, entry: ModelEntry, options: RunOptions = NO_OPTIONS, cancellable: bool = False
    ) -> InferenceCall:
        if entry.spec.platform != PLATFORM:
            return super().call(entry, options, cancellable)
        steps = self._steps(entry.spec.name)
        timeout_s = options.timeout_s or self.settings.request_timeout_s
        return PipelineCall(partial(self._step, cancellable), steps, options, timeout_s)

    def _step(self, cancellable: bool, entry: ModelEntry, options: RunOptions) -> StepCall:
        return StepCall(self._plane, self._forwarding, entry, options, cancellable)


def open_dispatcher(
    settings: Settings, role: str = "http", settle: Callable[[], None] = lambda: None
) -> Dispatcher:
    """The dispatcher of a process, as `Dispatcher` describes it; start it after the fork."""
    return (PipelineDispatcher if settings.pipelines else Dispatcher)(settings, role, settle)
