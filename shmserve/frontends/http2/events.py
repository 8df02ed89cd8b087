"""What a connection tells its owner."""

from __future__ import annotations

import msgspec

from shmserve.frontends.http2.fields import Fields, RequestFields


class RequestReceived(msgspec.Struct, frozen=True, gc=False):
    """A stream was opened. Equal heads are often the very same object."""

    stream_id: int
    head: RequestFields
    end_stream: bool


class DataReceived(msgspec.Struct, frozen=True, gc=False):
    """Payload of a stream.

    `data` is a view of the bytes given to `receive`, for as long as those stay. It is empty when
    only the end is told, of a payload that its owner received by itself.
    """

    stream_id: int
    data: memoryview
    end_stream: bool


class TrailersReceived(msgspec.Struct, frozen=True):
    """The client's trailers, and with them the end of its stream."""

    stream_id: int
    fields: Fields


class StreamReset(msgspec.Struct, frozen=True):
    """A stream is gone: cancelled by the client, or reset by us for what the client did."""

    stream_id: int
    code: int
    by_client: bool
    reason: str = ""


class PingAcknowledged(msgspec.Struct, frozen=True):
    """The client answered a `ping`."""

    data: bytes


class GoAwayReceived(msgspec.Struct, frozen=True):
    """The client is about to leave; its open streams go on."""

    code: int
    debug_data: bytes


class ConnectionTerminated(msgspec.Struct, frozen=True):
    """The connection has failed: every stream is gone, a GOAWAY waits to be sent, then close."""

    code: int
    reason: str


Event = (
    RequestReceived
    | DataReceived
    | TrailersReceived
    | StreamReset
    | PingAcknowledged
    | GoAwayReceived
    | ConnectionTerminated
)
