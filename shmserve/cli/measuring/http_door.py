"""Transport HTTP of `shmserve measure`: requests and answers with binary tensors."""

import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from shmserve.cli.measuring.door import Answered, FailedRequest, Receipt
from shmserve.cli.measuring.model_inputs import encoded
from shmserve.cli.measuring.wire_door import Steps, WireDoor
from shmserve.client.result_reader import HEADER_LENGTH
from shmserve.client.wire.credentials import Credentials
from shmserve.client.wire.http_transport import Reply
from shmserve.protocol.decoding import json_decoder

_RECEIPT = "shmserve-receipt"
_BLANK = b"\r\n\r\n"
_MOST_HEAD = 1 << 18
_FIELD = re.compile(r"\r\n([^:\r\n]+):[ \t]*([^\r\n]*)")
_decode = json_decoder(dict)


class AnswerHead(Struct, frozen=True):
    """Head of an answer. `length`: bytes of the body. `ends`: no further answer will come."""

    status: int
    fields: dict[str, str]
    length: int
    ends: bool

    @classmethod
    def from_bytes(cls, head: bytes) -> "AnswerHead":
        """Parse a head. Raise ConnectionError if the head tells no status or no length."""
        text = head.decode("latin-1")
        fields = {name.lower(): value for name, value in _FIELD.findall(text)}
        status, length = text[9:12], fields.get("content-length", "")
        if not (text.startswith("HTTP/1.1 ") and status.isdecimal() and length.isdecimal()):
            raise ConnectionError("the answer is not HTTP/1.1, or has no Content-Length")
        ends = fields.get("connection", "").lower() == "close"
        return cls(int(status), fields, int(length), ends)

    @property
    def tensor_bytes(self) -> int:
        return self.length - int(self.fields.get(HEADER_LENGTH.lower(), self.length))


class HttpDoor(WireDoor):
    """Caller over HTTP/1.1. The status and the length of each answer are checked; tensors are not
    decoded."""

    def __init__(
        self, url: str, model: str, inputs: Mapping[str, Any], credentials: Credentials
    ) -> None:
        """Encode the request. Raise ConfigError as `WireDoor`, or if an array is no tensor."""
        super().__init__(url, credentials, "http/1.1")
        self._keyed = bool(credentials.key)
        path = f"{self._address.prefix}/v2/models/{urllib.parse.quote(model, safe='')}/infer"
        tensors = encoded(inputs)
        described = [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": tensor.shape,
                "parameters": {"binary_data_size": tensor.nbytes},
            }
            for tensor in tensors
        ]
        document = {"inputs": described, "parameters": {"binary_data_output": True}}
        described_bytes = msgspec.json.encode(document)
        body = b"".join([described_bytes, *(tensor.data() for tensor in tensors)])
        fields = {
            "Host": self._address.authority,
            "Content-Length": str(len(body)),
            HEADER_LENGTH: str(len(described_bytes)),
            **({"Authorization": f"Bearer {credentials.key}"} if self._keyed else {}),
        }
        self._request = _head(path, fields) + body
        self._request_for_receipt = _head(path, {**fields, _RECEIPT: "1"}) + body
        self._head_bytes = b""  # of the latest answer: most answers of a second have equal heads
        self._head: AnswerHead | None = None

    def _exchange(self, answered: Answered, receipt: bool) -> Steps:
        yield from self._send(self._request_for_receipt if receipt else self._request)
        data = yield from self._receive()
        while (end := data.find(_BLANK)) < 0:
            if len(data) > _MOST_HEAD:
                raise ConnectionError("the answer's head is too long")
            data += yield from self._receive()
        if self._head is None or data[:end] != self._head_bytes:
            self._head, self._head_bytes = AnswerHead.from_bytes(data[:end]), data[:end]
        head = self._head
        body = data[end + len(_BLANK) :]
        left = head.length - len(body)
        while left > 0:
            data = yield from self._receive()
            left -= len(data)
            body = body if head.status == 200 else body + data
        if left:
            raise ConnectionError("the answer is longer than its Content-Length")
        if head.ends:
            self.close()
        if head.status != 200:
            content = np.frombuffer(body, np.uint8)
            reply = Reply(head.status, head.fields, content, None, self._keyed)
            raise FailedRequest(str(head.status), reply.error)
        answered(head.tensor_bytes)
        return _receipt(head) if receipt else {}

    def _take_idle(self, data: bytes) -> None:
        self.close()


def _head(path: str, fields: Mapping[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _receipt(head: AnswerHead) -> Receipt:
    text = head.fields.get(_RECEIPT)
    return dict(_decode(text.encode())) if text else {}
