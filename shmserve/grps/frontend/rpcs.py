"""The gRPC service of GRPS: a failure stands in the answer's status, and the rpc ends with OK."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shmserve._generated import grps_pb2 as pb
from shmserve.config import Settings
from shmserve.dispatch.outcome import Outcome
from shmserve.errors import DeadlineExceeded, InvalidArgument
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.grpc.error_statuses import trace_refused
from shmserve.frontends.grpc.handlers import RpcMethod, Unary
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.grpc.services import Services, Work
from shmserve.frontends.oip.restricted_apis import Category
from shmserve.frontends.request_ids import traceparent
from shmserve.grps.frontend.answers import refusal, to_wire
from shmserve.grps.frontend.exchange import Exchange, options_of
from shmserve.grps.frontend.grps_service import OK, Grps
from shmserve.grps.frontend.payloads import Payload
from shmserve.grps.protocol import message_wire
from shmserve.grps.protocol.grps_message import GrpsMessage
from shmserve.grps.protocol.model_parameters import takes_http, takes_message
from shmserve.waiting import beside_if_large

SERVICE = pb.DESCRIPTOR.services_by_name["GrpsService"]

_Answer = Callable[[GrpsMessage], GrpsMessage]
_Rpc = tuple[str, Category, _Answer, Work]


def add_service(services: Services, dispatcher: DispatchApi, settings: Settings) -> None:
    """Add the GRPS service, with all its rpcs."""
    rpcs = GrpsRpcs(dispatcher, settings, services)
    services.add(SERVICE.full_name, rpcs.handlers())


class GrpsRpcs:
    """The rpcs of GRPS, which take and return serialized messages."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings, services: Services) -> None:
        self._dispatcher = dispatcher
        self._grps = Grps(dispatcher, settings)
        self._settings = settings
        self._services = services

    def handlers(self) -> dict[str, RpcMethod]:
        """Return the handlers, by name of the rpc."""
        grps, services = self._grps, self._services
        handlers = {
            "Predict": services.unary(
                "Predict", "inference", self._predict, "inference", large=True, never_blocks=True
            ),
            "PredictStreaming": services.stream(
                "PredictStreaming", "inference", self._stream, never_blocks=True
            ),
        }
        switches: tuple[tuple[str, _Answer], ...] = (
            ("Online", lambda _: grps.set_online(True)),
            ("Offline", lambda _: grps.set_online(False)),
        )
        for name, switch in switches:
            run = _answering(name, switch)
            handlers[name] = services.unary(
                name, "health", run, "asking", action="change", never_blocks=True
            )
        others: tuple[_Rpc, ...] = (
            ("CheckLiveness", "health", lambda _: OK, "quick"),
            ("CheckReadiness", "health", lambda _: grps.ready(), "quick"),
            ("ServerMetadata", "metadata", lambda _: grps.server_metadata(), "quick"),
            ("ModelMetadata", "metadata", grps.model_metadata, "quick"),
        )
        for name, category, answer, work in others:
            run = _answering(name, answer)
            handlers[name] = services.unary(name, category, run, work, never_blocks=True)
        return handlers

    def _predict(self, data: bytes, context: RpcContext) -> bytes:
        try:
            exchange = self._begin(data, context, False)
            with exchange:
                return exchange.once(lambda outcome, _: _wire(exchange, outcome))
        except Exception as ex:
            return self._refusal(ex, "Predict", context)

    def _stream(self, requests: Iterator[bytes], context: RpcContext) -> Iterator[bytes]:
        data = self._services.first(requests, context)
        try:
            exchange = self._begin(data, context, True)
        except Exception as ex:
            yield self._refusal(ex, "PredictStreaming", context)
            return
        try:
            for outcome in exchange.outcomes():
                yield _wire(exchange, outcome)
            exchange.close()
        except Exception as ex:
            exchange.failed(ex)
            yield self._refusal(ex, "PredictStreaming", context)
        finally:
            exchange.close()

    def _refusal(self, ex: Exception, name: str, context: RpcContext) -> bytes:
        trace_refused(self._dispatcher, context.invocation_metadata(), name, ex)
        return message_wire.encode(refusal(ex, name))

    def _begin(self, data: bytes, context: RpcContext, streaming: bool) -> Exchange:
        model, _ = message_wire.glance(data)
        entry = self._grps.models.ready(model)
        if takes_http(entry.spec) and not takes_message(entry.spec):
            raise InvalidArgument(f"model '{entry.spec.name}' takes HTTP requests only")
        if takes_message(entry.spec):
            payload = Payload(GrpsMessage(model=model), wire=data)
        else:
            payload = Payload(beside_if_large(len(data), message_wire.parse, data))
        remaining: float = context.time_remaining()
        if remaining <= 0:
            raise DeadlineExceeded("the call's deadline has passed")
        timeout_s = min(remaining, self._settings.request_timeout_s)
        options = options_of(
            *(entry.spec, model, streaming, context.is_active, context.caller_number, timeout_s),
            traceparent=traceparent(context.invocation_metadata()),
        )
        return self._grps.begin(payload, entry, options)


def _wire(exchange: Exchange, outcome: Outcome) -> bytes:
    size = sum([len(tensor.view) for tensor in outcome.outputs])
    data = beside_if_large(size, _encode, exchange, outcome)
    exchange.receipt.copy_out(len(data))
    return data


def _encode(exchange: Exchange, outcome: Outcome) -> bytes:
    return b"".join(to_wire(exchange.signature, outcome, exchange.kind))


def _answering(name: str, answer: _Answer) -> Unary:
    """Return the handler of an rpc that needs no model."""

    def run(data: bytes, context: RpcContext) -> bytes:
        try:
            return message_wire.encode(answer(message_wire.parse(data)))
        except Exception as ex:
            return message_wire.encode(refusal(ex, name))

    return run
