"""The client of one gRPC call: who it is, how long it waits, and what ends with it."""

from __future__ import annotations

from shmserve.core.caller import Caller
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.errors import DeadlineExceeded
from shmserve.frontends.grpc.callers import Callers
from shmserve.frontends.grpc.rpc_methods import RpcContext


class CallContext:
    """One per call of gRPC's, however many requests a stream has. It waits `most_s` at most."""

    def __init__(self, context: RpcContext, callers: Callers, most_s: float) -> None:
        self.context = context
        self._most_s = most_s
        self._callers = callers
        self._caller: Caller | None = None
        self._calls: set[InferenceCall] = set()
        self._gone = False
        if not context.add_callback(self._end):
            self._gone = True

    def caller(self) -> Caller:
        """Who it is, looked up when first asked."""
        if self._caller is None:
            self._caller = self._callers.of(self.context)
        return self._caller

    def timeout(self) -> float:
        """How long it waits.

        Raises:
            DeadlineExceeded: no longer.
        """
        remaining: float = self.context.time_remaining()
        if remaining <= 0:
            raise DeadlineExceeded("the call's deadline has passed")
        return min(remaining, self._most_s)

    def wants(self, key: str, value: str) -> bool:
        """Whether its metadata say so."""
        return (key, value) in self.context.invocation_metadata()

    def attach(self, call: InferenceCall) -> None:
        """This request is cancelled when the client goes, until it is detached."""
        self._calls.add(call)
        if self._gone:  # else `_end`, in another thread, finds it
            call.cancel()

    def detach(self, call: InferenceCall) -> None:
        self._calls.discard(call)

    def _end(self) -> None:
        self._gone = True
        for call in self._calls.copy():
            call.cancel()
