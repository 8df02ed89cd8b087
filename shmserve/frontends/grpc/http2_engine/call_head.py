"""Heads of HTTP/2 requests, read as heads of gRPC calls."""

import grpc
from msgspec import Struct

from shmserve.errors import ShmserveError
from shmserve.frontends.grpc.error_statuses import status_of
from shmserve.frontends.grpc.handlers import RpcMethod
from shmserve.frontends.grpc.http2_engine.message_compression import ACCEPTED
from shmserve.frontends.http2 import Fields, RequestFields, encode_fields, grpc_metadata
from shmserve.frontends.oip.origins import Origins

Metadata = tuple[tuple[str, str | bytes], ...]
Methods = dict[str, RpcMethod]  # by path

_OWN = frozenset(("content-type", "te", "grpc-encoding", "grpc-accept-encoding", "grpc-timeout"))
_TYPE = "application/grpc"
_ACCEPTS = ("grpc-accept-encoding", ",".join(ACCEPTED))
_HEAD = ((":status", "200"), ("content-type", _TYPE), _ACCEPTS)
OK: Fields = (("grpc-status", "0"),)


class CallHead(Struct, frozen=True, eq=False):
    """The head of a call that can begin.

    Attributes:
        method: the called method.
        timeout_s: timeout from `grpc-timeout`, in seconds; infinite without the field.
        encoding: compression of the client's compressed messages.
        answers: compression of the answers' messages; empty if not compressed.
        response: encoded headers of the answer.
        metadata: metadata of the call, without malformed binary values.
    """

    method: RpcMethod
    timeout_s: float
    encoding: str
    answers: str
    response: bytes
    metadata: Metadata


def call_head(
    request: RequestFields, methods: Methods, compression: str, hosts: Origins | None = None
) -> CallHead | bytes:
    """Return the head of a call, or the encoded header block that refuses the call. `compression`:
    the setting `grpc_compression`. `hosts`: hosts that a call may name; None if any host is
    allowed."""
    if request.method != "POST":
        return encode_fields(((":status", "405"), ("allow", "POST")))
    kind = request.value("content-type") or ""
    if not kind.startswith(_TYPE) or kind[len(_TYPE) :][:1] not in ("", "+", ";"):
        return encode_fields(((":status", "415"),))
    if request.excess:
        return refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, request.excess)
    if hosts is not None:
        try:
            hosts.check_host(request.authority, "header :authority")
        except ShmserveError as ex:
            return refusal(status_of(ex), ex.message)
    method = methods.get(request.path)
    if method is None:
        return refusal(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    encoding = request.value("grpc-encoding") or "identity"
    if encoding not in ACCEPTED:
        return refusal(
            grpc.StatusCode.UNIMPLEMENTED, f"grpc-encoding {encoding[:64]!r} is not supported"
        )
    timeout = request.value("grpc-timeout")
    try:
        timeout_s = grpc_metadata.parse_timeout(timeout) if timeout is not None else float("inf")
    except ValueError:
        return refusal(grpc.StatusCode.INTERNAL, "grpc-timeout is malformed")
    accepted = (request.value("grpc-accept-encoding") or "").replace(" ", "").split(",")
    answers = compression if compression in accepted and compression != "none" else ""
    response = encode_fields((*_HEAD, ("grpc-encoding", answers)) if answers else _HEAD)
    return CallHead(method, timeout_s, encoding, answers, response, _metadata(request))


def _metadata(request: RequestFields) -> Metadata:
    found: list[tuple[str, str | bytes]] = []
    for name, value in request.fields:
        if name in _OWN:
            continue
        if not name.endswith("-bin"):
            found.append((name, value))
            continue
        try:
            found.extend((name, part) for part in grpc_metadata.decode_binary(value))
        except ValueError:
            continue
    return tuple(found)


def status_fields(code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> Fields:
    """Return the trailers for a status."""
    fields = [("grpc-status", str(code.value[0]))]
    if details:
        fields.append(("grpc-message", grpc_metadata.encode_message(details)))
    for name, value in metadata:
        fields.append(
            (name, grpc_metadata.encode_binary(value) if isinstance(value, bytes) else value)
        )
    return tuple(fields)


def refusal(code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> bytes:
    """Return an encoded answer of trailers alone."""
    return trailers_only(status_fields(code, details, metadata))


def trailers_only(fields: Fields) -> bytes:
    """Return the encoded trailers of an answer without headers."""
    return encode_fields((*_HEAD, *fields))
