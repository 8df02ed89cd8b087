"""Responses to custom HTTP requests, with the attributes of Flask's response that code uses.

A response object of Flask is taken unchanged, and recognised by its attributes, not by its class.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from shmserve.grps.protocol.custom_http import HttpAnswer

_TEXT = "text/plain"
_BINARY = "application/octet-stream"
_OWN = {"content-length", "transfer-encoding", "connection"}  # set by the frontend
Pairs = Iterable[tuple[str, str]]


class ResponseHeaders:
    """Header fields, which may repeat, with case-insensitive names. Iterated as pairs."""

    def __init__(self, fields: Mapping[str, Any] | Pairs = ()) -> None:
        self._pairs: list[tuple[str, str]] = []
        self.extend(fields)

    def __getitem__(self, name: str) -> str:
        if name not in self:
            raise KeyError(name)
        return self.getlist(name)[0]

    def __setitem__(self, name: str, value: object) -> None:
        """Set the field: the first of this name is replaced, the others are removed."""
        pair = (name, str(value))
        at = next((i for i, (n, _) in enumerate(self._pairs) if n.lower() == name.lower()), None)
        if at is None:
            self._pairs.append(pair)
            return
        rest = [(n, v) for n, v in self._pairs[at + 1 :] if n.lower() != name.lower()]
        self._pairs[at:] = [pair, *rest]

    def __delitem__(self, name: str) -> None:
        self._pairs = [(n, v) for n, v in self._pairs if n.lower() != name.lower()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and any(n.lower() == name.lower() for n, _ in self._pairs)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __repr__(self) -> str:
        return f"ResponseHeaders({self._pairs!r})"

    set = __setitem__
    remove = __delitem__

    def add(self, name: str, value: object) -> None:
        """Append a field, even if a field of this name exists."""
        self._pairs.append((name, str(value)))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the first value, or `default` without a value."""
        return next(iter(self.getlist(name)), default)

    def getlist(self, name: str) -> list[str]:
        """Return all values of this name."""
        return [value for n, value in self._pairs if n.lower() == name.lower()]

    def setdefault(self, name: str, value: object) -> str:
        """Return the first value. Without a value, add the given value first."""
        if name not in self:
            self.add(name, value)
        return self[name]

    def pop(self, name: str, default: Any = None) -> Any:
        """Remove a field. Return its first value, or `default`."""
        value = self.get(name, default)
        del self[name]
        return value

    def extend(self, fields: Mapping[str, Any] | Pairs) -> None:
        """Append fields."""
        for name, value in fields.items() if isinstance(fields, Mapping) else fields:
            self.add(str(name), value)

    def update(self, fields: Mapping[str, Any] | Pairs) -> None:
        """Set fields."""
        for name, value in fields.items() if isinstance(fields, Mapping) else fields:
            self[str(name)] = value

    def items(self) -> list[tuple[str, str]]:
        return list(self._pairs)

    def keys(self) -> list[str]:
        return [name for name, _ in self._pairs]

    def values(self) -> list[str]:
        return [value for _, value in self._pairs]


class CustomResponse:
    """A response that a model has set, and may change until it is sent.

    Attributes:
        response: parts of the body.
        headers: all header fields.
    """

    def __init__(self, body: str | bytes, status: int, headers: Mapping[str, Any]) -> None:
        self.headers = ResponseHeaders(headers)
        self.headers.setdefault("Content-Type", _TEXT if isinstance(body, str) else _BINARY)
        self.status_code = status
        self.response: list[bytes] = []
        self.set_data(body)

    def set_data(self, value: str | bytes) -> None:
        """Replace the body. Text is sent as UTF-8."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.response = [data]
        self.headers["Content-Length"] = len(data)

    def get_data(self, as_text: bool = False) -> Any:
        """Return the body, as bytes or text."""
        data = b"".join(p.encode() if isinstance(p, str) else p for p in self.response)
        return data.decode(errors="replace") if as_text else data

    data = property(get_data, set_data)

    @property
    def status_code(self) -> int:
        return self._status_code

    @status_code.setter
    def status_code(self, value: int) -> None:
        """Set the status code, with the reason phrase that Flask uses."""
        self._status_code = value
        is_standard = value in HTTPStatus._value2member_map_
        self._status = f"{value} {HTTPStatus(value).phrase.upper() if is_standard else 'UNKNOWN'}"

    @property
    def status(self) -> str:
        """Return number and reason phrase."""
        return self._status

    @status.setter
    def status(self, value: str | int) -> None:
        if isinstance(value, int):
            self.status_code = int(value)
        else:
            self._status_code, self._status = int(value.split()[0]), value

    @property
    def content_type(self) -> str | None:
        kind: str | None = self.headers.get("Content-Type")
        return kind

    @content_type.setter
    def content_type(self, value: str) -> None:
        self.headers["Content-Type"] = value

    @property
    def mimetype(self) -> str:
        """Return the content type without parameters, in lower case."""
        return (self.content_type or "").partition(";")[0].strip().lower()

    @mimetype.setter
    def mimetype(self, value: str) -> None:
        is_text = value.startswith("text/") and "charset" not in value
        self.content_type = f"{value}; charset=utf-8" if is_text else value

    @property
    def content_length(self) -> int:
        return len(self.get_data())

    @property
    def is_json(self) -> bool:
        kind = self.mimetype
        return kind == "application/json" or (kind.startswith("application/") and "+json" in kind)

    @property
    def json(self) -> Any:
        return self.get_json()

    def get_json(self, force: bool = False, silent: bool = False) -> Any:
        """Return the body as JSON. Return None if the content type is not JSON, or if `silent` is
        set and the body is not JSON.

        Raises:
            ValueError: the body is not JSON.
        """
        if not (force or self.is_json):
            return None
        try:
            return json.loads(self.get_data())
        except ValueError:
            if silent:
                return None
            raise

    def set_cookie(self, key: str, value: str = "", **attributes: Any) -> None:
        """Append a cookie. `attributes` are named as in Flask (max_age, path, httponly, …)."""
        parts = [f"{key}={value}"]
        for name, attribute in ({"path": "/"} | attributes).items():
            shown = "-".join(word.capitalize() for word in name.split("_"))
            shown = {"Httponly": "HttpOnly", "Samesite": "SameSite"}.get(shown, shown)
            if attribute is True:
                parts.append(shown)
            elif attribute is not None and attribute is not False:
                parts.append(f"{shown}={attribute}")
        self.headers.add("Set-Cookie", "; ".join(parts))


def response_of(given: Any) -> Any:
    """Return the response object for an argument of `set_http_response`."""
    if isinstance(given, str | bytes | bytearray | memoryview):
        return CustomResponse(given if isinstance(given, str) else bytes(given), 200, {})
    if isinstance(given, tuple) and len(given) == 3:
        body, status, headers = given
        if not isinstance(body, str | bytes):
            raise ValueError("the body of an HTTP response must be str or bytes")
        if not isinstance(headers, Mapping):
            raise ValueError("the headers of an HTTP response must be a dict")
        response = CustomResponse(body, status, headers)
        answer_of(response)
        return response
    if hasattr(given, "get_data") and hasattr(given, "status_code"):
        return given
    raise ValueError(
        "an HTTP response must be str, bytes, (body, status, headers) or a Flask response"
    )


def answer_of(response: Any) -> tuple[HttpAnswer, bytes]:
    """Return head and body of a response in its current state.

    Raises:
        ValueError: the response cannot be sent.
    """
    status = response.status_code
    if not isinstance(status, int) or not 100 <= int(status) <= 599:
        raise ValueError("the status of an HTTP response must be a number from 100 to 599")
    fields = [(str(name), str(value)) for name, value in response.headers.items()]
    for name, value in fields:
        if any(c in name + value for c in "\r\n\0"):
            raise ValueError("a header of an HTTP response has a line break")
    sent_fields = tuple((name, value) for name, value in fields if name.lower() not in _OWN)
    return HttpAnswer(int(status), sent_fields), bytes(response.get_data())
