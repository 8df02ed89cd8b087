"""Events that a connection returns to its owner."""

import msgspec

from shmserve.frontends.http2.fields import Fields, RequestFields


class RequestReceived(msgspec.Struct, frozen=True, gc=False):
    """The client opened a stream. Equal heads are often the very same object."""

    stream_id: int
    head: RequestFields
    end_stream: bool


class DataReceived(msgspec.Struct, frozen=True, gc=False):
    """Payload of a stream. `data` is a view of the bytes given to `receive` and valid as long as
    those bytes. `data` is empty if the event only reports the end of a payload that the owner
    received directly."""

    stream_id: int
    data: memoryview
    end_stream: bool


class TrailersReceived(msgspec.Struct, frozen=True):
    """The client's trailers, which end the stream."""

    stream_id: int
    fields: Fields


class StreamReset(msgspec.Struct, frozen=True):
    """A stream was cancelled by the client, or reset by the server for a fault of the client."""

    stream_id: int
    code: int
    by_client: bool
    reason: str = ""


class ConnectionTerminated(msgspec.Struct, frozen=True):
    """The connection has failed, all streams are gone. Send the GOAWAY, then close the socket."""

    code: int
    reason: str


Event = RequestReceived | DataReceived | TrailersReceived | StreamReset | ConnectionTerminated
