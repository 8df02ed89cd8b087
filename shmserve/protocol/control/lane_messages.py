"""Messages of a lane: a local program's own channel to one executor.

The peer is any local program, and a stranger can send nothing but these messages. Tensors lie in
the program's own registered regions, referred to by name. Tensors smaller than `INLINE_BYTES` may
travel in the message itself; no other control-plane message carries tensor bytes. A message is one
packet: a MessagePack array that begins with the type's name. Fields are only ever appended, with
defaults.

Needs nothing but msgspec: the Python client imports this module.
"""

import msgspec
from msgspec import Struct

from shmserve.protocol.control.message import Message
from shmserve.protocol.decoding import msgpack_decoder

Parameter = bool | int | float | str
INLINE_BYTES = 4096  # tensors of this size and larger must lie in a region
INLINE_TOTAL = 64 * 1024  # bytes of all inline outputs in one answer
READ_AHEAD = 16  # answers of one lane that may be under way; bounds its requests and its credit


class LaneWindow(Struct, frozen=True, array_like=True, gc=False):
    """`nbytes` bytes from `offset` of the caller's region with the name `region`."""

    region: str
    offset: int
    nbytes: int


class LaneTensor(Struct, frozen=True, array_like=True, gc=False):
    """A tensor with its bytes. For outputs, None means that the bytes lie in the requested window.
    Elements are laid out as in binary HTTP bodies: little-endian, row-major. Each BYTES element
    follows its length in four bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    at: LaneWindow | bytes | None


class LaneOutput(Struct, frozen=True, array_like=True, gc=False):
    """A requested output. `at` is its window, or None to receive the bytes in the answer. A stream
    writes one answer at a time into a window: the next answer is written after `LaneCredit` for the
    present answer."""

    name: str
    at: LaneWindow | None = None


class LaneRequest(Message, frozen=True):
    """Request to run the lane's model once.

    Attributes:
        number: number chosen by the caller, unique among the requests under way.
        outputs: requested outputs, in the order of the answer; empty: all outputs.
        timeout_ns: longest useful wait for an answer, in nanoseconds, from when the executor reads
            the request. 0 means the server's limit, which is also the maximum:
            `request_timeout_s`, or `stream_timeout_s` for a stream as a whole.
        credit: answers of a decoupled model that may be under way; 1 if an output has a window.
            Ignored for other models, which give a single answer.
    """

    number: int
    inputs: tuple[LaneTensor, ...]
    outputs: tuple[LaneOutput, ...] = ()
    id: str = ""
    parameters: dict[str, Parameter] = {}  # noqa: RUF012 (msgspec makes a new one each time)
    timeout_ns: int = 0
    credit: int = 0


class LaneCredit(Message, frozen=True):
    """Credit for a stream: the caller has taken `answers` answers, so as many more may come. Credit
    for more answers than were sent ends the lane. Credit for a finished stream has no effect."""

    number: int
    answers: int


class LaneCancel(Message, frozen=True):
    """Order to cancel a request. The lane still sends a final answer, with or without an error."""

    number: int


class LaneReceipt(Struct, frozen=True, array_like=True, gc=False):
    """Cost of a request: nanoseconds per stage, copied bytes, bytes sent through the socket."""

    queue_ns: int = 0
    compute_ns: int = 0
    copied_in: int = 0
    copied_batch: int = 0
    copied_out: int = 0
    copied_device: int = 0
    inline: int = 0


class LaneAnswer(Message, frozen=True):
    """Answer to a request. A stream has several answers and ends with the `final` answer.

    With a `status` other than 200 an answer has no outputs, and windows may or may not have been
    written.

    Attributes:
        status: status code as over HTTP.
        code: value of `errors.Code`; empty on success.
        error: error message for the client.
        receipt: cost of the request; in a stream, cost of this answer.
        final: True in the last answer. Without outputs, parameters and error, the answer only ends
            a stream.
        moved: the executor did not take the request, because the lane is about to end. Another
            lane takes the request.
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
