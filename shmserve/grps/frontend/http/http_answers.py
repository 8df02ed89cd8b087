"""Answers of GRPS models over HTTP: in one piece, or in chunks as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import falcon

from shmserve.errors import InvalidArgument, ModelFailure
from shmserve.frontends.grps.exchange import Exchange, OnWait
from shmserve.frontends.http.buffers import BufferBody
from shmserve.frontends.http.infer import set_receipt, watch
from shmserve.frontends.oip.seam import Outcome
from shmserve.grps.frontend.answers import refusal, to_message
from shmserve.grps.protocol import json_writer as grps_json_out
from shmserve.grps.protocol.message import GrpsMessage, Status, StatusFlag

BINARY = "application/octet-stream"


class Chunks:
    """A body that is sent piece by piece; `close` comes also to one that was never begun."""

    __slots__ = ("_on_close", "_pieces")

    def __init__(self, pieces: Iterator[bytes], on_close: Callable[[], object]) -> None:
        self._pieces = pieces
        self._on_close: Callable[[], object] | None = on_close

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


def respond_stream(
    req: falcon.Request, resp: falcon.Response, exchange: Exchange, content_type: str
) -> None:
    """Answer in chunks, each a message as JSON, or the bytes of a bin_data.

    The first answer is waited for, so that a request that fails at once gets its status;
    a later failure is a message in the stream.
    """
    pieces = _pieces(exchange, watch(req.env))
    first = next(pieces, b"")
    resp.content_type = content_type
    send_chunks(resp, exchange, first, guarded(pieces, req.path, _failure_chunk))


def send_chunks(
    resp: falcon.Response, exchange: Exchange, first: bytes, rest: Iterator[bytes]
) -> None:
    """Hand a stream to the server, which closes the exchange with it."""
    pieces = chain((first,) if first else (), rest)
    resp.stream = Chunks(pieces, exchange.close)


def _pieces(exchange: Exchange, on_wait: OnWait) -> Iterator[bytes]:
    for outcome in exchange.outcomes(on_wait):
        message = to_message(exchange.plan, outcome, exchange.kind)
        yield bytes(message.bin_data) if message.bin_data else grps_json_out.encode(message)


def guarded(
    pieces: Iterator[bytes], what: str, tell: Callable[[Exception, str], bytes]
) -> Iterator[bytes]:
    """The same, and a failure as the last piece: the status has been sent already."""
    try:
        yield from pieces
    except Exception as ex:
        yield tell(ex, what)


def _failure_chunk(ex: Exception, what: str) -> bytes:
    return grps_json_out.encode(refusal(ex, what))


def respond_once(
    req: falcon.Request, resp: falcon.Response, exchange: Exchange, as_ndarray: bool
) -> None:
    """Answer with one message; bytes of a bin_data go out from where the model put them."""

    def make(outcome: Outcome, lasting: bool) -> Any:
        message = to_message(exchange.plan, outcome, exchange.kind)
        resp.status = http_status(message.status)
        exchange.call.receipt.copied_out += sum(len(o.view) for o in outcome.outputs)
        if as_ndarray and (message.status is None or message.status.status != StatusFlag.FAILURE):
            return _ndarray(message)
        if not message.bin_data:
            return grps_json_out.encode(message)
        resp.content_type = BINARY
        return memoryview(message.bin_data) if lasting else bytes(message.bin_data)

    data = exchange.once(make, watch(req.env))
    receipt = exchange.call.receipt
    lasting = isinstance(data, memoryview)
    if lasting:
        receipt.copied_out -= len(data)
    if req.env.get("HTTP_SHMSERVE_RECEIPT") == "1":
        set_receipt(resp, receipt)
    if lasting:
        resp.set_stream(BufferBody([data], exchange.close), len(data))
    else:
        resp.data = data
        exchange.close()


def _ndarray(message: GrpsMessage) -> bytes:
    try:
        return grps_json_out.encode_ndarray(message)
    except InvalidArgument as ex:
        raise ModelFailure(ex.message) from None


def http_status(status: Status | None) -> int:
    """A message's code as the answer's, if it can be one."""
    if status is None:
        return 200
    if 200 <= status.code <= 599:
        return status.code
    return 500 if status.status == StatusFlag.FAILURE else 200
