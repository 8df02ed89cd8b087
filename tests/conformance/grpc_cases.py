"""Send recorded gRPC calls, by frames or with the `grpcio` client, to a server in the process.

A case of `cases/grpc_engine.jsonl` has `send`, the steps of a connection, or `client`, one call of
the `grpcio` client, and these answers:

- `grpcio`: the answer of the engine `grpcio`, before that engine was removed;
- `answer`: the answer of the server's own engine, only if it is another one, and then `why`.

Steps: ``["call", stream, fields, payload]`` (HEADERS, with DATA and END_STREAM unless the payload
is null; a field that is null is left out), ``["data", stream, payload, flags]``, ``["frame", kind,
flags, stream, hex]``, ``["pause", seconds]`` and ``["drain"]`` of the server. A payload is a list
of ``"infer"`` (a message for the model `identity`), ``"infer:MODEL:VALUE"`` and ``"hex:..."``. The
value ``"a*7000"`` of a field stands for 7,000 letters.

An answer has what came for each stream until the streams of `awaits` ended (default: all that were
called), GOAWAY frames, and whether the connection was closed. Left out is what means the same:
an empty `grpc-message`, `grpc-accept-encoding` without a message, the values of request ids.
"""

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from hpack import Decoder

from shmserve.dispatch.outcome import Outcome
from shmserve.frontends.http2 import encode_fields, frames
from shmserve.frontends.http2.grpc_framing import prefix
from tests import fake_models
from tests.fake_dispatch import FakeDispatcher, FakeRequest
from tests.grpc_client import Rig, request
from tests.raw_http2 import INFER, RawClient
from tests.running_server import WATCHDOG_S

CASES = Path(__file__).parent / "cases/grpc_engine.jsonl"
SETTINGS: dict[str, Any] = {"max_request_bytes": 1 << 16}
_FIELDS = {
    ":method": "POST", ":scheme": "http", ":path": INFER, ":authority": "localhost",
    "content-type": "application/grpc", "te": "trailers",
}  # fmt: skip


def _slow(given: FakeRequest) -> Outcome:
    """Answer after as many seconds as the first value says."""
    time.sleep(float(fake_models.array_of(given.inputs["INPUT0"])[0]))
    return fake_models.identity(given)


def server(**settings: Any) -> Rig:
    """A server with the conformance models and `slow`."""
    models = [*fake_models.models(), (fake_models.spec("slow", "FP32", (-1,)), _slow)]
    return Rig(FakeDispatcher(models), **(SETTINGS | settings))


def play(case: dict[str, Any], rig: Rig) -> dict[str, Any]:
    """Return the answer of a server to a case."""
    return _by_client(case["client"], rig) if "client" in case else _by_frames(case, rig)


def load() -> list[dict[str, Any]]:
    with CASES.open() as file:
        return [json.loads(line) for line in file]


def _long(value: str) -> str:
    letter, _, count = value.partition("*")
    return letter * int(count) if count else value


def _payload(parts: list[str]) -> bytes:
    data = b""
    for part in parts:
        kind, _, rest = part.partition(":")
        if kind == "hex":
            data += bytes.fromhex(rest)
            continue
        model, _, value = rest.partition(":")
        array = np.full(2, float(value or 1), np.float32)
        message = request(array, model or "identity").SerializeToString()
        data += prefix(len(message)) + message
    return data


def _by_client(given: dict[str, Any], rig: Rig) -> dict[str, Any]:
    array = np.full(given.get("values", 2), given.get("value", 1), np.float32)
    message = request(array, given.get("model", "identity"))
    options: dict[str, Any] = {"timeout": given.get("timeout_s", WATCHDOG_S)}
    if "gzip" in given:
        options["compression"] = grpc.Compression.Gzip
    if "metadata" in given:
        options["metadata"] = [(k, _long(v)) for k, v in given["metadata"]]
    call = rig.client.method("ModelInfer").future(message, **options)
    if "cancel_after_s" in given:
        threading.Timer(given["cancel_after_s"], call.cancel).start()
    heads = sorted(key for key, _ in call.initial_metadata())
    trailers = sorted(key for key, _ in call.trailing_metadata())
    # The client's own fields count, and the digits of its deadline vary.
    text = re.sub(r"have \d+ bytes", "have * bytes", call.details())
    return {"code": call.code().name, "text": text, "head": heads, "trailers": trailers}


def _by_frames(case: dict[str, Any], rig: Rig) -> dict[str, Any]:
    client = RawClient(rig.target)
    client.sock.settimeout(case.get("quiet_s", WATCHDOG_S))
    try:
        together = b""  # so that a server that closes early has received all frames
        for step in case["send"]:
            together += _bytes(step)
            if step[0] in ("pause", "drain"):
                client.sock.sendall(together)
                together = b""
                _between(step, rig)
        client.sock.sendall(together)
        called = {step[1] for step in case["send"] if step[0] == "call"}
        seen = Seen(client.decoder, bool(case.get("any_text")))
        return seen.until_ended(client, set(case.get("awaits", called)))
    finally:
        client.close()


def _between(step: list[Any], rig: Rig) -> None:
    """Run a step that does not send."""
    if step[0] == "pause":
        time.sleep(step[1])
    else:
        rig.threads.submit(rig.served.drain, WATCHDOG_S)


def _bytes(step: list[Any]) -> bytes:
    """The frames of a step."""
    kind, *given = step
    if kind == "call":
        number, fields, payload = given
        changed = {k: _long(v) for k, v in (_FIELDS | fields).items() if v is not None}
        block = encode_fields(tuple(changed.items()))
        head = _frame(frames.HEADERS, frames.END_HEADERS, number, block)
        return head if payload is None else head + _bytes(["data", number, payload, 1])
    if kind == "data":
        number, payload, flags = given
        return _frame(frames.DATA, flags, number, _payload(payload))
    if kind == "frame":
        frame, flags, number, payload = given
        return _frame(frame, flags, number, bytes.fromhex(payload))
    return b""


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return frames.frame_head(len(payload), kind, flags, number) + payload


class Seen:
    """Frames that a server has sent on one connection. `any_text`: ignore status texts."""

    def __init__(self, decoder: Decoder, any_text: bool) -> None:
        self._decoder = decoder
        self._any_text = any_text
        self._streams: dict[int, dict[str, Any]] = {}
        self._told: dict[str, Any] = {}

    def until_ended(self, client: RawClient, awaits: set[int]) -> dict[str, Any]:
        """Return all received data, until these streams or the connection have ended."""
        try:
            for kind, flags, number, payload in client.frames():
                self._take(kind, flags, number, payload)
                if awaits and all("end" in self._of(stream) for stream in awaits):
                    break
            else:
                self._told["connection"] = "closed"
        except ConnectionResetError:
            self._told["connection"] = "closed"
        except TimeoutError:
            self._told["connection"] = "quiet"
        return {str(n): stream for n, stream in sorted(self._streams.items())} | self._told

    def _of(self, number: int) -> dict[str, Any]:
        return self._streams.setdefault(number, {})

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            stream = self._of(number)
            stream["trailers" if "head" in stream else "head"] = self._fields(payload)
        elif kind == frames.DATA:
            self._of(number)["bytes"] = self._of(number).get("bytes", 0) + len(payload)
        elif kind == frames.RST_STREAM:
            self._of(number).setdefault("end", f"RST_STREAM {int.from_bytes(payload)}")
        elif kind == frames.GOAWAY:
            code, text = int.from_bytes(payload[4:8]), payload[8:].decode()
            self._told.setdefault("goaway", []).append([code, text])
        if kind in (frames.HEADERS, frames.DATA) and flags & frames.END_STREAM:
            self._of(number)["end"] = "END_STREAM"

    def _fields(self, block: bytes) -> dict[str, str]:
        fields = {str(name): str(value) for name, value in self._decoder.decode(block)}
        if "grpc-accept-encoding" in fields:
            fields["grpc-accept-encoding"] = fields["grpc-accept-encoding"].replace(" ", "")
        if "grpc-status" in fields:
            fields.pop("grpc-accept-encoding", "")
        if "x-request-id" in fields:
            fields["x-request-id"] = "*"
        if fields.get("grpc-message") == "":
            del fields["grpc-message"]
        if self._any_text:
            fields = {k: v for k, v in fields.items() if k not in ("grpc-message", "x-request-id")}
        return dict(sorted(fields.items()))
