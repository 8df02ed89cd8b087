"""Custom HTTP requests as a model sees them, with the commonly used attributes of Flask."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from shmserve.errors import InvalidArgument, UnreadableMessage
from shmserve.executor.backend import InputTensor
from shmserve.grps.protocol import custom_http
from shmserve.grps.protocol.custom_http import RequestHead
from shmserve.protocol.decoding import json_decoder

_from_json = json_decoder()
_FORM = "application/x-www-form-urlencoded"


class Values(Mapping[str, str]):
    """Query parameters or form fields: the first value of each name. `getlist` returns all."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._pairs = tuple(pairs)
        self._first: dict[str, str] = {}
        for name, value in self._pairs:
            self._first.setdefault(name, value)

    def __getitem__(self, name: str) -> str:
        return self._first[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)

    def get(self, name: str, default: Any = None, type: Any = None) -> Any:
        """Return the first value, converted by `type`. Return `default` if there is no value or
        the conversion fails."""
        value = self._first.get(name)
        if value is None or type is None:
            return default if value is None else value
        try:
            return type(value)
        except (ValueError, TypeError):
            return default

    def getlist(self, name: str) -> list[str]:
        """Return all values of this name."""
        return [value for key, value in self._pairs if key == name]

    def to_dict(self) -> dict[str, str]:
        return dict(self._first)


class Headers(Values):
    """Header fields, with case-insensitive names."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        super().__init__((name.lower(), value) for name, value in pairs)

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._first

    def get(self, name: str, default: Any = None, type: Any = None) -> Any:
        return super().get(name.lower(), default, type)

    def getlist(self, name: str) -> list[str]:
        return super().getlist(name.lower())


class HttpRequest:
    """A custom HTTP request. `data` is the body."""

    def __init__(self, head: RequestHead, body: bytes) -> None:
        self.method = head.method
        self.path = head.path
        self.args = Values(head.query)
        self.headers = Headers(head.headers)
        self.remote_addr = head.remote
        self.data = body
        self._query = head.query
        self._json: Any = None
        self._parsed = False

    @property
    def content_type(self) -> str | None:
        value: str | None = self.headers.get("Content-Type")
        return value

    @property
    def mimetype(self) -> str:
        """Return the content type without parameters, in lower case."""
        return (self.content_type or "").partition(";")[0].strip().lower()

    @property
    def content_length(self) -> int:
        return len(self.data)

    @property
    def query_string(self) -> bytes:
        return urlencode(self._query).encode()

    @property
    def full_path(self) -> str:
        return f"{self.path}?{self.query_string.decode()}"

    @property
    def is_json(self) -> bool:
        kind = self.mimetype
        return kind == "application/json" or (kind.startswith("application/") and "+json" in kind)

    @property
    def json(self) -> Any:
        return self.get_json()

    @property
    def form(self) -> Values:
        """Return the fields of an urlencoded body. Other bodies have no fields."""
        text = self.data.decode(errors="replace") if self.mimetype == _FORM else ""
        return Values(parse_qsl(text, keep_blank_values=True))

    @property
    def stream(self) -> io.BytesIO:
        return io.BytesIO(self.data)

    def get_data(self, cache: bool = True, as_text: bool = False, **_: Any) -> Any:
        """Return the body, as bytes or text."""
        return self.data.decode(errors="replace") if as_text else self.data

    def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> Any:
        """Return the body as JSON.

        Raises:
            InvalidArgument: the body or the content type is not JSON. With `silent`, None is
                returned instead.
        """
        if not self._parsed:
            wrong = "" if force or self.is_json else "content type is not application/json"
            try:
                self._json = None if wrong else _from_json(self.data)
            except UnreadableMessage as ex:
                wrong = f"body is not JSON: {ex}"
            if wrong and not silent:
                raise InvalidArgument(f"the request's {wrong}")
            self._parsed = not wrong
        return self._json


def request_of(inputs: Mapping[str, InputTensor]) -> HttpRequest | None:
    """Return the request to a model's own HTTP path, or None if the request came another way."""
    head, body = inputs.get(custom_http.HEAD), inputs.get(custom_http.BODY)
    if head is None:
        return None
    data = b"" if body is None else bytes(body.buffer)
    return HttpRequest(custom_http.decode_request(head.buffer), data)
