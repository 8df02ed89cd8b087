"""Exchange: a GRPS request and its answers, without a transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import TypeVar

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry
from shmserve.dispatch.caller_shares import CallerShare
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.dispatch.outcome import Outcome, RunOptions
from shmserve.errors import InvalidArgument, ModelFailure
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.inference import Inference
from shmserve.grps.frontend import payloads
from shmserve.grps.frontend.payloads import Body, Payload
from shmserve.grps.protocol import custom_http
from shmserve.grps.protocol.custom_http import RequestHead
from shmserve.grps.protocol.model_parameters import MODEL, STREAMING, takes_http, takes_message
from shmserve.protocol.control.data_messages import Parameter
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve.tensor.spec import ModelSpec

T = TypeVar("T")
OnWait = Callable[[], bool] | None


class _Source:
    """The attributes of `RequestSource` that all GRPS requests have."""

    def __init__(self, nbytes: int, traceparent: str) -> None:
        self._traceparent = traceparent
        self.started_ns = monotonic_ns()
        self.nbytes = nbytes
        self.share: CallerShare | None = None

    def traceparent(self) -> str:
        return self._traceparent


class PayloadSource(_Source):
    """A GRPS request with messages or tensors as payload."""

    def __init__(self, payload: Payload, settings: Settings, options: RunOptions) -> None:
        body = payload.body.remaining if payload.body is not None else None
        super().__init__(body or len(payload.wire or b""), options.traceparent)
        self._payload = payload
        self._settings = settings
        self._options = options

    def check(self, signature: ModelSignature) -> RunOptions:
        self._signature = signature
        return self._options

    def fill(self, call: InferenceCall) -> None:
        payloads.fill(call, self._signature, self._payload, self._settings)


class HttpSource(_Source):
    """An HTTP request for a model that takes raw HTTP requests."""

    def __init__(self, head: RequestHead, body: Body, options: RunOptions) -> None:
        super().__init__(body.remaining or 0, options.traceparent)
        self._head = head
        self._body = body
        self._options = options

    def check(self, signature: ModelSignature) -> RunOptions:
        return self._options

    def fill(self, call: InferenceCall) -> None:
        data = custom_http.encode(self._head)
        reservation = call.reserve(len(data))
        reservation.view[:] = data
        call.add_input(custom_http.HEAD, "UINT8", (len(data),), reservation)
        size = self._body.remaining or 0
        if size:
            reservation = call.reserve(size)
            call.receipt.copy_in(self._body.fill(reservation.view))
            call.add_input(custom_http.BODY, "UINT8", (size,), reservation)


class Exchange(Inference[PayloadSource | HttpSource]):
    """An inference whose answers become messages. Must be closed after the answers were sent.

    Args:
        kind: kind of payload that the client asked with.
    """

    __slots__ = ("kind",)

    def __init__(
        self,
        dispatcher: DispatchApi,
        entry: ModelEntry,
        source: PayloadSource | HttpSource,
        kind: str = "",
    ) -> None:
        super().__init__(dispatcher, entry, source)
        self.kind = kind

    def once(self, make: Callable[[Outcome, bool], T]) -> T:
        """Return the only answer, converted by `make`.

        The second argument of `make` is True if the outcome stays valid until the exchange is
        closed. Otherwise, `make` must copy the data to keep.

        Raises:
            ShmserveError: the inference failed, or gave several answers.
        """
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
        """Yield the answers as they come. An answer is valid until the next is asked for.

        Raises:
            ShmserveError: the model failed, perhaps after some answers.
        """
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
    """Return the options of a request, besides its inputs. `model` is the name that the client
    used."""
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
