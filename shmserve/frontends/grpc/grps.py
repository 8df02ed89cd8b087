"""GRPS's service: failures are told in the answer's status, and the rpc ends with OK."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic_ns

import grpc

from shmserve._generated import grps_pb2 as pb
from shmserve.config import Settings
from shmserve.errors import DeadlineExceeded, InvalidArgument
from shmserve.frontends.grpc.methods import Methods
from shmserve.frontends.grpc.thread_pools import BoundedPool
from shmserve.frontends.grps.exchange import Exchange
from shmserve.frontends.grps.service import OK, Grps
from shmserve.frontends.oip.seam import Dispatcher, Outcome
from shmserve.grps.frontend.answers import refusal, to_wire
from shmserve.grps.frontend.payloads import Payload
from shmserve.grps.protocol import message_wire as grps_wire
from shmserve.grps.protocol.message import GrpsMessage
from shmserve.grps.protocol.model_parameters import takes_http, takes_message

SERVICE = pb.DESCRIPTOR.services_by_name["GrpsService"]


class GrpsRpcs:
    """The rpcs on bytes."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings, methods: Methods) -> None:
        self._grps = Grps(dispatcher, settings)
        self._settings = settings
        self._methods = methods

    def handlers(
        self, calls: BoundedPool, streams: BoundedPool, quick: BoundedPool, asking: BoundedPool
    ) -> dict[str, grpc.RpcMethodHandler]:
        """All handlers. `asking`: threads for what waits for the coordinator."""
        grps = self._grps
        return {
            "Predict": self._methods.unary("Predict", self._predict, calls, large=True),
            "PredictStreaming": self._methods.stream("PredictStreaming", self._stream, streams),
            "Online": self._told("Online", lambda _: grps.set_online(True), asking),
            "Offline": self._told("Offline", lambda _: grps.set_online(False), asking),
            "CheckLiveness": self._told("CheckLiveness", lambda _: OK, quick),
            "CheckReadiness": self._told("CheckReadiness", lambda _: grps.ready(), quick),
            "ServerMetadata": self._told("ServerMetadata", lambda _: grps.server_metadata(), quick),
            "ModelMetadata": self._told("ModelMetadata", grps.model_metadata, quick),
        }

    def _told(
        self, name: str, answer: Callable[[GrpsMessage], GrpsMessage], pool: BoundedPool
    ) -> grpc.RpcMethodHandler:
        """What is answered without a model."""

        def run(data: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return grps_wire.encode(answer(grps_wire.parse(data)))
            except Exception as ex:
                return grps_wire.encode(refusal(ex, name))

        return self._methods.unary(name, run, pool)

    def _predict(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            exchange = self._begin(data, context, False)
        except Exception as ex:
            return grps_wire.encode(refusal(ex, "Predict"))
        try:
            made = exchange.once(lambda outcome, _: _wire(exchange, outcome), context.is_active)
            exchange.close()
            return made
        except Exception as ex:
            exchange.failed(ex)
            return grps_wire.encode(refusal(ex, "Predict"))

    def _stream(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        data = self._methods.first(requests, context)
        try:
            exchange = self._begin(data, context, True)
        except Exception as ex:
            yield grps_wire.encode(refusal(ex, "PredictStreaming"))
            return
        try:
            for outcome in exchange.outcomes(context.is_active):
                yield _wire(exchange, outcome)
            exchange.close()
        except Exception as ex:
            exchange.failed(ex)
            yield grps_wire.encode(refusal(ex, "PredictStreaming"))
        finally:
            exchange.close()

    def _begin(self, data: bytes, context: grpc.ServicerContext, streaming: bool) -> Exchange:
        started = monotonic_ns()
        told = grps_wire.glance(data)
        entry = self._grps.entry(told.model)
        if takes_http(entry.spec) and not takes_message(entry.spec):
            raise InvalidArgument(f"model '{entry.spec.name}' takes HTTP requests only")
        if takes_message(entry.spec):
            payload = Payload(GrpsMessage(model=told.model), wire=data)
        else:
            payload = Payload(grps_wire.parse(data))
        remaining: float = context.time_remaining()
        if remaining <= 0:
            raise DeadlineExceeded("the call's deadline has passed")
        timeout = min(remaining, self._settings.request_timeout_s)
        exchange = self._grps.begin(payload, entry, told.model, streaming, timeout)
        exchange.call.receipt.receive_ns = monotonic_ns() - started
        return exchange


def _wire(exchange: Exchange, outcome: Outcome) -> bytes:
    parts = to_wire(exchange.plan, outcome, exchange.kind)
    made = b"".join(parts)
    exchange.call.receipt.copied_out += len(made)
    return made
