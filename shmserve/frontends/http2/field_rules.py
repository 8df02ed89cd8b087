"""Rules for well-formed requests and trailers (RFC 9113 section 8)."""

import re

import msgspec

from shmserve.frontends.http2.frames import ErrorCode, StreamFailed

Fields = tuple[tuple[str, str], ...]

_name = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_bad_value = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]").search
_BLANKS = b" \t"
_digits = re.compile(r"[0-9]{1,19}").fullmatch
_PSEUDO = frozenset((b":method", b":scheme", b":authority", b":path"))
_CONNECTION_SPECIFIC = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)


class RequestFields(msgspec.Struct, frozen=True):
    """Checked fields of a request.

    Args:
        authority: of ``:authority``, else of ``host``, else empty.
        fields: all regular fields in order, names in lower case, values as Latin-1.
        content_length: bytes of DATA announced by the client; -1 if not announced.
        excess: reason to refuse the request for its size, as text for the client; empty if the
            size is allowed.
    """

    method: str
    scheme: str
    authority: str
    path: str
    fields: Fields
    content_length: int = -1
    excess: str = ""

    def value(self, name: str) -> str | None:
        """Return the value of the first field with a name; None if there is no such field."""
        for field_name, value in self.fields:
            if field_name == name:
                return value
        return None


def malformed(reason: str) -> StreamFailed:
    return StreamFailed(ErrorCode.PROTOCOL_ERROR, reason)


def request_head(decoded: list[tuple[bytes, bytes]]) -> RequestFields:
    """Return the request of a decoded header block. Raise StreamFailed if it is malformed."""
    pseudo: dict[bytes, str] = {}
    regular = 0
    for regular, (name, value) in enumerate(decoded):  # noqa: B007
        if name[:1] != b":":
            break
        if name not in _PSEUDO or name in pseudo:
            raise malformed("an unknown or repeated pseudo-header field")
        # A blank at either end stays an error here. No client adds blanks, and a host or path with
        # blanks is a different host or path from the one meant.
        if _bad_value(value) or value != value.strip(_BLANKS):
            raise malformed("a pseudo-header field has an invalid value")
        pseudo[name] = value.decode("latin-1")
    else:
        regular = len(decoded)
    fields = regular_fields(decoded[regular:])
    method, scheme = pseudo.get(b":method", ""), pseudo.get(b":scheme", "")
    path = pseudo.get(b":path", "")
    authority = _authority(pseudo.get(b":authority"), fields)
    if method == "CONNECT":
        if not authority or b":scheme" in pseudo or b":path" in pseudo:
            raise malformed("CONNECT has an authority, and no scheme or path")
    elif not method or not scheme or not (path[:1] == "/" or (method, path) == ("OPTIONS", "*")):
        raise malformed("method, scheme or path is missing or invalid")
    return RequestFields(method, scheme, authority, path, fields, _content_length(fields))


def regular_fields(decoded: list[tuple[bytes, bytes]]) -> Fields:
    """Check and return fields other than pseudo-header fields, such as a whole trailer section.

    Blanks and tabs at either end of a value are removed.

    Raise StreamFailed if a field is malformed, or belongs to HTTP/1 connections only.
    """
    fields = []
    for name, value in decoded:
        if not _name(name):
            raise malformed("a field's name is invalid, or a pseudo-header field comes late")
        if _bad_value(value):
            raise malformed("a field has an invalid value")
        # RFC 9113 section 8.2.1 calls a value malformed if it begins or ends with a blank. But
        # gRPC's clients send metadata as given by applications, and gRPC's servers accept such
        # values. HTTP/1.1 strips the blanks, and so does this function.
        value = value.strip(_BLANKS)
        if name in _CONNECTION_SPECIFIC or (name == b"te" and value != b"trailers"):
            raise malformed("a connection-specific field")
        fields.append((name.decode("ascii"), value.decode("latin-1")))
    return tuple(fields)


def _authority(authority: str | None, fields: Fields) -> str:
    hosts = {value for name, value in fields if name == "host"}
    if authority is not None:
        hosts.add(authority)
    if len(hosts) > 1:
        raise malformed("authority and host differ")
    return hosts.pop() if hosts else ""


def _content_length(fields: Fields) -> int:
    values = {value for name, value in fields if name == "content-length"}
    if not values:
        return -1
    value = values.pop()
    if values or not _digits(value):
        raise malformed("an invalid content-length")
    return int(value)
