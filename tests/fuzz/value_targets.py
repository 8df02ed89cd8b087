"""Requests of models on plain values: forms in the frontend, bodies in the executor."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from pydantic import BaseModel

from shmserve.errors import InvalidArgument
from shmserve.executor.backends.hinted.json_hints import JsonCall
from shmserve.executor.backends.hinted.signatures import signature_of
from shmserve.frontends.http.routes.inference.form_parts import form_parts
from shmserve.protocol.oip.json_calls import encode_form
from shmserve.tensor.dtypes import object_array

_TYPE = "multipart/form-data; boundary=limit"
_HEAD = b'--limit\r\nContent-Disposition: form-data; name="%b"; filename="f"\r\n%b\r\n%b\r\n'


class Box(msgspec.Struct):
    left: int
    within: "Box | None" = None


class Checked(BaseModel):
    size: int


def predict(
    image: bytes, box: Box, checked: Checked, scale: float = 1, more: list[bytes] | None = None
) -> Iterator[str]:
    yield ""


_CALL = JsonCall(signature_of(predict), "m", "")


class _Request:
    def __init__(self, body: bytes) -> None:
        self._body = body

    def input(self, _: str) -> np.ndarray[Any, Any]:
        return object_array([self._body], (1,))


def form(data: bytes) -> None:
    """The body of a form."""
    try:
        parts = form_parts(data, _TYPE)
    except InvalidArgument:
        return
    assert sum(len(content) for _, content in parts) <= len(data)
    plain_values(encode_form(parts))


def form_seeds() -> list[bytes]:
    contents = {b"image": b"\x00\r\n--limi", b"box": b'{"left": 3}', b"scale": b"2.5"}
    parts = [_HEAD % (name, b"Content-Type: text/plain\r\n", c) for name, c in contents.items()]
    return [b"".join(parts) + b"--limit--\r\n", parts[0] + b"--limit--"]


def plain_values(data: bytes) -> None:
    """The body of a request, as the executor gets the body."""
    try:
        _CALL.arguments(_Request(data))
    except InvalidArgument:
        return


def plain_values_seeds() -> list[bytes]:
    box = {"left": 1, "within": {"left": 2}}
    body = {"image": "AAAA", "box": box, "checked": {"size": 1}, "scale": 2, "more": ["AA=="]}
    parts = [("image", b"\xff"), ("box", b'{"left": 1}'), ("checked", b'{"size": 1}')]
    return [msgspec.json.encode(body), encode_form([*parts, ("more", b"a"), ("more", b"b")])]
