"""gRPC's messages and fields."""

from pathlib import Path

import pytest

from shmserve.frontends.http2 import grpc_framing, grpc_metadata


def read(reader: grpc_framing.MessageReader, data: bytes, step: int) -> list[tuple[bool, bytes]]:
    found: list[grpc_framing.GrpcMessage] = []
    for start in range(0, len(data), step):
        found += reader.feed(memoryview(data[start : start + step]))
    reader.finish()
    return [(m.compressed, bytes(m.data)) for m in found]


def test_messages_are_read_whatever_the_frames() -> None:
    messages = [(False, b""), (True, b"abc"), (False, bytes(range(250))), (False, b"")]
    data = b"".join(grpc_framing.prefix(len(body), flag) + body for flag, body in messages)
    for step in (1, 2, 4, 5, 6, 9, 100, len(data)):
        assert read(grpc_framing.MessageReader(250), data, step) == messages


def test_a_message_that_came_whole_is_a_view_of_it() -> None:
    def no_memory(size: int) -> grpc_framing.WholeMessage:
        raise AssertionError(size)

    data = memoryview(grpc_framing.prefix(3) + b"abc" + grpc_framing.prefix(2) + b"de")
    first, second = grpc_framing.MessageReader(10, no_memory).feed(data)  # type: ignore[arg-type]
    assert first.data.obj is data.obj
    assert bytes(second.data) == b"de"


def test_the_rest_of_a_message_is_received_into_its_place() -> None:
    reader = grpc_framing.MessageReader(20)
    assert reader.space() is None
    assert reader.feed(memoryview(grpc_framing.prefix(12) + b"0123")) == []
    space = reader.space()
    assert len(space) == 8
    space[:5] = b"45678"
    assert reader.filled(5) is None
    with pytest.raises(ValueError, match="4 bytes"):
        reader.filled(4)
    (message,) = reader.feed(memoryview(b"9ab" + grpc_framing.prefix(0)))[:1]
    assert bytes(message.data) == b"0123456789ab"
    assert reader.space() is None
    with pytest.raises(ValueError, match="no space"):
        reader.filled(1)


def test_a_size_is_checked_before_memory_is_asked_for() -> None:
    asked: list[int] = []

    def receiver(size: int) -> grpc_framing.WholeMessage:
        asked.append(size)
        return grpc_framing.WholeMessage(size)

    reader = grpc_framing.MessageReader(100, receiver)  # type: ignore[arg-type]
    words = r"larger than max \(101 vs. 100\)"
    with pytest.raises(grpc_framing.FramingFailed, match=words) as failed:
        reader.feed(memoryview(grpc_framing.prefix(101)))
    assert failed.value.status == grpc_framing.RESOURCE_EXHAUSTED
    assert asked == []


def test_invalid_flags_and_ends_within_messages() -> None:
    with pytest.raises(grpc_framing.FramingFailed, match="flag of a message is 2") as failed:
        grpc_framing.MessageReader(100).feed(memoryview(b"\2\0\0\0\0"))
    assert failed.value.status == grpc_framing.INTERNAL
    for cut in (1, 5, 7):
        reader = grpc_framing.MessageReader(100)
        reader.feed(memoryview((grpc_framing.prefix(3) + b"abc")[:cut]))
        with pytest.raises(grpc_framing.FramingFailed, match="within a message"):
            reader.finish()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("1H", 3600.0), ("2M", 120.0), ("3S", 3.0), ("250m", 0.25), ("10u", 1e-5), ("99999999n", 0.1)],
)
def test_timeouts(value: str, seconds: float) -> None:
    assert grpc_metadata.parse_timeout(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "1", "m", "123456789S", "-1S", "1.5S", "1 S", "1s", "1Sx"])
def test_what_is_no_timeout(value: str) -> None:
    with pytest.raises(ValueError, match="grpc-timeout is"):
        grpc_metadata.parse_timeout(value)


def test_status_messages() -> None:
    assert grpc_metadata.encode_message("it is 100% \xe9\n~") == "it is 100%25 %C3%A9%0A~"
    assert grpc_metadata.encode_message("\ud800") == "?"
    # RFC 9113: no blank at a value's end
    assert grpc_metadata.encode_message("  a b  ") == "%20 a b %20"
    assert grpc_metadata.encode_message(" ") == "%20"


def test_binary_values() -> None:
    for value in (b"", b"a", b"ab", b"abc", bytes(range(256))):
        assert grpc_metadata.decode_binary(grpc_metadata.encode_binary(value)) == [value]
        assert "=" not in grpc_metadata.encode_binary(value)
    assert grpc_metadata.decode_binary("YQ==, YWI") == [b"a", b"ab"]
    for wrong in ("a", "Y Q", "\u00e9", "?"):
        with pytest.raises(ValueError):
            grpc_metadata.decode_binary(wrong)


def test_what_is_announced_takes_no_memory_before_it_comes() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])  # pages

    before = resident()
    message = grpc_framing.WholeMessage(1 << 28)
    assert resident() - before < 1 << 12
    message.space()[:1] = b"x"
    assert len(message.space()) == 1 << 28
