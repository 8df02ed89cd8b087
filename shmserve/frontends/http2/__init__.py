"""HTTP/2 for a gRPC server (RFC 9113): the protocol alone, without sockets, threads or a clock.

The owner of a `Connection` feeds the bytes received from a socket and gets events. Responses go in
through `send`, and buffers for `sendmsg` come out. Large payload bypasses the connection: while
`payload_due` says that the next bytes belong to a stream, the owner receives them straight into
the stream's memory. The owner's part in a loop::

    def readable(sock, connection, calls, now):
        due = connection.payload_due
        place = calls[due[0]].reader.space() if due else None  # of a MessageReader
        if place is not None:
            count = sock.recv_into(place[: due[1]])
            message = calls[due[0]].reader.filled(count)  # None until it is complete
            events = connection.payload_received(count, now)
            connection.consumed(due[0], count)
        else:
            data = sock.recv(1 << 16)  # b"" is the end: connection.lost()
            events = connection.receive(data, now)
        for event in events:
            handle(event)  # RequestReceived opens a call, DataReceived feeds its reader, ...
        flush(sock, connection, now)

    def flush(sock, connection, now):
        while buffers := connection.outgoing(now):
            connection.sent(sock.sendmsg(buffers), now)  # BlockingIOError: wait for EPOLLOUT
        for slots in connection.released():  # the tokens of `send`
            slots.release()
        if connection.finished:
            sock.close()

The owner also calls `tick` at the time given by `next_tick`. A call is answered by a single `send`
of headers, buffers and trailers. Header blocks are encoded by `encode_fields` and can be reused.
"""

from shmserve.frontends.http2.connection import Connection
from shmserve.frontends.http2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RequestReceived,
    StreamReset,
    TrailersReceived,
)
from shmserve.frontends.http2.fields import Fields, RequestFields, encode_fields
from shmserve.frontends.http2.frames import PREFACE, Buffer, ErrorCode
from shmserve.frontends.http2.limits import Limits
from shmserve.frontends.http2.sender import SendQueueFull

__all__ = [
    "PREFACE",
    "Buffer",
    "Connection",
    "ConnectionTerminated",
    "DataReceived",
    "ErrorCode",
    "Event",
    "Fields",
    "Limits",
    "RequestFields",
    "RequestReceived",
    "SendQueueFull",
    "StreamReset",
    "TrailersReceived",
    "encode_fields",
]
