"""Messages of local programs and of our own processes."""

from typing import Any

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.core.registry import Region, Snapshot
from shmserve.errors import InvalidArgument, NotFound, Unimplemented, UnreadableMessage
from shmserve.executor.peers.lane_gate import LaneGate
from shmserve.grps.protocol import custom_http
from shmserve.protocol.control import client_messages, lane_messages, messages
from shmserve.protocol.control.data_messages import Answer, Cancel, Release
from shmserve.protocol.control.link_messages import Hello, Stats
from shmserve.protocol.control.message import Message
from shmserve.tensor import bytes_codec
from tests import fake_models
from tests.fuzz.http_targets import VALUES

LIMITS = Settings()
_DECODERS = (
    client_messages.decode_to_server,
    client_messages.decode_from_server,
    lane_messages.decode_from_lane,
    messages.decode_to_executor,
    messages.decode_to_frontend,
    messages.decode_to_coordinator,
    messages.decode_from_coordinator,
    custom_http.decode_request,
    custom_http.decode_answer,
)
_TENSOR = client_messages.DescribedTensor("IN", "FP32", (-1, 3))
_SAMPLES: tuple[tuple[int, Any], ...] = (
    (0, client_messages.ClientHello(1)),
    (0, client_messages.RegisterMemfd("name", 1 << 40, 3)),
    (0, client_messages.OpenLane("model", "1")),
    (0, client_messages.DescribeModel("model")),
    (1, client_messages.Failed("INTERNAL", "text")),
    (1, client_messages.ModelDescribed("1", (_TENSOR,), (_TENSOR,), decoupled=True)),
    (2, lane_messages.LaneAnswer(1)),
    (3, Cancel(7)),
    (3, Release(((1, 2), (3, 4)))),
    (4, Answer(7)),
    (5, Hello(1, "http", "http-1-aaaa", 1)),
    (5, Stats(3, {"rows": [{"a": 1.5, "b": None, "c": b"x"}]})),
    (7, custom_http.RequestHead("GET", "/", (("a", "b"),), (("c", "d"),), "::1")),
)


def control(data: bytes) -> None:
    """A message, read by the decoder that the first byte chooses, is written and read again."""
    decode = _DECODERS[data[0] % len(_DECODERS)] if data else _DECODERS[0]
    try:
        message = decode(memoryview(data)[1:])
    except UnreadableMessage:
        return
    once = messages.encode(message)
    assert messages.encode(decode(once)) == once


def control_seeds() -> list[bytes]:
    return [bytes([number]) + messages.encode(message) for number, message in _SAMPLES]


_CALLER = Caller(uid=7)
_REGION = Region("r", 3, "", 0, 4096, 7)
_SNAPSHOT = Snapshot("e", 1, regions={"7/r": _REGION})
_GATES = [
    LaneGate(spec, LIMITS, lambda: _SNAPSHOT, 0)
    for spec, _ in fake_models.models()
    if spec.name in ("identity", "identity_bytes", "batched", "add_sub", "decoupled")
]


def lane(data: bytes) -> None:
    """A packet of a lane, as the executor of one of five models receives it."""
    try:
        message: Message = lane_messages.decode_to_lane(memoryview(data)[1:])
    except UnreadableMessage:
        return
    if isinstance(message, lane_messages.LaneRequest):
        try:
            execute, _ = _GATES[data[0] % len(_GATES)].admit(_CALLER, message, 0)
        except (InvalidArgument, NotFound, Unimplemented):
            return
        assert messages.decode_to_executor(messages.encode(execute)) == execute


def lane_seeds() -> list[bytes]:
    tensor, output = lane_messages.LaneTensor, lane_messages.LaneOutput
    window = lane_messages.LaneWindow("r", 0, 16)
    texts = bytes_codec.encode([b"a", b"bc"])
    halves = tuple(tensor(f"INPUT{n}", "INT32", (16,), bytes(64)) for n in (0, 1))
    made = [
        (tensor("INPUT0", "FP32", (4,), VALUES.tobytes()),),
        (tensor("INPUT0", "FP32", (4,), window),),
        (tensor("INPUT0", "BYTES", (2,), texts),),
        (tensor("INPUT0", "FP32", (1, 4), VALUES.tobytes()),),
        halves,
    ]
    asked = (output("OUTPUT0"),)
    number = {gate.spec.name: n for n, gate in enumerate(_GATES)}
    models = ("identity", "identity", "identity_bytes", "batched", "add_sub")
    packets = [
        bytes([number[model]])
        + lane_messages.encode(lane_messages.LaneRequest(1, given, asked, "i", {"priority": 1}))
        for model, given in zip(models, made, strict=True)
    ]
    one = (tensor("INPUT0", "INT32", (1,), bytes(4)),)
    stream = lane_messages.LaneRequest(1, one, asked, credit=16)
    return [
        *packets,
        bytes([number["decoupled"]]) + lane_messages.encode(stream),
        b"\0" + lane_messages.encode(lane_messages.LaneCancel(3)),
        b"\0" + lane_messages.encode(lane_messages.LaneCredit(3, 1)),
    ]
