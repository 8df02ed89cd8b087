"""Pipelines: models that run one after the other, each on what the one before has given.

To frontends a pipeline is a model: `Pipelines.entry` describes it, `PipelineCall` is its
request. Tensors between two models stay in the slots of the executor that wrote them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from shmserve.core.registry import ModelEntry, ModelState
from shmserve.core.scheduling import pipeline_wiring as joints
from shmserve.core.scheduling.pipeline_wiring import Joint
from shmserve.dispatch.call import Call
from shmserve.dispatch.outcome import Outcome, Reservation
from shmserve.dispatch.receipt import Receipt
from shmserve.errors import Cancelled, ConfigError, DeadlineExceeded, Internal, NotFound
from shmserve.grps.protocol import model_parameters as grps_spec
from shmserve.protocol import config_json
from shmserve.protocol.control.data_messages import OutputPlace, Parameter, RegionRef
from shmserve.tensor.spec import ModelSpec

if TYPE_CHECKING:
    from shmserve.dispatch.dispatcher import Dispatcher

PLATFORM = "pipeline"


class Steps(Struct, frozen=True):
    """A pipeline whose models are all there. `joints`: between each and the next."""

    name: str
    entries: tuple[ModelEntry, ...]
    joints: tuple[tuple[Joint, ...], ...]


class Pipelines:
    """The pipelines of the settings: name -> names of models ("name" or "name/version")."""

    def __init__(self, dispatcher: Dispatcher, configured: Mapping[str, tuple[str, ...]]) -> None:
        self._dispatcher = dispatcher
        self._configured = configured

    def __contains__(self, name: str) -> bool:
        return name in self._configured

    def names(self) -> list[str]:
        return sorted(self._configured)

    def entry(self, name: str) -> ModelEntry:
        """The pipeline as a model, in the state of its first model that is not READY.

        Raises:
            NotFound: one of its models is not in the repository.
            ConfigError: two of its models do not fit together.
        """
        steps = self.steps(name)
        last = steps.entries[-1]
        waits = next((e for e in steps.entries if e.state is not ModelState.READY), last)
        ready = waits.state is ModelState.READY
        reason = "" if ready else f"model '{waits.spec.name}' is not ready"
        return ModelEntry(_spec(steps), waits.state, last.instances, reason)

    def steps(self, name: str) -> Steps:
        """The models of a pipeline and how they fit; raises as `entry` does."""
        entries = []
        for model in self._configured[name]:
            try:
                entries.append(self._dispatcher.model(*model.split("/", 1)))
            except NotFound as ex:
                raise NotFound(f"pipeline '{name}': {ex.message}") from None
            if entries[-1].spec.platform == PLATFORM:
                raise ConfigError(f"pipeline '{name}': '{model}' is a pipeline itself")
        pairs = itertools.pairwise(entries)
        wires = tuple(joints.join(name, giver.spec, taker.spec) for giver, taker in pairs)
        return Steps(name, tuple(entries), wires)


def _spec(steps: Steps) -> ModelSpec:
    """The first model's inputs and the last one's outputs."""
    first, last = steps.entries[0].spec, steps.entries[-1].spec
    modes = {entry.spec.parameters.get("client_shm_mode") for entry in steps.entries}
    parameters = {"client_shm_mode": "off"} if "off" in modes else {}
    if grps_spec.takes_message(first) and grps_spec.takes_message(last):
        parameters["grps"] = "message"
    spec = ModelSpec(
        name=steps.name,
        version="1",
        platform=PLATFORM,
        backend=PLATFORM,
        max_batch_size=first.max_batch_size,
        inputs=first.inputs,
        outputs=last.outputs,
        decoupled=last.decoupled,
        parameters=parameters,
        config_json=msgspec.json.encode({"name": steps.name, "platform": PLATFORM}).decode(),
    )
    return msgspec.structs.replace(spec, config_json=config_json.completed(spec))


class PipelineReceipt:
    """The receipts of all steps as one; what is added to it is the first step's."""

    def __init__(self, first: Receipt) -> None:
        object.__setattr__(self, "_steps", [first])

    def add(self, step: Receipt) -> None:
        self._steps.append(step)

    def __getattr__(self, name: str) -> Any:
        values = [getattr(step, name) for step in object.__getattribute__(self, "_steps")]
        return ", ".join(filter(None, values)) if name == "executor" else sum(values)

    def __setattr__(self, name: str, value: Any) -> None:
        first = self._steps[0]
        setattr(first, name, getattr(first, name) + value - getattr(self, name))

    def as_dict(self) -> dict[str, Any]:
        """The receipt as clients see it."""
        whole = Receipt()
        for name in Receipt.__slots__:
            setattr(whole, name, getattr(self, name))
        return whole.as_dict()


class PipelineCall:
    """One request through a pipeline; a `Call` for each of its models."""

    def __init__(
        self, dispatcher: Dispatcher, steps: Steps, timeout_s: float, cancellable: bool = False
    ) -> None:
        self._dispatcher = dispatcher
        self._steps = steps
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._cancellable = cancellable
        self._cancelled = False
        first = Call(dispatcher, steps.entries[0], timeout_s, cancellable)
        self._calls = [first]
        self.entry = steps.entries[-1]
        self.receipt: Any = PipelineReceipt(first.receipt)

    # ------------------------------------------------- inputs: the first model's

    def reserve(self, nbytes: int) -> Reservation:
        return self._calls[0].reserve(nbytes)

    def add_input(
        self, name: str, datatype: str, shape: tuple[int, ...], reservation: Reservation
    ) -> None:
        self._calls[0].add_input(name, datatype, shape, reservation)

    def add_region_input(
        self, name: str, datatype: str, shape: tuple[int, ...], at: RegionRef
    ) -> None:
        self._calls[0].add_region_input(name, datatype, shape, at)

    # -------------------------------------------------- answers: the last one's

    def execute(
        self,
        request_id: str = "",
        outputs: tuple[str, ...] = (),
        parameters: dict[str, Parameter] | None = None,
        on_wait: Callable[[], bool] | None = None,
        places: tuple[OutputPlace, ...] = (),
    ) -> Outcome:
        """As `Call.execute`; an error of any model is the pipeline's."""
        last = self._run_up(request_id, parameters, on_wait)
        return last.execute(request_id, outputs, parameters, on_wait, places)

    def stream(
        self,
        request_id: str = "",
        outputs: tuple[str, ...] = (),
        parameters: dict[str, Parameter] | None = None,
        on_wait: Callable[[], bool] | None = None,
        places: tuple[OutputPlace, ...] = (),
    ) -> Iterator[Outcome]:
        """As `Call.stream`: only the last model streams."""
        last = self._run_up(request_id, parameters, on_wait)
        yield from last.stream(request_id, outputs, parameters, on_wait, places)

    def _run_up(
        self,
        request_id: str,
        parameters: dict[str, Parameter] | None,
        on_wait: Callable[[], bool] | None,
    ) -> Call:
        """Run all models but the last, whose call, with its inputs, is returned."""
        own = {k: v for k, v in (parameters or {}).items() if k != grps_spec.STREAMING}
        for index, wires in enumerate(self._steps.joints):
            names = tuple(wire.output for wire in wires)
            call = self._calls[-1]
            taker = self._steps.entries[index + 1]
            if call.entry.spec.decoupled:
                answers = call.stream(request_id, names, own, on_wait)
            else:
                answers = iter((call.execute(request_id, names, own, on_wait),))
            following = Call(self._dispatcher, taker, self._left(), self._cancellable)
            self._calls.append(following)
            self.receipt.add(following.receipt)
            if self._cancelled:
                raise Cancelled("the request was cancelled")
            self._join(call, answers, following, wires)
        return self._calls[-1]

    def _join(
        self, call: Call, answers: Iterator[Outcome], following: Call, wires: tuple[Joint, ...]
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
            for wire in wires:
                tensor = next((t for t in answer.outputs if t.name == wire.output), None)
                if tensor is None:
                    raise self._wrong(call, f"gave no output '{wire.output}'")
                joints.check(self._steps.name, wire, following.entry.spec, tensor.shape)
                passed = call.pass_on(wire.output)
                following.add_passed_input(wire.input.name, tensor.datatype, tensor.shape, passed)
        if not given:
            raise self._wrong(call, "gave no answer")

    def _wrong(self, call: Call, text: str) -> Internal:
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
        self._calls[-1].answered()

    def failed(self, error: BaseException) -> None:
        """As `Call.failed`: it counts for the model that had the request."""
        self._calls[-1].failed(error)

    def cancel(self) -> None:
        """As `Call.cancel`; models that have not begun never will."""
        self._cancelled = True
        for call in list(self._calls):
            call.cancel()

    def close(self) -> None:
        """Give every slot back, those of the last model first."""
        for call in reversed(self._calls):
            call.close()

    def __enter__(self) -> PipelineCall:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.failed(error)
        self.close()
