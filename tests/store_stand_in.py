"""Stand-in for object stores: speaks the protocols of S3, Google, Azure and Hugging Face as far as
the fetcher asks, and answers wrongly on request."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.faulty_store import KEYS, SECRET

Fields = dict[str, str]
Answer = tuple[int, Fields, bytes]
# subject ("list", "head", "get" or "token"), key, the handler, the answer without fault;
# returns the answer to send, or None if an answer has been sent
Fault = Callable[[str, str, BaseHTTPRequestHandler, Answer], Answer | None]
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"
_JSON = {"Content-Type": "application/json"}
_XML = {"Content-Type": "application/xml"}
AT = {"s3": "s3://box/prod", "gs": "gs://box/prod", "az": "az://box/prod", "hf": "hf://me/box/prod"}


class StandIn:
    """Store of one kind at a port of its own. `objects`: content by key, below the bucket, the
    container or the repository. `fault`: None: all answers are right."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.objects: dict[str, bytes] = {}
        self.fault: Fault | None = None
        self.asked: list[tuple[str, str]] = []
        self.fields: list[Fields] = []
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stand_in._answer(self)

            do_HEAD = do_POST = do_GET

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return AT[self.kind]

    def environ(self) -> dict[str, str]:
        """Return the variables that lead the store's library to this server, with a secret."""
        place = f"http://127.0.0.1:{self.port}"
        key = base64.b64encode(SECRET.encode()).decode()
        azure = f"AccountName=me;AccountKey={key};BlobEndpoint={place}/me"
        return {
            "s3": {**KEYS, "AWS_ENDPOINT_URL": place},
            "gs": {
                "STORAGE_EMULATOR_HOST": place,
                "NO_GCE_CHECK": "true",
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            },
            "az": {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{azure}"},
            "hf": {"HF_ENDPOINT": place, "HF_TOKEN": SECRET},
        }[self.kind]

    # -------------------------------------------------------------------- HTTP

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        handler.rfile.read(length)
        target = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(target.query).items()}
        what, key, answer = getattr(self, f"_{self.kind}")(handler, unquote(target.path), query)
        self.asked.append((what, key))
        self.fields.append(dict(handler.headers.items()))
        try:
            if self.fault is not None:
                answer = self.fault(what, key, handler, answer)
            if answer is not None:
                send(handler, answer)
        except OSError:
            handler.close_connection = True

    def _content(self, handler: BaseHTTPRequestHandler, key: str, fields: Fields) -> Answer:
        """Return the answer with an object's content, or with the part in `Range`."""
        body = self.objects[key]
        wanted = handler.headers.get("x-ms-range") or handler.headers.get("Range") or ""
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
        if found is None:
            return 200, fields, body
        first, last = int(found[1]), min(int(found[2] or len(body) - 1), len(body) - 1)
        if first >= len(body):
            return 416, {**fields, "x-ms-error-code": "InvalidRange"}, b""
        about = {"Content-Range": f"bytes {first}-{last}/{len(body)}"}
        return 206, fields | about, body[first : last + 1]

    # ----------------------------------------------------------------- dialects

    def _s3(self, handler: Any, path: str, query: Fields) -> tuple[str, str, Answer]:
        key = path.lstrip("/").partition("/")[2]
        if not key:
            return "list", "", (200, _XML, self.s3_listing(self._below(query.get("prefix", ""))))
        what = "head" if handler.command == "HEAD" else "get"
        if key not in self.objects:
            return what, key, (404, _XML, b"<Error><Code>NoSuchKey</Code></Error>")
        tag = {"ETag": f'"{md5(self.objects[key]).hex()}"', "Last-Modified": _DATE}
        return what, key, self._content(handler, key, tag)

    def s3_listing(self, objects: dict[str, bytes], token: str = "") -> bytes:
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z"
            f'</LastModified><ETag>"{md5(data).hex()}"</ETag><Size>{len(data)}</Size></Contents>'
            for key, data in objects.items()
        )
        more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
        cut = "true" if token else "false"
        return (
            f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>{cut}'
            f"</IsTruncated>{more}<KeyCount>{len(objects)}</KeyCount>{rows}</ListBucketResult>"
        ).encode()

    def _gs(self, handler: Any, path: str, query: Fields) -> tuple[str, str, Answer]:
        if path == "/token":
            token = {"access_token": SECRET, "expires_in": 3600, "token_type": "Bearer"}
            return "token", "", (200, _JSON, json.dumps(token).encode())
        key = path.partition("/o/")[2]
        if not key:
            listed = self.gs_listing(self._below(query.get("prefix", "")))
            return "list", "", (200, _JSON, listed)
        what = "get" if query.get("alt") == "media" else "head"
        if key not in self.objects:
            return what, key, (404, _JSON, b'{"error": {"code": 404, "message": "none"}}')
        if what == "head":
            return what, key, (200, _JSON, json.dumps(gs_item(key, self.objects[key])).encode())
        return what, key, self._content(handler, key, {})

    def gs_listing(self, objects: dict[str, bytes], token: str = "") -> bytes:
        page = {"nextPageToken": token} if token else {}
        items = [gs_item(key, data) for key, data in objects.items()]
        return json.dumps({"kind": "storage#objects", "items": items, **page}).encode()

    def _az(self, handler: Any, path: str, query: Fields) -> tuple[str, str, Answer]:
        key = path.lstrip("/").partition("/")[2].partition("/")[2]
        if query.get("comp") == "list":
            return "list", "", (200, _XML, self.az_listing(self._below(query.get("prefix", ""))))
        what = "head" if handler.command == "HEAD" else "get"
        if key not in self.objects:
            return what, key, (404, {"x-ms-error-code": "BlobNotFound"}, b"")
        mark = base64.b64encode(md5(self.objects[key])).decode()
        fields = {"ETag": '"0x1"', "Last-Modified": _DATE, "x-ms-blob-type": "BlockBlob"}
        mark_name = "Content-MD5" if what == "head" else "x-ms-blob-content-md5"
        return what, key, self._content(handler, key, {**fields, mark_name: mark})

    def az_listing(self, objects: dict[str, bytes], token: str = "") -> bytes:
        rows = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{_DATE}</Last-Modified>"
            f"<Etag>0x1</Etag><Content-Length>{len(data)}</Content-Length><Content-MD5>"
            f"{base64.b64encode(md5(data)).decode()}</Content-MD5><BlobType>BlockBlob</BlobType>"
            "</Properties></Blob>"
            for key, data in objects.items()
        )
        return (
            '<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="box"><Blobs>'
            f"{rows}</Blobs><NextMarker>{token}</NextMarker></EnumerationResults>"
        ).encode()

    def _hf(self, handler: Any, path: str, query: Fields) -> tuple[str, str, Answer]:
        if not path.startswith("/api/"):
            key = path.partition("/resolve/main/")[2]
            if key not in self.objects:
                return "get", key, (404, {"X-Error-Code": "EntryNotFound"}, b"")
            return "get", key, self._content(handler, key, {"ETag": '"1"'})
        _, tree, folder = path.partition("/tree/main")
        if not tree:
            about = {"id": "me/box", "sha": "0" * 40, "siblings": [], "private": False, "tags": []}
            return "head", "", (200, _JSON, json.dumps(about).encode())
        deep = query.get("recursive", "").lower() == "true"
        listed = self.hf_listing(self.objects, folder.strip("/"), deep)
        return "list", folder.strip("/"), (200, _JSON, listed)

    def hf_listing(self, objects: dict[str, bytes], folder: str, deep: bool) -> bytes:
        start = f"{folder}/" if folder else ""
        rows: dict[str, dict[str, Any]] = {}
        for key, data in objects.items():
            if not key.startswith(start):
                continue
            parts = key.removeprefix(start).split("/")
            for end in range(1, len(parts)):
                path = start + "/".join(parts[:end])
                if deep or end == 1:
                    rows[path] = {"type": "directory", "oid": "1" * 40, "size": 0, "path": path}
            if deep or len(parts) == 1:
                blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                rows[key] = {"type": "file", "oid": blob, "size": len(data), "path": key}
        return json.dumps(list(rows.values())).encode()

    def _below(self, prefix: str) -> dict[str, bytes]:
        return {key: data for key, data in self.objects.items() if key.startswith(prefix)}


def begin(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    """Send an answer's head. A `Content-Length` in its fields need not be the body's."""
    status, fields, body = answer
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **fields}.items():
        handler.send_header(name, value)
    handler.end_headers()


def send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    """Send an answer."""
    begin(handler, answer)
    if handler.command != "HEAD":
        handler.wfile.write(answer[2])


def gs_item(key: str, data: bytes) -> dict[str, Any]:
    """Return Google's description of an object."""
    mark = base64.b64encode(md5(data)).decode()
    return {"name": key, "bucket": "box", "size": str(len(data)), "md5Hash": mark, "etag": "1"}


def md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()
