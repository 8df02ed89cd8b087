"""HTTP client with its own memory, over TCP or the Unix socket, as any user."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.servers import UnixConnection

BASE = "/v2/systemsharedmemory"
OTHER_UID = 54321
_count = itertools.count()


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Give sockets and files of this block to another user. Needs root."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


class Memory:
    """An object in /dev/shm."""

    def __init__(self, size: int, name: str = "") -> None:
        self.name = name or f"regions-test-{os.getpid()}-{next(_count)}"
        self.path = f"/dev/shm/{self.name}"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self.fd, size)

    def put(self, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        os.pwrite(self.fd, array.tobytes(), offset)

    def get(self, count: int, offset: int = 0) -> np.ndarray[Any, Any]:
        return np.frombuffer(os.pread(self.fd, count * 4, offset), np.float32)

    def close(self) -> None:
        os.close(self.fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """One kept-alive connection. `where` is a port or the path of a Unix socket."""

    def __init__(self, where: int | str, host: str = "127.0.0.1") -> None:
        self.connection: http.client.HTTPConnection
        if isinstance(where, int):
            self.connection = http.client.HTTPConnection(host, where, timeout=30)
        else:
            self.connection = UnixConnection(where, 30)
        self.connection.connect()
        self.headers: dict[str, str] = {}

    def request(self, method: str, path: str, document: Any = None) -> tuple[int, Any]:
        body = None if document is None else json.dumps(document).encode()
        self.connection.request(method, path, body, {"shmserve-receipt": "1"})
        answer = self.connection.getresponse()
        self.headers = {name.lower(): value for name, value in answer.getheaders()}
        data = answer.read()
        return answer.status, json.loads(data) if data else None

    def register(self, name: str, key: str, size: int, offset: int = 0) -> tuple[int, Any]:
        body = {"key": key, "offset": offset, "byte_size": size}
        return self.request("POST", f"{BASE}/region/{name}/register", body)

    def unregister(self, name: str = "") -> tuple[int, Any]:
        return self.request(
            "POST", f"{BASE}/region/{name}/unregister" if name else f"{BASE}/unregister"
        )

    def status(self) -> list[str]:
        return [region["name"] for region in self.request("GET", f"{BASE}/status")[1]]

    def infer(
        self,
        model: str,
        source: tuple[str, int],
        target: tuple[str, int] | None,
        count: int,
        **parameters: Any,
    ) -> tuple[int, Any]:
        """FP32: `source` and `target` are (region, offset)."""
        tensor = {"name": "IN", "shape": [count], "datatype": "FP32"}
        document: dict[str, Any] = {
            "inputs": [{**tensor, "parameters": window(source, count * 4)}],
            "parameters": parameters,
        }
        if target is not None:
            document["outputs"] = [{"name": "OUT", "parameters": window(target, count * 4)}]
        return self.request("POST", f"/v2/models/{model}/infer", document)

    def copied(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self.headers["shmserve-receipt"])["copied_bytes"]
        return found

    def close(self) -> None:
        self.connection.close()


def window(place: tuple[str, int], nbytes: int) -> dict[str, Any]:
    return {
        "shared_memory_region": place[0],
        "shared_memory_offset": place[1],
        "shared_memory_byte_size": nbytes,
    }
