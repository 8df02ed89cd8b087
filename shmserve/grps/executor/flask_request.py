"""A custom HTTP request as a model sees it: it has what code written for Flask's request uses."""

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
    """Query parameters or form fields: the first value of each; `getlist` has all."""

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
        """The first value, as `type` makes it; `default` if there is none or it cannot."""
        value = self._first.get(name)
        if value is None or type is None:
            return default if value is None else value
        try:
            return type(value)
        except (ValueError, TypeError):
            return default

    def getlist(self, name: str) -> list[str]:
        """All values of that name."""
        return [value for key, value in self._pairs if key == name]

    def to_dict(self) -> dict[str, str]:
        return dict(self._first)


class Headers(Values):
    """Header fields; their names have no case."""

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
    """One request. `data`: the body."""

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
        """The content type without its parameters, lower case."""
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
        """The fields of an urlencoded body; others are not taken apart."""
        text = self.data.decode(errors="replace") if self.mimetype == _FORM else ""
        return Values(parse_qsl(text, keep_blank_values=True))

    @property
    def stream(self) -> io.BytesIO:
        return io.BytesIO(self.data)

    def get_data(self, cache: bool = True, as_text: bool = False, **_: Any) -> Any:
        """The body, as bytes or text."""
        return self.data.decode(errors="replace") if as_text else self.data

    def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> Any:
        """The body as JSON.

        Raises:
            InvalidArgument: it is none, or is not said to be; with `silent` None instead.
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
    """The request to a model's own HTTP path; None: it came another way."""
    head, body = inputs.get(custom_http.HEAD), inputs.get(custom_http.BODY)
    if head is None:
        return None
    data = b"" if body is None else bytes(body.buffer)
    return HttpRequest(custom_http.decode_request(head.buffer), data)
