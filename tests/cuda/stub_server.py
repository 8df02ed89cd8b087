"""Server inside the test's own process, for `shmserve.client` on the fake of CUDA.

Reads and writes the memory of regions as another process would: results of streams that no call
has waited for are missing.
"""

import base64
import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import shmserve.client
from shmserve.client import Client
from shmserve.client.result_reader import HEADER_LENGTH
from shmserve.client.wire.http_transport import Reply
from shmserve.client.wire.inference_error import InferenceError

REGIONS = "/v2/cudasharedmemory/region/"
NO_GPUS = "failed to register CUDA shared memory region: 'r', GPUs not supported"
COUNT = 100_000
NUMBERS = np.arange(COUNT, dtype=np.float32)
MIB = 1 << 20


def connected(**options: Any) -> Client:
    """A client, where the fixture `stub` has put a server."""
    return shmserve.client.connect("unix:/nowhere", **options)


def warm(client: Client) -> None:
    """Let the client learn the output's size for inputs like NUMBERS."""
    client.infer("double", {"IN": NUMBERS})


def filled(array: Any) -> Any:
    """Fill an array with NUMBERS and wait for the copy."""
    array.set(NUMBERS)
    return array


def check_without(cupy: Any, client: Client) -> None:
    """No device memory: the same results all the same."""
    warm(client)
    x = filled(client.empty(COUNT, device=0))
    for _ in range(2):
        y = client.infer("double", {"IN": x}, device=0)["OUT"]
        assert isinstance(y, cupy.ndarray)
        np.testing.assert_array_equal(y.get(), NUMBERS * 2)


class StubServer:
    """Stand-in for `http.Transport`. Every model returns its input `IN` doubled as `OUT`, and
    BYTES unchanged.

    Attributes:
        regions: address and bytes by name.
        registered: number of registrations.
        refuse: status and error for registrations; None: succeed.
        quota: limit on regions.
        mute: registrations are made and not answered.
        failures: errors for the next inferences, in place of results.
        documents: of all inferences.
    """

    unix_path, is_local, timeout_s = "", False, 30.0

    def __init__(self, cupy: Any) -> None:
        self.regions: dict[str, tuple[int, int]] = {}
        self.registered = 0
        self.refuse: tuple[int, str] | None = None
        self.quota = 1000
        self.mute = False
        self.failures: list[tuple[int, str]] = []
        self.documents: list[dict[str, Any]] = []
        self._cupy = cupy

    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: Sequence[bytes | memoryview] = (),
        timeout_s: float = 0.0,
    ) -> Reply:
        data = b"".join(body)
        if path.startswith(REGIONS):
            name, action = path.removeprefix(REGIONS).split("/")
            return self._unregister(name) if action == "unregister" else self._register(name, data)
        if path.endswith("/infer"):
            return self._infer(dict(headers or {}), data)
        output = {"name": "OUT", "datatype": "FP32", "shape": [-1]}
        return _reply(200, {"outputs": [output]})

    def close(self) -> None:
        """Nothing is open."""

    def _register(self, name: str, data: bytes) -> Reply:
        self.registered += 1
        if self.refuse is not None:
            return _error(*self.refuse)
        if name in self.regions:
            return _error(400, f"shared memory region '{name}' already in manager")
        if len(self.regions) >= self.quota:
            return _error(400, "it is one too many")
        document = json.loads(data)
        handle = base64.b64decode(document["raw_handle"]["b64"])
        export: Callable[[int], bytes] = self._cupy.cuda.runtime.ipcGetMemHandle
        (address,) = [a for a in list(self._cupy._fake.allocations) if export(a) == handle]
        self.regions[name] = address, document["byte_size"]
        if self.mute:
            raise InferenceError(0, "the server did not answer in time")
        return _reply(200, None)

    def _unregister(self, name: str) -> Reply:
        self.regions.pop(name, None)
        return _reply(200, None)

    def _infer(self, headers: dict[str, str], data: bytes) -> Reply:
        length = int(headers.get(HEADER_LENGTH, len(data)))
        document, rest = json.loads(data[:length]), data[length:]
        self.documents.append(document)
        if self.failures:
            status, text = self.failures.pop(0)
            if not status:
                raise InferenceError(0, text)
            return _error(status, text)
        (given,), (wanted,) = document["inputs"], document["outputs"]
        window, target = self._window(given["parameters"]), self._window(wanted["parameters"])
        if window is None or target is None:
            return _error(404, "Unable to find shared memory region: 'r'")
        content = ctypes.string_at(*window) if window else rest
        if given["datatype"] == "FP32":
            content = (np.frombuffer(content, np.float32) * 2).tobytes()
        output = {"name": wanted["name"], "datatype": given["datatype"], "shape": given["shape"]}
        if not target:
            output["parameters"] = {"binary_data_size": len(content)}
            return _reply(200, {"outputs": [output]}, content)
        if len(content) > target[1]:
            return _error(400, f"shared memory size should be at least {len(content)} bytes")
        ctypes.memmove(target[0], content, len(content))
        return _reply(200, {"outputs": [output]})

    def _window(self, parameters: dict[str, Any]) -> tuple[int, int] | tuple[()] | None:
        """Return address and bytes; () if the tensor is in no region; None if the region is
        unknown."""
        name = parameters.get("shared_memory_region")
        if name is None:
            return ()
        if name not in self.regions:
            return None
        address, size = self.regions[name]
        offset, nbytes = parameters["shared_memory_offset"], parameters["shared_memory_byte_size"]
        assert offset + nbytes <= size
        return address + offset, nbytes


def _reply(status: int, document: Any, content: bytes = b"") -> Reply:
    head = json.dumps(document).encode()
    body = np.frombuffer(bytearray(head + content), np.uint8)
    return Reply(status, {HEADER_LENGTH.lower(): str(len(head))}, body)


def _error(status: int, text: str) -> Reply:
    return _reply(status, {"error": text})
