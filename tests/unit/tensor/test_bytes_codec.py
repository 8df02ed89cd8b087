"""BYTES framing: round trips, and refusal of any other bytes."""

import pytest

from shmserve.errors import InvalidArgument
from shmserve.tensor import bytes_codec


def test_framing_is_length_and_bytes() -> None:
    assert bytes_codec.encode([b"hi", "é", b""]) == (
        b"\x02\0\0\0hi" + b"\x02\0\0\0\xc3\xa9" + b"\0\0\0\0"
    )


def test_size_and_write_agree_with_encode() -> None:
    elements = bytes_codec.to_bytes(["a", b"bcd", ""])
    buffer = bytearray(bytes_codec.encoded_size(elements))
    assert bytes_codec.write(elements, memoryview(buffer)) == len(buffer)
    assert bytes(buffer) == bytes_codec.encode(elements)


def test_write_refuses_a_view_that_is_too_small() -> None:
    with pytest.raises(ValueError):
        bytes_codec.write([b"abc"], memoryview(bytearray(5)))


@pytest.mark.parametrize("elements", [[], [b""], [b"a", b"", b"\0\xff" * 100]])
def test_decode_returns_what_was_encoded(elements: list[bytes]) -> None:
    data = bytes_codec.encode(elements)
    assert bytes_codec.decode(data, len(elements), "IN", "m") == elements
    bytes_codec.check(memoryview(data), len(elements), "IN", "m")


@pytest.mark.parametrize(
    ("data", "count", "message"),
    [
        (b"", 1, "expected 1 string elements for inference input 'IN' for model 'm', got 0"),
        (b"\x01\0\0\0a", 2, "expected 2 string elements"),
        (
            b"\x01\0\0\0a\x01\0\0\0b",
            1,
            "unexpected number of string elements 2 for inference input 'IN' for model 'm', "
            "expecting 1",
        ),
        (b"\0\0\0\0", 0, "unexpected number of string elements 1"),
        (b"\x01\0\0\0a\x01\0", 2, "incomplete string length indicator"),
        (b"\x05\0\0\0ab", 1, "expecting string of length 5 but only 2 bytes available"),
        (b"\xff\xff\xff\xffab", 1, "expecting string of length 4294967295"),
    ],
)
def test_wrong_framing_is_named(data: bytes, count: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        bytes_codec.decode(data, count, "IN", "m")
    with pytest.raises(InvalidArgument, match=message):
        bytes_codec.check(data, count, "IN", "m")


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="string element 1 is not valid Unicode"):
        bytes_codec.to_bytes(["a", "\ud800"])
