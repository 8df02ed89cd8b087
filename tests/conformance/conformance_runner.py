"""Send recorded HTTP requests to a running server and judge the answers.

A case of `cases/http.jsonl` has a `request` (method, path, headers and body, or the raw bytes of
the connection) and `accept`, a list of expectations, at least one of which must be met. Levels:
`answer` (status and content), `error` (one of the statuses and a well-formed error body, with
`text` if given), `alive` (any orderly answer).
"""

import base64
import http.client
import json
import re
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

CASES = Path(__file__).parent / "cases"
_TIMEOUT_S = 20.0
_LEAKS = re.compile(
    r"Traceback|File \"|line \d+, in |\.py\b|0x[0-9a-f]{6,}| object at |/(?:usr|home|root|tmp|dev)/"
)


class Answer:
    """Response; None instead if the server closed the connection without a response."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        coding = headers.get("content-encoding", "identity")
        self.body = body if coding == "identity" else zlib.decompress(body, 47)

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")


def load_cases(name: str = "http") -> list[dict[str, Any]]:
    with (CASES / f"{name}.jsonl").open() as file:
        return [json.loads(line) for line in file]


def content(body: dict[str, str] | None) -> bytes | None:
    """The bytes of a body of a case."""
    if body is None:
        return None
    return body["text"].encode() if "text" in body else base64.b64decode(body["base64"])


def send(case: dict[str, Any], host: str, port: int) -> Answer | None:
    """Send a case's request; return the answer, or None if the server closed the connection."""
    request = case["request"]
    if "raw" in request:
        return _send_raw(content(request["raw"]) or b"", host, port)
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        body = content(request.get("body"))
        connection.putrequest(request["method"], request["path"], skip_accept_encoding=True)
        if body is not None or request["method"] == "POST":
            connection.putheader("Content-Length", str(len(body or b"")))
        for name, value in request.get("headers", {}).items():
            connection.putheader(name, value)
        connection.endheaders(body)
        return _answer(connection.getresponse())
    finally:
        connection.close()


def _send_raw(data: bytes, host: str, port: int) -> Answer | None:
    data = data.replace(b"{HOST}", f"{host}:{port}".encode())
    with socket.create_connection((host, port), timeout=_TIMEOUT_S) as sock:
        sock.sendall(data)
        response = http.client.HTTPResponse(sock)
        try:
            response.begin()
            return _answer(response)
        except (http.client.BadStatusLine, ConnectionError):
            return None
        finally:
            response.close()


def _answer(response: http.client.HTTPResponse) -> Answer:
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, response.read())


def judge(
    case: dict[str, Any], answer: Answer | None, after: Callable[[Any], list[str]] | None = None
) -> list[str]:
    """Return the problems of an answer; an empty list if one expectation is met.

    `after` returns the problems of the server's state against an expectation's `after`.
    """
    problems: list[str] = []
    for expected in case["accept"]:
        found = list(_problems(case, expected, answer))
        if not found and after is not None:
            found = after(expected.get("after", []))
        if not found:
            return []
        problems += found
    return problems


def _problems(
    case: dict[str, Any], expected: dict[str, Any], answer: Answer | None
) -> Iterator[str]:
    if answer is None:
        if not expected.get("allow_close"):
            yield "the connection was closed without an answer"
        return
    level = expected["level"]
    if level == "answer":
        if answer.status != expected["status"]:
            yield f"status {answer.status} instead of {expected['status']}: {answer.body[:150]!r}"
        else:
            yield from _content_problems(expected, answer)
        return
    statuses = expected.get("statuses")
    if statuses and answer.status not in statuses:
        yield f"status {answer.status}, not one of {statuses}: {answer.body[:150]!r}"
    elif answer.status >= 400 and not (expected.get("body") == "none" and not answer.body):
        yield from _error_problems(case, answer)
        if "text" in expected and expected["text"] != json.loads(answer.body)["error"]:
            yield f"the error says {answer.body!r}"


def _error_problems(case: dict[str, Any], answer: Answer) -> Iterator[str]:
    try:
        document = json.loads(answer.body)
        text = document["error"]
    except (ValueError, KeyError, TypeError):
        yield f"no error object: {answer.body[:100]!r}"
        return
    if not isinstance(text, str) or not text.strip():
        yield "the error has no text"
    elif (leak := _LEAKS.search(text)) and leak.group() not in str(case["request"]):
        yield f"the error shows {leak.group()!r}"
    if answer.content_type != "application/json":
        yield f"the error has the content type {answer.content_type!r}"


def _content_problems(expected: dict[str, Any], answer: Answer) -> Iterator[str]:
    kind = expected["compare"]
    if kind == "status":
        return
    if "encoding" in expected and answer.headers.get("content-encoding") != expected["encoding"]:
        yield f"Content-Encoding {answer.headers.get('content-encoding')!r}"
    if kind == "infer":
        yield from _inference_problems(expected, answer)
        return
    if answer.content_type != "application/json":
        yield f"content type {answer.content_type!r}"
    got, want = json.loads(answer.body), expected["json"]
    if kind == "shm_status":
        if sorted(got, key=str) != sorted(want, key=str):
            yield f"regions {got}"
        return
    if kind == "server_metadata":
        if not (got["name"] and got["version"] and isinstance(got["extensions"], list)):
            yield f"server metadata {got}"
        return
    keys = ["name", "versions"] if kind == "model_metadata" else ["name", "max_batch_size"]
    lists = ["inputs", "outputs"] if kind == "model_metadata" else ["input", "output"]
    yield from (f"{k}: {got.get(k)!r} != {want[k]!r}" for k in keys if got.get(k) != want[k])
    for key in lists:
        for tensor, other in zip(want[key], got[key], strict=True):
            wrong = {k: other.get(k) for k in tensor if _plain(other.get(k)) != _plain(tensor[k])}
            if wrong:
                yield f"{key} {tensor['name']}: {wrong}"


def _plain(value: Any) -> Any:
    """64-bit integers may be written as strings in a model's configuration."""
    return [int(item) for item in value] if isinstance(value, list) else value


def _inference_problems(expected: dict[str, Any], answer: Answer) -> Iterator[str]:
    told = answer.headers.get("inference-header-content-length")
    size = len(answer.body) if told is None else int(told)
    head, tail = json.loads(answer.body[:size]), answer.body[size:]
    want, binary = expected["json"], expected.get("binary", {})
    for key in ("id", "model_name", "model_version"):
        if head.get(key) != want.get(key):
            yield f"{key} is {head.get(key)!r} instead of {want.get(key)!r}"
    outputs = {output["name"]: output for output in head["outputs"]}
    if outputs.keys() != {output["name"] for output in want["outputs"]}:
        yield f"outputs {sorted(outputs)}"
        return
    parts = {}
    for name, output in outputs.items():
        length = output.get("parameters", {}).get("binary_data_size", 0)
        parts[name], tail = tail[:length], tail[length:]
    if tail:
        yield f"{len(tail)} bytes too many"
    for output in want["outputs"]:
        got = outputs[output["name"]]
        for key in ("datatype", "shape"):
            if got[key] != output[key]:
                yield f"{key} of {output['name']} is {got[key]} instead of {output[key]}"
        if output["name"] in binary:
            if parts[output["name"]] != base64.b64decode(binary[output["name"]]):
                yield f"bytes of {output['name']} are {parts[output['name']]!r}"
        elif not _same(output["datatype"], got.get("data"), output.get("data")):
            yield f"data of {output['name']} are {got.get('data')} instead of {output.get('data')}"
    is_binary = any(parts.values())
    if answer.content_type != ("application/octet-stream" if is_binary else "application/json"):
        yield f"content type {answer.content_type!r}"


def _same(datatype: str, got: Any, want: Any) -> bool:
    if datatype not in ("FP32", "FP64") or not isinstance(got, list):
        return bool(got == want)
    kind = np.float32 if datatype == "FP32" else np.float64
    with np.errstate(over="ignore"):
        mine, theirs = np.array(got, float).astype(kind), np.array(want, float).astype(kind)
    return np.array_equal(mine, theirs, equal_nan=True)
