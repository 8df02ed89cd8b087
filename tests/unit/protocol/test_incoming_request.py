"""Requests taken apart while they come."""

import os
from pathlib import Path

import pytest

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.config import Settings
from shmserve.protocol import bounds
from shmserve.protocol.protobuf.incoming_request import LARGE_BYTES, IncomingRequest
from shmserve.protocol.protobuf.infer_wire import WireInferRequest, parse_request

LIMITS = Settings()
LARGE = bytes(range(256)) * (LARGE_BYTES // 256)


class Memory:
    """Memory for tensors, and the number of requests for memory."""

    def __init__(self, size: int) -> None:
        self.view = memoryview(bytearray(size))


def message(*raw: bytes, **fields: object) -> bytes:
    made = pb.ModelInferRequest(model_name="m", id="7", **fields)
    for number in range(len(raw)):
        made.inputs.add(name=f"i{number}", datatype="UINT8", shape=[len(raw[number])])
    made.outputs.add(name="out")
    made.raw_input_contents.extend(raw)
    return made.SerializeToString()


def take(data: bytes, steps: list[int], received: bool, limits: Settings = LIMITS,
         later: bool = False) -> IncomingRequest:  # fmt: skip
    """Feed `data` in pieces of the sizes `steps`. `received`: receive into the request's memory
    where offered. `later`: memory becomes available only on demand."""
    incoming = IncomingRequest(len(data), limits, (lambda _: None) if later else Memory)  # type: ignore[arg-type]
    position, turn = 0, 0
    while position < len(data):
        if incoming.wanted and turn % 2:  # else more comes meanwhile
            incoming.grant(Memory(incoming.wanted))  # type: ignore[arg-type]
        piece = data[position : position + steps[turn % len(steps)]]
        turn += 1
        space = incoming.space() if received else None
        if space is not None:
            piece = piece[: len(space)]
            space[: len(piece)] = piece
            incoming.filled(len(piece))
        else:
            incoming.feed(memoryview(piece))
        position += len(piece)
    while incoming.wanted:
        incoming.grant(Memory(incoming.wanted))  # type: ignore[arg-type]
    assert incoming.left == 0
    return incoming


def parsed(incoming: IncomingRequest) -> WireInferRequest:
    return parse_request(incoming.rest(), incoming.raw)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize("steps", [[1], [7], [1000, 1, 63], [1 << 16], [1 << 20]])
def test_it_reads_the_same_however_it_comes(steps: list[int], received: bool, later: bool) -> None:
    data = message(LARGE, b"small", b"", LARGE + b"x")
    whole, apart = parse_request(data), parsed(take(data, steps, received, later=later))
    assert (apart.model_name, apart.id, apart.outputs) == ("m", "7", whole.outputs)
    assert apart.raw_count == whole.raw_count == 4
    for one, other in zip(whole.inputs, apart.inputs, strict=True):
        assert (one.name, one.shape) == (other.name, other.shape)
        assert one.raw is not None
        assert other.raw is not None
        assert bytes(one.raw) == bytes(other.raw)
    assert [source.place is not None for source in apart.inputs] == [True, False, False, True]


def test_what_is_received_in_its_place_is_not_copied() -> None:
    data = message(LARGE, LARGE)
    head = data.index(LARGE[:64])
    incoming = take(data, [head, 1 << 20], True)
    assert incoming.copied < 64  # what was received along with the second one's length
    assert take(data, [len(data)], False).copied == 2 * len(LARGE)


def test_without_a_place_it_is_bytes() -> None:
    data = message(LARGE)
    incoming = IncomingRequest(len(data), LIMITS, lambda _: None)
    incoming.feed(memoryview(data)[:100])
    assert incoming.wanted == len(LARGE)
    assert incoming.space() is None
    incoming.feed(memoryview(data)[100:])
    incoming.grant(None)
    (source,) = parsed(incoming).inputs
    assert source.place is None
    assert source.raw is not None
    assert bytes(source.raw) == LARGE


@pytest.mark.parametrize(
    "data",
    [
        message() + b"\x7b" + message(LARGE) + b"\x7c",  # in an unknown group
        message() + b"\x2a\x80\x80\x08" + bytes(1 << 17),  # a large field of another kind
        message(LARGE)[:-1],
        message() + b"\x3a\xff\xff\xff\xff\xff\x01" + LARGE,
        message() + b"\x10\x01" * 2000 + message(LARGE),
    ],
)
@pytest.mark.parametrize("received", [False, True])
def test_what_cannot_be_told_apart_is_left_as_it_is(data: bytes, received: bool) -> None:
    incoming = take(data, [1 << 16], received)
    assert incoming.raw == []
    assert bytes(incoming.rest()) == data


def test_limits_hold_before_a_place_is_asked_for(monkeypatch) -> None:
    asked: list[int] = []

    def reserve(size: int) -> Memory:
        asked.append(size)
        return Memory(size)

    for limits, inputs in ((Settings(max_tensor_bytes=len(LARGE) - 1), 2), (LIMITS, 1)):
        monkeypatch.setattr(bounds, "MAX_INPUTS", inputs)
        data = message(b"", LARGE)
        incoming = IncomingRequest(len(data), limits, reserve)  # type: ignore[arg-type]
        incoming.feed(memoryview(data))
        assert asked == []
        monkeypatch.undo()
        assert parse_request(incoming.rest(), incoming.raw).raw_count == 2


@pytest.mark.parametrize("later", [False, True])
def test_what_is_spared_comes_again(later: bool) -> None:
    data = message(b"small", LARGE)
    start = data.index(LARGE[:64])
    reserve = (lambda _: None) if later else Memory
    incoming = IncomingRequest(len(data), LIMITS, reserve, sparing=True)  # type: ignore[arg-type]
    incoming.feed(memoryview(data)[: start + 100])
    assert incoming.stop_sparing() == 100
    assert incoming.left == len(data) - start
    if later:
        incoming.grant(Memory(incoming.wanted))  # type: ignore[arg-type]
    incoming.feed(memoryview(data)[start : start + 1])
    assert incoming.stop_sparing() == 0
    incoming.feed(memoryview(data)[start + 1 :])
    assert incoming.left == 0
    sources = parsed(incoming).inputs
    assert [bytes(source.raw or b"") for source in sources] == [b"small", LARGE]


def test_what_is_announced_takes_no_memory_until_it_comes() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    size = 256 << 20
    head = b"\x3a" + encoded(size)
    before = resident()
    incoming = IncomingRequest(len(head) + size, LIMITS, lambda _: None)
    incoming.feed(memoryview(head))
    incoming.grant(None)
    assert len(incoming.raw[0]) == size  # type: ignore[arg-type]
    assert resident() - before < size // 4


def encoded(value: int) -> bytes:
    """As a varint."""
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
