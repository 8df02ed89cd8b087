"""The response to a custom HTTP request, with what code written for Flask's response uses.

A response of Flask itself is taken as it is, and understood by what it has, not by what it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from shmserve.grps.protocol.custom_http import HttpAnswer

_TEXT = "text/plain"
_BINARY = "application/octet-stream"
_OWN = {"content-length", "transfer-encoding", "connection"}  # the frontend says these itself
Pairs = Iterable[tuple[str, str]]


class ResponseHeaders:
    """Header fields, which may repeat; their names have no case. Iterated as pairs."""

    def __init__(self, fields: Mapping[str, Any] | Pairs = ()) -> None:
        self._pairs: list[tuple[str, str]] = []
        self.extend(fields)

    def __getitem__(self, name: str) -> str:
        if name not in self:
            raise KeyError(name)
        return self.getlist(name)[0]

    def __setitem__(self, name: str, value: object) -> None:
        """Set the field; of several the first one stays where it is."""
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
        """Append a field, whether or not there is one of that name."""
        self._pairs.append((name, str(value)))

    def get(self, name: str, default: Any = None) -> Any:
        """The first value; `default` if there is none."""
        return next(iter(self.getlist(name)), default)

    def getlist(self, name: str) -> list[str]:
        """All values of that name."""
        return [value for n, value in self._pairs if n.lower() == name.lower()]

    def setdefault(self, name: str, value: object) -> str:
        """The first value; where there is none, this one from now on."""
        if name not in self:
            self.add(name, value)
        return self[name]

    def pop(self, name: str, default: Any = None) -> Any:
        """Take a field out; its first value, or `default`."""
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
    """A response that a model has set, and may change until it is sent. `response`: its body's
    parts; `headers`: all its fields."""

    def __init__(self, body: str | bytes, status: int, headers: Mapping[str, Any]) -> None:
        self.headers = ResponseHeaders(headers)
        self.headers.setdefault("Content-Type", _TEXT if isinstance(body, str) else _BINARY)
        self.status_code = status
        self.response: list[bytes] = []
        self.set_data(body)

    def set_data(self, value: str | bytes) -> None:
        """Replace the body; text goes out as UTF-8."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.response = [data]
        self.headers["Content-Length"] = len(data)

    def get_data(self, as_text: bool = False) -> Any:
        """The body, as bytes or text."""
        data = b"".join(p.encode() if isinstance(p, str) else p for p in self.response)
        return data.decode(errors="replace") if as_text else data

    data = property(get_data, set_data)

    @property
    def status_code(self) -> int:
        return self._status_code

    @status_code.setter
    def status_code(self, value: int) -> None:
        """Phrases as Flask has them."""
        self._status_code = value
        known = value in HTTPStatus._value2member_map_
        self._status = f"{value} {HTTPStatus(value).phrase.upper() if known else 'UNKNOWN'}"

    @property
    def status(self) -> str:
        """Number and phrase."""
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
        """The content type without its parameters, lower case."""
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
        """The body as JSON; None where it is not said to be, or with `silent` is none.

        Raises:
            ValueError: it is none.
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
        """Append a cookie; `attributes` as Flask names them (max_age, path, httponly, …)."""
        parts = [f"{key}={value}"]
        for name, given in ({"path": "/"} | attributes).items():
            shown = "-".join(word.capitalize() for word in name.split("_"))
            shown = {"Httponly": "HttpOnly", "Samesite": "SameSite"}.get(shown, shown)
            if given is True:
                parts.append(shown)
            elif given is not None and given is not False:
                parts.append(f"{shown}={given}")
        self.headers.add("Set-Cookie", "; ".join(parts))


def response_of(given: Any) -> Any:
    """What `get_http_response` gives for what `set_http_response` was given: a response.

    Raises:
        ValueError: it is nothing that can be sent.
    """
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
    """Head and body as they are sent, of a response as it is now.

    Raises:
        ValueError: it cannot be sent.
    """
    status = response.status_code
    if not isinstance(status, int) or not 100 <= int(status) <= 599:
        raise ValueError("the status of an HTTP response must be a number from 100 to 599")
    fields = [(str(name), str(value)) for name, value in response.headers.items()]
    for name, value in fields:
        if any(c in name + value for c in "\r\n\0"):
            raise ValueError("a header of an HTTP response has a line break")
    own = tuple((name, value) for name, value in fields if name.lower() not in _OWN)
    return HttpAnswer(int(status), own), bytes(response.get_data())
