"""Client of a load that passes tensors in registered memory."""

import contextlib
import http.client
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.crash.load import LoadClient
from tests.integration import region_client


class RegionClient(LoadClient):
    """Client with its own memory, registered once, and again if the region is unknown."""

    connection: region_client.Client | None = None
    registered_at: float | None = None  # monotonic time
    unknown = 0  # answers "unknown region" since the registration

    def loop(self) -> None:
        self.size = max(self.work.sizes) * 4
        with self._memory() as self.source, self._memory() as self.target:
            super().loop()

    @contextlib.contextmanager
    def _memory(self) -> Iterator[region_client.Memory]:
        with region_client.Memory(self.size) as memory:
            # allocates the pages: later there may be no memory
            memory.put(np.zeros(self.size // 4, np.float32))
            yield memory

    def send(self, count: int) -> tuple[str, bool]:
        model, array, wanted = self.next(count)
        self.source.put(array)
        try:
            status, told = self._ask(model, array)
        except (OSError, http.client.HTTPException) as ex:
            self.close()
            return self.closed("region closed", ex)
        if status in (400, 404) and "region" in told["error"]:
            return self._not_known(told["error"])
        if status != 200:
            return self.failed("region ", status, told["error"])
        return self.judge("over regions", self.target.get(wanted.size).tobytes(), wanted)

    def _not_known(self, error: str) -> tuple[str, bool]:
        """Judge an answer that says that the region is unknown.

        Such answers are allowed after a disturbance, or once, from a process that has not heard of
        the region yet.
        """
        self.unknown += 1
        disturbed = (self.registered_at or 0.0) <= self.verdict.disturbed_until
        if disturbed or self.unknown > 1:
            self.registered_at = None
        if disturbed or self.unknown == 1:
            return self.refused("region unknown", error)
        return self.wrong(f"a region is not known again, and nobody disturbed: {error}")

    def _ask(self, model: str, array: np.ndarray) -> tuple[int, Any]:
        names = [f"load-{self.number}-{part}" for part in ("in", "out")]
        if self.connection is None:
            self.connection = region_client.Client(self.server.unix_path)
        if self.registered_at is None:
            begun = time.monotonic()
            for name, memory in zip(names, (self.source, self.target), strict=True):
                status, told = self.connection.register(name, memory.name, self.size)
                if status != 200 and "already" not in told["error"]:
                    return 503, told
            self.registered_at, self.unknown = begun, 0
        source, target = (region_client.window((name, 0), array.nbytes) for name in names)
        tensor = {"name": "IN", "shape": list(array.shape), "datatype": "FP32"}
        document = {
            "inputs": [{**tensor, "parameters": source}],
            "outputs": [{"name": "OUT", "parameters": target}],
        }
        return self.connection.request("POST", f"/v2/models/{model}/infer", document)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None
