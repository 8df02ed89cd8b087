"""gRPC's fields: timeouts, status messages and binary values."""

from __future__ import annotations

import base64
import binascii
import re
from urllib.parse import quote_from_bytes

_timeout = re.compile(r"([0-9]{1,8})([HMSmun])").fullmatch
_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "S": 1.0, "M": 60.0, "H": 3600.0}
_end_blanks = re.compile(r"^ | \Z").sub
# Printable ASCII goes as it is, but for the percent sign
_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if code != 0x25)


def parse_timeout(value: str) -> float:
    """Seconds of a ``grpc-timeout``.

    Raises:
        ValueError: it is none.
    """
    match = _timeout(value)
    if match is None:
        raise ValueError(f"grpc-timeout is {value!r}, not up to 8 digits and one of HMSmun")
    return int(match[1]) * _UNITS[match[2]]


def encode_message(message: str) -> str:
    """Encode a ``grpc-message``: UTF-8, percent-encoded where it is not printable ASCII.

    A blank at either end is encoded, too: strict clients refuse it in a field (RFC 9113, 8.2.1).
    """
    text = quote_from_bytes(message.encode(errors="replace"), safe=_PLAIN)
    return _end_blanks("%20", text)


def encode_binary(value: bytes) -> str:
    """The value of a field whose name ends with ``-bin``: base64 without padding."""
    return base64.b64encode(value).decode("ascii").rstrip("=")


def decode_binary(value: str) -> list[bytes]:
    """Values of a ``-bin`` field, several if there are commas, padded or not.

    Raises:
        ValueError: one of them is not base64.
    """
    try:
        return [_decode_one(part.strip()) for part in value.split(",")]
    except binascii.Error:
        raise ValueError("a binary metadata value is not base64") from None


def _decode_one(value: str) -> bytes:
    value = value.rstrip("=")
    return base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
