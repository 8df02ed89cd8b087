"""Transport gRPC of `shmserve measure`, over HTTP/2."""

import urllib.parse
from collections.abc import Generator, Mapping
from typing import Any

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.cli.measuring.door import WAIT_S, Answered, FailedRequest
from shmserve.cli.measuring.http2_client import Http2Client
from shmserve.cli.measuring.model_inputs import encoded
from shmserve.cli.measuring.wire_door import Steps, WireDoor
from shmserve.client.wire.credentials import Credentials
from shmserve.errors import ConfigError
from shmserve.frontends.http2 import encode_fields
from shmserve.frontends.http2.grpc_framing import PREFIX_BYTES, prefix
from shmserve.protocol.decoding import json_decoder

_SERVICE = "/inference.GRPCInferenceService"
_RECEIPT = "shmserve-receipt"
_decode = json_decoder(dict)
_STREAMED_ANSWER = b"\x12"  # first byte of a ModelStreamInferResponse without error_message
_JOINED = 1 << 16
_STATUSES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)


class GrpcDoor(WireDoor):
    """Caller over gRPC. Each request to a decoupled model is a ModelStreamInfer call."""

    def __init__(
        self,
        target: str,
        model: str,
        inputs: Mapping[str, Any],
        credentials: Credentials,
        encrypted: bool = False,
        streamed: bool = False,
    ) -> None:
        """Encode the request, for a server with TLS if `encrypted`. Raise ConfigError as
        `WireDoor`, or if an array is no tensor."""
        scheme = "https" if encrypted else "http"
        url = target if target.startswith("unix:") else f"{scheme}://{target}"
        super().__init__(url, credentials if encrypted else Credentials(key=""), "h2", "--grpc")
        if self._address.prefix:
            raise ConfigError(f"--grpc: '{target}' is no HOST:PORT and no unix:PATH")
        request = pb.ModelInferRequest(model_name=model)
        for tensor in encoded(inputs):
            request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            request.raw_input_contents.append(tensor.tobytes())
        message = request.SerializeToString()
        self._body = memoryview(prefix(len(message)) + message)
        fields = {
            ":method": "POST",
            ":scheme": scheme,
            ":path": f"{_SERVICE}/{'ModelStreamInfer' if streamed else 'ModelInfer'}",
            ":authority": self._address.authority,
            "te": "trailers",
            "content-type": "application/grpc",
            "grpc-timeout": f"{WAIT_S:.0f}S",
            **({"authorization": f"Bearer {credentials.key}"} if credentials.key else {}),
        }
        self._block = encode_fields(tuple(fields.items()))
        self._block_for_receipt = encode_fields((*fields.items(), (_RECEIPT, "1")))
        self._streamed = streamed
        self._http2 = Http2Client()

    def _open(self) -> None:
        super()._open()
        self._http2 = Http2Client()

    def _exchange(self, answered: Answered, receipt: bool) -> Steps:
        http2, rest = self._http2, self._body
        ready = [http2.outgoing, http2.begin(self._block_for_receipt if receipt else self._block)]
        http2.outgoing = b""
        while rest and not http2.ended:
            frame, size = http2.data_frame(rest)
            ready.append(frame)
            rest = rest[size:]
            if not size or not rest or size > _JOINED:
                yield from self._send(b"".join(ready))
                ready.clear()
            if not size:
                yield from self._take(answered)
        while not http2.ended:
            yield from self._take(answered)
        if rest:
            http2.cancel()
        if http2.is_closing:
            self.close()
        self._check(http2, answered)
        text = http2.fields.get(_RECEIPT) if receipt else None
        return dict(_decode(text.encode())) if text else {}

    def _take(self, answered: Answered) -> Generator[int, None, None]:
        """Wait for bytes of the server, and take them."""
        http2 = self._http2
        http2.feed((yield from self._receive()))
        if self._streamed:
            self._take_messages(answered)
        if http2.outgoing:
            data, http2.outgoing = http2.outgoing, b""
            yield from self._send(data)

    def _take_messages(self, answered: Answered) -> None:
        """Take whole messages of a stream. Raise FailedRequest for an error among the answers: such
        an answer has no status."""
        content = self._http2.content
        while len(content) >= PREFIX_BYTES:
            end = PREFIX_BYTES + int.from_bytes(content[1:PREFIX_BYTES])
            if len(content) < end:
                return
            message = bytes(content[PREFIX_BYTES:end])
            del content[:end]
            if not message.startswith(_STREAMED_ANSWER):
                error = pb.ModelStreamInferResponse.FromString(message).error_message
                if error:
                    self._http2.cancel()
                    raise FailedRequest("", error)
            answered(len(message))

    def _check(self, http2: Http2Client, answered: Answered) -> None:
        """Report the answer of a unary call. Raise FailedRequest if the call failed."""
        fields, size = http2.fields, len(http2.content) - PREFIX_BYTES
        status = fields.get("grpc-status", "")
        if http2.failure:
            raise FailedRequest("", http2.failure)
        if not status.isdecimal():
            code = fields.get(":status", "")
            raise FailedRequest(code, f"the answer has HTTP status {code} and no gRPC status")
        if status != "0":
            name = _STATUSES[int(status)] if int(status) < len(_STATUSES) else status
            raise FailedRequest(name, urllib.parse.unquote(fields.get("grpc-message", "")))
        if not self._streamed:
            if size < 0 or size != int.from_bytes(http2.content[1:PREFIX_BYTES]):
                raise FailedRequest("", "the answer is not one whole message")
            answered(size)

    def _take_idle(self, data: bytes) -> None:
        if not data:
            self.close()
            return
        self._http2.feed(data)
        if self._http2.outgoing and self.socket is not None:
            self.socket.sendall(self._http2.outgoing)
            self._http2.outgoing = b""
        if self._http2.is_closing:
            self.close()
