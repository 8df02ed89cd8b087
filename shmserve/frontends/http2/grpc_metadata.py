"""Fields of gRPC: timeouts, status messages and binary values."""

import base64
import binascii
import re
from urllib.parse import quote_from_bytes

_timeout = re.compile(r"([0-9]{1,8})([HMSmun])").fullmatch
_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "S": 1.0, "M": 60.0, "H": 3600.0}
_end_blanks = re.compile(r"^ | \Z").sub
# Printable ASCII except the percent sign is not encoded
_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if code != 0x25)


def parse_timeout(value: str) -> float:
    """Return the seconds of a ``grpc-timeout``. Raise ValueError if the value is no timeout."""
    match = _timeout(value)
    if match is None:
        raise ValueError(f"grpc-timeout is {value!r}, not up to 8 digits and one of HMSmun")
    return int(match[1]) * _UNITS[match[2]]


def encode_message(message: str) -> str:
    """Return a ``grpc-message``: UTF-8, with bytes other than printable ASCII percent-encoded. A
    blank at either end is encoded, too: strict clients refuse blanks there (RFC 9113 section
    8.2.1)."""
    text = quote_from_bytes(message.encode(errors="replace"), safe=_PLAIN)
    return _end_blanks("%20", text)


def encode_binary(value: bytes) -> str:
    """Return the value of a ``-bin`` field: base64 without padding."""
    return base64.b64encode(value).decode("ascii").rstrip("=")


def decode_binary(value: str) -> list[bytes]:
    """Return the values of a ``-bin`` field: base64, padded or not, several if separated by commas.
    Raise ValueError if a value is not base64."""
    try:
        return [_decode_one(part.strip()) for part in value.split(",")]
    except binascii.Error:
        raise ValueError("a binary metadata value is not base64") from None


def _decode_one(value: str) -> bytes:
    value = value.rstrip("=")
    return base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
