"""Answers of GRPS models over HTTP: in one piece, or in chunks as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from falcon import Request, Response

from shmserve.dispatch.outcome import Outcome
from shmserve.errors import InvalidArgument, ModelFailure
from shmserve.frontends.http.openapi import BINARY
from shmserve.frontends.http.routes.inference.infer_resource import set_receipt
from shmserve.frontends.http.server.response import BufferBody, send_chunks
from shmserve.grps.frontend.answers import refusal, to_message
from shmserve.grps.frontend.exchange import Exchange
from shmserve.grps.protocol import json_writer
from shmserve.grps.protocol.grps_message import GrpsMessage, GrpsStatus, StatusFlag
from shmserve.waiting import beside_if_large


def respond_stream(req: Request, resp: Response, exchange: Exchange, content_type: str) -> None:
    """Answer in chunks. Each chunk is a message as JSON, or the bytes of a bin_data. Wait for the
    first answer, so that a request that fails at once gets the status of the failure. A later
    failure becomes a message in the stream."""
    pieces = _pieces(exchange)
    first = next(pieces, b"")
    resp.content_type = content_type
    send_chunks(resp, first, guarded(pieces, req.path, _failure_chunk), exchange.close)


def _pieces(exchange: Exchange) -> Iterator[bytes]:
    for outcome in exchange.outcomes():
        nbytes = sum(len(o.view) for o in outcome.outputs)
        message = beside_if_large(nbytes, to_message, exchange.signature, outcome, exchange.kind)
        if message.bin_data:
            yield bytes(message.bin_data)
        else:
            yield beside_if_large(nbytes, json_writer.encode, message)


def guarded(
    pieces: Iterator[bytes], what: str, tell: Callable[[Exception, str], bytes]
) -> Iterator[bytes]:
    """Yield the pieces. A failure becomes the last piece, as the status has been sent already."""
    try:
        yield from pieces
    except Exception as ex:
        yield tell(ex, what)


def _failure_chunk(ex: Exception, what: str) -> bytes:
    return json_writer.encode(refusal(ex, what))


def respond_once(req: Request, resp: Response, exchange: Exchange, as_ndarray: bool) -> None:
    """Answer with one message. The bytes of a bin_data are sent from the model's output slot."""

    def make(outcome: Outcome, lasting: bool) -> Any:
        nbytes = sum(len(o.view) for o in outcome.outputs)
        message = beside_if_large(nbytes, to_message, exchange.signature, outcome, exchange.kind)
        resp.status = http_status(message.status)
        exchange.receipt.copy_out(nbytes)
        if as_ndarray and (message.status is None or message.status.status != StatusFlag.FAILURE):
            return beside_if_large(nbytes, _ndarray, message)
        if not message.bin_data:
            return beside_if_large(nbytes, json_writer.encode, message)
        resp.content_type = BINARY
        return memoryview(message.bin_data) if lasting else bytes(message.bin_data)

    data = exchange.once(make)
    receipt = exchange.receipt
    lasting = isinstance(data, memoryview)
    if lasting:
        receipt.copy_out(-len(data))
    if req.env.get("HTTP_SHMSERVE_RECEIPT") == "1":
        set_receipt(resp, receipt)
    if lasting:
        resp.set_stream(BufferBody([data], exchange.close), len(data))
    else:
        resp.data = data
        exchange.close()


def _ndarray(message: GrpsMessage) -> bytes:
    try:
        return json_writer.encode_ndarray(message)
    except InvalidArgument as ex:
        raise ModelFailure(ex.message) from None


def http_status(status: GrpsStatus | None) -> int:
    """Return the code of a message if it is a valid HTTP status of an answer; else 500 for a
    failure, 200 otherwise."""
    if status is None:
        return 200
    if 200 <= status.code <= 599:
        return status.code
    return 500 if status.status == StatusFlag.FAILURE else 200
