"""Messages of a lane: a local program's own channel to one executor.

The peer is any local program, so these are all that a stranger can say: tensors lie in regions
of its own, by the names it registered them with, or, if they have less than `INLINE_BYTES`, in
the message itself (the one place where tensor bytes go through a socket). One message is
one packet, MessagePack, an array that begins with the type's name. Fields are only ever
appended and then have defaults.

Needs nothing but msgspec: the Python client imports it.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from shmserve.protocol.control.message import Message
from shmserve.protocol.decoding import msgpack_decoder

Parameter = bool | int | float | str
INLINE_BYTES = 4096  # a tensor of so many bytes has to lie in a region
INLINE_TOTAL = 64 * 1024  # bytes of all outputs in one answer
READ_AHEAD = 16  # answers of one lane that may be under way: no more requests, no more credit


class LaneWindow(Struct, frozen=True, array_like=True, gc=False):
    """`nbytes` bytes from `offset` of the region that the caller registered as `region`."""

    region: str
    offset: int
    nbytes: int


class LaneTensor(Struct, frozen=True, array_like=True, gc=False):
    """A tensor and its bytes. None (outputs only): they are where the request wanted them.

    Elements are laid out as in binary HTTP bodies: little-endian, row-major; BYTES elements each
    behind their length in four bytes.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    at: LaneWindow | bytes | None


class LaneOutput(Struct, frozen=True, array_like=True, gc=False):
    """An output that is wanted; `at` None: in the answer. A stream's window has one answer at a
    time: the next one is written there when `LaneCredit` has come for it."""

    name: str
    at: LaneWindow | None = None


class LaneRequest(Message, frozen=True):
    """Run the lane's model once.

    Attributes:
        number: the caller's; no two requests that are under way have the same.
        outputs: what is wanted, in this order; none: everything.
        timeout_ns: how long the answer is of use, from when the executor reads this; 0, and at
            most: the server's `request_timeout_s`. Of a stream as a whole: 0, and at most, the
            server's `stream_timeout_s`.
        credit: how many answers of a decoupled model may be under way, 1 where an output has a
            window. Other models have one answer, whatever it says.
    """

    number: int
    inputs: tuple[LaneTensor, ...]
    outputs: tuple[LaneOutput, ...] = ()
    id: str = ""
    parameters: dict[str, Parameter] = {}  # noqa: RUF012 (msgspec makes a new one each time)
    timeout_ns: int = 0
    credit: int = 0


class LaneCredit(Message, frozen=True):
    """So many answers of a stream were taken: as many more may come. Of more than came, the lane
    ends; of a stream that is over, nothing happens."""

    number: int
    answers: int


class LaneCancel(Message, frozen=True):
    """The answer is not wanted any more. One comes nevertheless, of whatever kind."""

    number: int


class LaneReceipt(Struct, frozen=True, array_like=True, gc=False):
    """What the request has cost: nanoseconds by stage, bytes that were copied, and how many of
    these went through the socket."""

    queue_ns: int = 0
    compute_ns: int = 0
    copied_in: int = 0
    copied_batch: int = 0
    copied_out: int = 0
    copied_device: int = 0
    inline: int = 0


class LaneAnswer(Message, frozen=True):
    """The answer to one request, or one of a stream's, which ends with its `final` one. With a
    `status` other than 200 it has no outputs, and windows may have been written to or not.

    Attributes:
        status: as over HTTP.
        code: a value of `errors.Code`; empty: it succeeded.
        error: written for the client.
        receipt: of a stream, what this answer has cost.
        final: none follows. Without outputs, parameters and error, it only ends a stream.
        moved: nobody has the request, which other lanes take: this one is about to end.
    """

    number: int
    outputs: tuple[LaneTensor, ...] = ()
    status: int = 200
    code: str = ""
    error: str = ""
    parameters: dict[str, Parameter] = {}  # noqa: RUF012 (as above)
    receipt: LaneReceipt = LaneReceipt()
    final: bool = True
    moved: bool = False


ToLane = LaneRequest | LaneCancel | LaneCredit

encode = msgspec.msgpack.Encoder().encode
decode_to_lane = msgpack_decoder(ToLane)
decode_from_lane = msgpack_decoder(LaneAnswer)
