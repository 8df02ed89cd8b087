"""Messages of the client socket, where local programs pass their memory to the server.

The peer is any local program, so these messages are apart from those of the link: what can
be said here is all that a stranger can say. One request at a time, each gets one reply;
a malformed one ends the connection. Fields are only ever appended and then have defaults.

Needs nothing but msgspec: the Python client imports it.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from shmserve.protocol.control.message import Message
from shmserve.protocol.decoding import msgpack_decoder

VERSION = 1
SOCKET_NAME = "client.sock"  # in the run directory, unless the setting names another path


class ClientHello(Message, frozen=True):
    """First message; the reply is `ServerHello`, and with another version the end."""

    version: int


class RegisterMemfd(Message, frozen=True):
    """Register `byte_size` bytes from `offset` of the memfd that rides along.

    It must be sealed with F_SEAL_SHRINK and F_SEAL_GROW.
    """

    name: str
    offset: int
    byte_size: int


class Unregister(Message, frozen=True):
    """Remove system regions of the caller's user by name; unknown ones are none. No names: all
    that the calling process has registered (others of its user keep theirs)."""

    names: tuple[str, ...] = ()


class ListRegions(Message, frozen=True, tag="Status"):
    """The caller's system regions in the order of their names, from the first one after
    `after`."""

    after: str = ""


class OpenLane(Message, frozen=True):
    """Give me a lane to an executor of this model; version "": the newest. The reply is
    `LaneOpened`, and the lane rides along; or `Failed`: ask over HTTP."""

    model: str
    version: str = ""


class ServerHello(Message, frozen=True):
    """`lanes`: `OpenLane` is understood."""

    version: int
    lanes: bool = False


class RegionInfo(Struct, frozen=True, array_like=True):
    """One region. `key` is empty for memory that was passed here."""

    name: str
    key: str
    offset: int
    byte_size: int


class Ok(Message, frozen=True):
    """It is done, and every request that begins from now on finds it so. `more`: ask for
    the regions after the last one of these."""

    regions: tuple[RegionInfo, ...] = ()
    more: bool = False


class Failed(Message, frozen=True):
    """`code` is a value of `errors.Code`; `text` is written for the client."""

    code: str
    text: str


class LaneOpened(Message, frozen=True):
    """One end of a socket pair rides along, of type SEQPACKET: the messages on it are those of
    `lane_messages`.

    Attributes:
        version: of the model, which answers.
        instance: whose executor has the other end.
        rerun: a request that an executor died of may be sent again.
        timeout_ns: how long the server would wait for an answer.
    """

    version: str
    instance: str
    rerun: bool
    timeout_ns: int


ToServer = ClientHello | RegisterMemfd | Unregister | ListRegions | OpenLane
FromServer = ServerHello | Ok | Failed | LaneOpened

encode = msgspec.msgpack.Encoder().encode
decode_to_server = msgpack_decoder(ToServer)
decode_from_server = msgpack_decoder(FromServer)
