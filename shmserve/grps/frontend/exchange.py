"""Exchange: a GRPS request and its answers, without a transport."""

from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import TypeVar

from shmserve.core.registry import ModelEntry
from shmserve.dispatch.caller_shares import CallerShare
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.dispatch.outcome import Outcome, RunOptions
from shmserve.errors import InvalidArgument, ModelFailure
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.inference import Inference
from shmserve.grps.protocol.model_parameters import MODEL, STREAMING, takes_http, takes_message
from shmserve.protocol.control.data_messages import Parameter
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve.tensor.spec import ModelSpec

T = TypeVar("T")
OnWait = Callable[[], bool] | None


class GrpsSource:
    """The `RequestSource` of a GRPS request. `nbytes`: known bytes of the request's tensors.
    `fill`: fills the inputs of a call to a model of this signature."""

    def __init__(
        self,
        nbytes: int,
        options: RunOptions,
        fill: Callable[[InferenceCall, ModelSignature], None],
    ) -> None:
        self.started_ns = monotonic_ns()
        self.nbytes = nbytes
        self.share: CallerShare | None = None
        self._options = options
        self._fill = fill

    def traceparent(self) -> str:
        return self._options.traceparent

    def check(self, signature: ModelSignature) -> RunOptions:
        self._signature = signature
        return self._options

    def fill(self, call: InferenceCall) -> None:
        self._fill(call, self._signature)


class Exchange(Inference[GrpsSource]):
    """An inference whose answers become messages. Must be closed after the answers were sent.
    `kind`: kind of payload that the client asked with."""

    __slots__ = ("kind",)

    def __init__(
        self,
        dispatcher: DispatchApi,
        entry: ModelEntry,
        source: GrpsSource,
        kind: str = "",
    ) -> None:
        super().__init__(dispatcher, entry, source)
        self.kind = kind

    def once(self, make: Callable[[Outcome, bool], T]) -> T:
        """Return the only answer, converted by `make`. The second argument of `make` is True if the
        outcome stays valid until the exchange is closed. Otherwise, `make` must copy the data to
        keep. Raise ShmserveError if the inference failed, or gave several answers."""
        if not self.entry.spec.decoupled:
            answer = make(self.run(), True)
            self.answered()
            return answer
        answers: list[T] = []
        for outcome in self.outcomes():
            if answers:
                raise InvalidArgument(
                    f"model '{self.entry.spec.name}' answers more than once: ask for streaming"
                )
            answers.append(make(outcome, outcome.final))
            if outcome.final:
                break
        if not answers:
            raise ModelFailure(f"model '{self.entry.spec.name}' gave no answer")
        self.answered()
        return answers[0]

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the answers as they come. An answer is valid until the next is asked for. Raise
        ShmserveError if the model failed, perhaps after some answers."""
        for outcome in self.stream():
            if outcome.error is not None:
                raise outcome.error
            if outcome.outputs:
                yield outcome

    def failed(self, error: BaseException) -> None:
        """Give every slot back, as the request failed without an answer."""
        super().failed(error)
        self.close()


def options_of(
    spec: ModelSpec,
    model: str,
    streaming: bool,
    on_wait: OnWait,
    caller_number: int,
    timeout_s: float | None = None,
    traceparent: str = "",
) -> RunOptions:
    """Return the options of a request. `model` is the name that the client used."""
    parameters: dict[str, Parameter] = {}
    if takes_message(spec) or takes_http(spec):
        parameters = {STREAMING: streaming, MODEL: model}
    return RunOptions(
        parameters=parameters,
        on_wait=on_wait,
        timeout_s=timeout_s,
        caller_number=caller_number,
        traceparent=traceparent,
    )
