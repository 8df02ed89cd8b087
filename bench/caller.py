"""Client of one HTTP connection, with tensors in shared memory or in the requests."""

import http.client
import json
import mmap
import os
import time
from pathlib import Path

import numpy as np

RECEIPT = "shmserve-receipt"
TIMEOUT_S = 300


class Caller:
    """Client with one HTTP connection."""

    def __init__(self, stack, server):
        self._connection = http.client.HTTPConnection(
            server.http_host, server.http_port, timeout=TIMEOUT_S
        )
        stack.callback(self._connection.close)
        self._stack = stack
        self.receipt = {}
        self.took_s = 0.0

    def post(self, path, document=None, headers=None):
        """Return the body of a 200; `document`: object to send as JSON, or a body in bytes;
        `headers`: by default those that ask for a receipt."""
        body = document if isinstance(document, bytes) else json.dumps(document or {})
        headers = {RECEIPT: "1"} if headers is None else headers
        begin = time.perf_counter()
        self._connection.request("POST", path, body, headers)
        answer = self._connection.getresponse()
        data = answer.read()
        self.took_s = time.perf_counter() - begin
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {data[:500].decode(errors='replace')}")
        self.receipt = json.loads(answer.getheader(RECEIPT) or "{}")
        return data

    def shared_array(self, name, nbytes):
        """Return an FP32 array that is a system region until the caller ends."""
        path = Path(f"/dev/shm/bench-{os.getpid()}-{name}")
        with path.open("xb+") as file:
            self._stack.callback(path.unlink)
            os.posix_fallocate(file.fileno(), 0, nbytes)
            mapping = mmap.mmap(file.fileno(), nbytes)
        base = f"/v2/systemsharedmemory/region/{name}"
        self.post(f"{base}/register", {"key": path.name, "byte_size": nbytes})
        self._stack.callback(self.post, f"{base}/unregister")
        return np.frombuffer(mapping, np.float32)

    def seconds(self, model, source, target, nbytes, **parameters):
        """Return the seconds of a request with tensors in regions; `target` None: the output comes
        in the answer."""
        place = {"shared_memory_byte_size": nbytes}
        tensor = {"name": "IN", "datatype": "FP32", "shape": [nbytes // 4]}
        document = {
            "inputs": [{**tensor, "parameters": {"shared_memory_region": source, **place}}],
            "parameters": parameters,
        }
        if target is not None:
            region = {"shared_memory_region": target, **place}
            document["outputs"] = [{"name": "OUT", "parameters": region}]
        self.post(f"/v2/models/{model}/infer", document)
        return self.took_s
