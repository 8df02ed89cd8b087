"""Inference driver: the path of an inference request through a frontend, for every transport.

A request is checked against the model before memory is reserved, then brought into slots, run, and
counted exactly once, as answered or as failed with one reason. Transports decode and encode.
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
from shmserve.errors import ResourceExhausted
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.protocol.oip.model_signature import ModelSignature, make_signature
from shmserve.tensor.spec import ModelSpec

_MAX_KEPT = 256
_signatures: dict[tuple[str, str], ModelSignature] = {}  # the oldest first


def signature_of(spec: ModelSpec) -> ModelSignature:
    """Return the signature of a model version. A new signature is made if the spec is another
    object than before, or if the cache has dropped the signature. For any thread."""
    key = (spec.name, spec.version)
    signature = _signatures.get(key)
    if signature is None or signature.spec is not spec:
        signature = make_signature(spec)
        _signatures[key] = signature
        if len(_signatures) > _MAX_KEPT:
            # a copy in one step, since other threads may add entries
            oldest, *_ = list(_signatures)
            _signatures.pop(oldest, None)
    return signature


class RequestSource(Protocol):
    """A request in the form of its transport. `nbytes`: bytes of the pool that the inputs need, as
    far as known after `check`. `share`: the caller's share of the pool, held for this request; None
    if the request is too small to count."""

    nbytes: int
    share: CallerShare | None

    @property
    def started_ns(self) -> int:
        """The time at which the request began to arrive (CLOCK_MONOTONIC, nanoseconds)."""
        ...

    def traceparent(self) -> str:
        """Return the client's trace context (W3C Trace Context), empty if the client sent none."""
        ...

    def check(self, signature: ModelSignature) -> RunOptions:
        """Decode the request and compare it with the model. Raise an error if it does not fit."""
        ...

    def fill(self, call: InferenceCall) -> None:
        """Bring the inputs into slots, in order. Raise an error if an input does not fit."""
        ...


class WaitingClient(Protocol):
    """A client that waits for the answer, on a transport that reports a disconnect at once."""

    def attach(self, call: InferenceCall) -> None:
        """Cancel the call when the client disconnects, until `detach`."""
        ...

    def detach(self, call: InferenceCall) -> None: ...


Source = TypeVar("Source", bound=RequestSource)


class Inference(Generic[Source]):
    """Driver of a request to a model version, as a context manager: leaving the context closes the
    request, and an error counts the request as failed. If the answer is sent later, call
    `close` after the last byte.

    Args:
        client: the waiting client; None if only `RunOptions.on_wait` can report a disconnect.

    Attributes:
        account, receipt: account and receipt of the call; set by `run` or `stream`.

    Raises:
        ShmserveError: the request does not fit its model. The failure has been counted.
    """

    __slots__ = (
        "_call", "_client", "_dispatcher", "_options", "account", "entry", "receipt", "signature",
        "source",
    )  # fmt: skip
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

    def run(self, on_full: Callable[[ResourceExhausted], bool] | None = None) -> Outcome:
        """Return the single answer, whose views are valid until `close`. Raise ShmserveError if
        the model failed or could not run. `on_full`: called with the error if the caller's share
        of the pool has no room for the answer; returns True to look again, False to go on
        nevertheless, or raises the error."""
        outcome = self._begin().execute()
        nbytes = self.source.nbytes
        for tensor in outcome.outputs:
            if not tensor.aliased:
                nbytes += len(tensor.view)
        while nbytes > FREE:
            try:
                self._hold(nbytes)
                break
            except ResourceExhausted as ex:
                if on_full is None:
                    raise
                if not on_full(ex):
                    break
        return outcome

    def stream(self, on_sent: Callable[[], None] | None = None) -> Iterator[Outcome]:
        """Return all answers, as `InferenceCall.stream`. `on_sent`: as in `RunOptions`."""
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
        """Count the request's bytes of the pool. Refuse the request if its caller holds too many
        bytes."""
        source = self.source
        if source.share is None:
            source.share = self._dispatcher.shares.of(self._options.caller_number)
        source.share.hold(nbytes)

    def answered(self) -> None:
        """Count the request as answered: the answer is ready to be sent. `account` takes the cost
        of the answer as well."""
        if self._call is not None:
            self.account.answered()

    def failed(self, error: BaseException) -> None:
        """Count the request as failed: the client gets no answer but the error."""
        if self._call is not None:
            self.account.failed(error)
        else:
            self._dispatcher.refused(self.entry, error)

    def close(self) -> None:
        """Give every slot back, and cancel answers that have not arrived. Idempotent."""
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
