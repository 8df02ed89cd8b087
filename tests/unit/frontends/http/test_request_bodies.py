"""Wrong, chunked and compressed bodies, and compressed answers."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from typing import Any

import pytest

from shmserve.config import Settings
from tests.unit.http_client import (
    BINARY,
    INFER,
    VALUES,
    Body,
    Client,
    PlainBody,
    as_binary,
    as_json,
    error_of,
)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        ("", "Unable to parse Inference-Header-Content-Length"),
        ("x", "Unable to parse"),
        ("0x10", "Unable to parse"),
        ("1.0", "Unable to parse"),
        ("106,3", "Unable to parse"),
        ("\u0663", "Unable to parse"),
        ("-1", r"should be in range \(0, "),
        ("100000", r"should be in range \(0, "),
        ("9" * 30, r"should be in range \(0, "),
        ("5", "failed to parse the request JSON"),
    ],
)
def test_header_lengths_that_make_no_sense(client: Client, length: str, message: str) -> None:
    headers = {"Inference-Header-Content-Length": length}
    body = json.dumps(BINARY).encode() + VALUES
    answer = client.ask("POST", INFER, body, headers)
    assert re.search(message, error_of(answer, 400))


@pytest.mark.parametrize(
    ("document", "tail", "message"),
    [
        (BINARY, VALUES[:12], "expecting 4 additional bytes for model 'identity'"),
        (BINARY, VALUES + b"xxxx", "unexpected additional input data for model 'identity'"),
        ({"inputs": [as_json([1])]}, b"x", "unexpected additional input data"),
        ({"inputs": [as_binary(16, [8])]}, VALUES, "Expected 32, got 16"),
    ],
)
def test_sizes_that_disagree(client: Client, document: Any, tail: bytes, message: str) -> None:
    assert message in error_of(client.infer(document, tail=tail), 400)
    assert not client.dispatcher.calls, "nothing is reserved for a request that does not fit"


def test_bodies_that_are_not_there(client: Client) -> None:
    error_of(client.ask("POST", INFER), 400)
    error_of(client.ask("POST", INFER, CONTENT_LENGTH=None), 400)
    error_of(client.ask("POST", INFER, CONTENT_LENGTH="-1"), 400)
    error_of(client.ask("POST", INFER, CONTENT_LENGTH="1e3"), 400)
    small = Client(Settings(max_request_bytes=100))
    assert "max_request_bytes" in error_of(small.infer(BINARY, tail=VALUES), 413)
    small = Client(Settings(max_json_bytes=100))
    assert "max_json_bytes" in error_of(small.infer(BINARY, tail=VALUES), 413)
    assert "max_json_bytes" in error_of(small.infer(BINARY), 413)


def test_a_client_that_stops_halfway_frees_the_slots(client: Client) -> None:
    head = json.dumps(BINARY).encode()
    for stream in (Body(head + VALUES[:5]), PlainBody(head + VALUES[:5])):
        answer = client.infer(BINARY, tail=VALUES, stream=stream)
        assert "ended early" in error_of(answer, 400)
        call = client.dispatcher.calls[-1]
        assert (call.closed, call.request) == (1, None)


def test_chunked_bodies(client: Client) -> None:
    head = json.dumps(BINARY).encode()
    chunked: dict[str, Any] = {"CONTENT_LENGTH": None, "HTTP_TRANSFER_ENCODING": "chunked"}
    answer = client.infer(BINARY, tail=VALUES, stream=PlainBody(head + VALUES), **chunked)
    assert answer.tail == VALUES
    document = {"inputs": [as_json([1, 2])]}
    stream = PlainBody(json.dumps(document).encode())
    assert client.infer(document, stream=stream, **chunked).status == 200
    for tail in (VALUES[:9], VALUES + b"x"):
        answer = client.infer(BINARY, tail=VALUES, stream=PlainBody(head + tail), **chunked)
        error_of(answer, 400)
    error_of(client.infer(BINARY, stream=PlainBody(b""), **chunked), 400)


def test_bytes_inputs_are_checked(client: Client) -> None:
    document = {"inputs": [as_binary(7, [2], "BYTES")]}
    answer = client.infer(document, "/v2/models/identity_bytes/infer", b"\x01\0\0\0a\x01\0")
    assert "incomplete string length indicator" in error_of(answer, 400)


def test_compressed_requests(client: Client) -> None:
    document = {"inputs": [as_json([1, 2, 3, 4.5])]}
    text = json.dumps(document).encode()
    bare = zlib.compressobj(wbits=-15)
    bodies = [
        ("gzip", gzip.compress(text)),
        ("GZIP", gzip.compress(text)),
        ("x-gzip", gzip.compress(text)),
        ("deflate", zlib.compress(text)),
        ("deflate", bare.compress(text) + bare.flush()),
        ("identity", text),
    ]
    for name, body in bodies:
        answer = client.infer(body, headers={"Content-Encoding": name})
        assert answer.json["outputs"][0]["data"] == [1, 2, 3, 4.5], name
    head = json.dumps(BINARY).encode()
    headers = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": str(len(head))}
    answer = client.ask("POST", INFER, gzip.compress(head + VALUES), headers)
    assert answer.tail == VALUES


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("gzip", b'{"inputs": []}', 400),
        ("gzip", gzip.compress(b"{}" * 100, mtime=0)[:-9], 400),
        ("gzip", gzip.compress(b"{}", mtime=0) + b"more", 400),
        ("gzip", b"", 400),
        ("deflate", b"\x78\x9cgarbage", 400),
        ("deflate", b"garbage", 400),
        ("br", b"x", 415),
        ("deflate, gzip", b"x", 415),
    ],
)
def test_bad_encodings(client: Client, name: str, body: bytes, status: int) -> None:
    answer = client.ask("POST", INFER, body, {"Content-Encoding": name})
    error_of(answer, status)
    if status == 415:
        assert answer.headers["accept-encoding"] == "gzip, deflate"


def test_decompression_bombs_meet_the_limits() -> None:
    client = Client(Settings(max_json_bytes=10_000, max_request_bytes=1_000_000))
    bomb = gzip.compress(b" " * 50_000_000)
    headers = {"Content-Encoding": "gzip"}
    assert "max_json_bytes" in error_of(client.ask("POST", INFER, bomb, headers), 413)
    headers["Inference-Header-Content-Length"] = "0"
    error_of(client.ask("POST", INFER, bomb, headers), 413)
    head = json.dumps(BINARY).encode()
    headers["Inference-Header-Content-Length"] = str(len(head))
    body = gzip.compress(head + VALUES + b"\0" * 50_000_000)
    assert "additional input data" in error_of(client.ask("POST", INFER, body, headers), 400)


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("x-gzip", "gzip"),
        ("gzip;q=0.1, deflate;q=0.9", "deflate"),
        ("gzip, identity;q=0", "gzip"),
        ("deflate, gzip, identity;q=0", "deflate"),
        ("gzip, deflate, br", None),
        ("deflate, gzip", None),
        ("identity, gzip;q=0.5", None),
        ("gzip;q=0", None),
        ("gzip;q=x", None),
        ("gzip;q=nan", None),
        ("br", None),
        ("*", None),
        ("", None),
    ],
)
def test_accept_encoding(client: Client, accept: str, chosen: str | None) -> None:
    headers = {"Accept-Encoding": accept}
    answer = client.infer(BINARY, tail=VALUES, headers=headers)
    assert answer.status == 200
    assert answer.headers.get("content-encoding") == chosen
    if chosen:
        answer.body = zlib.decompress(answer.body, 47)
    assert answer.tail == VALUES
    assert "content-encoding" not in client.infer(b"{", headers=headers).headers
    assert "content-encoding" not in client.get("/v2", headers=headers).headers
