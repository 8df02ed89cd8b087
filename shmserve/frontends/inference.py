"""The one way of a request through a frontend, whatever transport it came over.

It is checked against its model before anything is reserved, brought into slots, run, and
counted exactly once, as answered or as failed for one reason. Transports decode and encode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import Generic, Protocol, TypeVar

from msgspec.structs import replace

from shmserve.core.registry import ModelEntry
from shmserve.dispatch.caller_shares import FREE, CallerShare
from shmserve.dispatch.inference_call import InferenceCall, RequestAccount
from shmserve.dispatch.outcome import Outcome, RunOptions
from shmserve.dispatch.receipt import Receipt
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.protocol.oip.model_signature import ModelSignature, make_signature
from shmserve.tensor.spec import ModelSpec

_MOST_KEPT = 256
_signatures: dict[tuple[str, str], ModelSignature] = {}  # the oldest first


def signature_of(spec: ModelSpec) -> ModelSignature:
    """The signature of a model version, made anew when its spec is another object, or when
    it was forgotten. For any thread."""
    key = (spec.name, spec.version)
    signature = _signatures.get(key)
    if signature is None or signature.spec is not spec:
        signature = make_signature(spec)
        _signatures[key] = signature
        if len(_signatures) > _MOST_KEPT:
            oldest, *_ = list(_signatures)  # a copy in one step, whatever other threads add
            _signatures.pop(oldest, None)
    return signature


class RequestSource(Protocol):
    """A request as its transport has it.

    Attributes:
        nbytes: what its inputs will take of the pool, once it was checked, as far as is known.
        share: what its caller has of the pool for it; None: nothing that counts.
    """

    nbytes: int
    share: CallerShare | None

    @property
    def started_ns(self) -> int:
        """When it began to come in (CLOCK_MONOTONIC)."""
        ...

    def traceparent(self) -> str:
        """What it is part of, as its client has it (W3C Trace Context); empty: nothing."""
        ...

    def check(self, signature: ModelSignature) -> RunOptions:
        """Decode it, and compare it with its model; raises what does not fit."""
        ...

    def fill(self, call: InferenceCall) -> None:
        """Bring its inputs into slots, in order; raises what does not fit."""
        ...


class WaitingClient(Protocol):
    """Who waits for the answer, where a transport tells of its end at once."""

    def attach(self, call: InferenceCall) -> None:
        """The call is cancelled when the client goes, until it is detached."""
        ...

    def detach(self, call: InferenceCall) -> None: ...


Source = TypeVar("Source", bound=RequestSource)


class Inference(Generic[Source]):
    """One request to one model version. A context manager: closed at its end, counted as failed
    if that is an error. Where the answer is sent later, `close` comes after its last byte.

    Args:
        client: None: nobody can tell of its end but `RunOptions.on_wait`.

    Attributes:
        account, receipt: those of the call, which begins with `run` or `stream`.

    Raises:
        ShmserveError: it does not fit its model. It has been counted.
    """

    __slots__ = (
        "_call",
        "_client",
        "_dispatcher",
        "_options",
        "account",
        "entry",
        "receipt",
        "signature",
        "source",
    )
    account: RequestAccount
    receipt: Receipt

    def __init__(
        self,
        dispatcher: DispatchApi,
        entry: ModelEntry,
        source: Source,
        client: WaitingClient | None = None,
    ) -> None:
        self.entry = entry
        self.signature = signature_of(entry.spec)
        self._dispatcher = dispatcher
        self.source = source
        self._client = client
        self._call: InferenceCall | None = None
        try:
            self._options = source.check(self.signature)
        except BaseException as ex:
            dispatcher.refused(entry, ex)
            raise
        if entry.trace is not None:
            self._options = replace(self._options, traceparent=source.traceparent())

    def run(self) -> Outcome:
        """The one answer; its views are valid until `close`.

        Raises:
            ShmserveError: the model's error, or why it could not be run.
        """
        outcome = self._begin().execute()
        nbytes = self.source.nbytes
        for tensor in outcome.outputs:
            if not tensor.aliased:
                nbytes += len(tensor.view)
        if nbytes > FREE:
            self._hold(nbytes)
        return outcome

    def stream(self, on_sent: Callable[[], None] | None = None) -> Iterator[Outcome]:
        """Every answer, as `InferenceCall.stream` has them. `on_sent`: as `RunOptions` has it."""
        if on_sent is not None:
            self._options = replace(self._options, on_sent=on_sent)
        return self._begin().stream()

    def _begin(self) -> InferenceCall:
        if self.source.nbytes > FREE:
            self._hold(self.source.nbytes)
        client = self._client
        call = self._dispatcher.call(self.entry, self._options, client is not None)
        self._call, self.account, self.receipt = call, call.account, call.receipt
        if client is not None:
            client.attach(call)
        self.source.fill(call)
        self.receipt.receive_ns = monotonic_ns() - self.source.started_ns
        return call

    def _hold(self, nbytes: int) -> None:
        """Count what it has of the pool, and refuse it if that is too much for one caller."""
        source = self.source
        if source.share is None:
            source.share = self._dispatcher.shares.of(self._options.caller_number)
        source.share.hold(nbytes)

    def answered(self) -> None:
        """Count the request as answered: the answer is ready to be sent. `account` takes what the
        answer has cost as well."""
        if self._call is not None:
            self.account.answered()

    def failed(self, error: BaseException) -> None:
        """It ends without an answer."""
        if self._call is not None:
            self.account.failed(error)
        else:
            self._dispatcher.refused(self.entry, error)

    def close(self) -> None:
        """Give every slot back; what has not come is cancelled. Idempotent."""
        call = self._call
        if call is not None:
            if self._client is not None:
                self._client.detach(call)
            call.close()
        share = self.source.share
        if share is not None:
            share.close()

    def __enter__(self) -> Inference[Source]:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.failed(error)
        self.close()
