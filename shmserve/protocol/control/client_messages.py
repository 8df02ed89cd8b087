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


class ServerHello(Message, frozen=True):
    version: int


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


ToServer = ClientHello | RegisterMemfd | Unregister | ListRegions
FromServer = ServerHello | Ok | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_server = msgpack_decoder(ToServer)
decode_from_server = msgpack_decoder(FromServer)
