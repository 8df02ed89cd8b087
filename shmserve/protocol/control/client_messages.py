"""Messages of the client socket, through which local programs pass memory to the server.

The peer is any local program. So these messages are separate from the messages of the link, and a
stranger can send nothing else. A program sends one request at a time and gets one reply to each. A
malformed request ends the connection. Fields are only ever appended, with defaults.

Needs nothing but msgspec: the Python client imports this module.
"""

import msgspec
from msgspec import Struct

from shmserve.protocol.control.message import Message
from shmserve.protocol.decoding import msgpack_decoder

VERSION = 1
# in the run directory, unless the setting `client_socket` names another path
SOCKET_NAME = "client.sock"


class ClientHello(Message, frozen=True):
    """First message of a program, answered by `ServerHello`. Other versions end the connection."""

    version: int


class RegisterMemfd(Message, frozen=True):
    """Request to register `byte_size` bytes from `offset` of the memfd that rides along. The memfd
    must be sealed with F_SEAL_SHRINK and F_SEAL_GROW."""

    name: str
    offset: int
    byte_size: int


class Unregister(Message, frozen=True):
    """Request to remove system regions of the caller's user by name. Unknown names are ignored.
    Without names, all regions that the calling process has registered are removed. Regions of the
    user's other processes stay."""

    names: tuple[str, ...] = ()


class ListRegions(Message, frozen=True, tag="Status"):
    """Request for the caller's system regions, ordered by name, from after the name `after`."""

    after: str = ""


class OpenLane(Message, frozen=True):
    """Request for a lane to an executor of a model. An empty version means the newest. The reply is
    `LaneOpened` with the lane's descriptor, or `Failed`. After `Failed` the program sends its
    requests over HTTP."""

    model: str
    version: str = ""


class DescribeModel(Message, frozen=True):
    """Request for the inputs and outputs of a model. An empty version means the newest. The reply
    is `ModelDescribed`, or `Failed` with the text of HTTP's model metadata."""

    model: str
    version: str = ""


class ServerHello(Message, frozen=True):
    """Reply to `ClientHello`. `lanes`: the server understands `OpenLane`. `models`: the server
    understands `DescribeModel`."""

    version: int
    lanes: bool = False
    models: bool = False


class RegionInfo(Struct, frozen=True, array_like=True):
    """A registered region. `key` is empty for memory that a program passed through this socket."""

    name: str
    key: str
    offset: int
    byte_size: int


class Ok(Message, frozen=True):
    """Reply to a successful request. Every inference that begins from now on sees the change.
    `more`: further regions follow; ask again with the name of the last region in this reply."""

    regions: tuple[RegionInfo, ...] = ()
    more: bool = False


class Failed(Message, frozen=True):
    """Reply to a failed request. `code`: a value of `errors.Code`; `text`: for the client."""

    code: str
    text: str


class LaneOpened(Message, frozen=True):
    """Reply to `OpenLane`. One end of a socket pair of type SEQPACKET rides along.

    The messages on the lane are defined in `lane_messages`.

    Attributes:
        version: version of the model that answers on this lane.
        instance: instance whose executor has the other end of the lane.
        rerun: a request may be sent again if an executor died of it.
        timeout_ns: longest time, in nanoseconds, that the server would wait for an answer.
    """

    version: str
    instance: str
    rerun: bool
    timeout_ns: int


class DescribedTensor(Struct, frozen=True, array_like=True):
    """An input or output of a model. -1 in the shape is a variable dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelDescribed(Message, frozen=True):
    """Reply to `DescribeModel`. `decoupled`: a request has any number of answers."""

    version: str
    inputs: tuple[DescribedTensor, ...]
    outputs: tuple[DescribedTensor, ...]
    decoupled: bool


ToServer = ClientHello | RegisterMemfd | Unregister | ListRegions | OpenLane | DescribeModel
FromServer = ServerHello | Ok | Failed | LaneOpened | ModelDescribed

encode = msgspec.msgpack.Encoder().encode
decode_to_server = msgpack_decoder(ToServer)
decode_from_server = msgpack_decoder(FromServer)
