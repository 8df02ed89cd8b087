"""All the memory that a client shares with its server: the host's, and that of GPUs."""

from __future__ import annotations

import contextlib
import os
import threading

from shmserve.client.client_connection import Control
from shmserve.client.errors import InferenceError
from shmserve.client.http_transport import Transport
from shmserve.client.memory.block_pool import Memory
from shmserve.client.memory.device_blocks import DeviceBlocks
from shmserve.client.memory.host_blocks import HostBlocks
from shmserve.errors import ShmserveError
from shmserve.protocol.control.client_messages import SOCKET_NAME

CONTROL_VARIABLE = "SHMSERVE_CLIENT_SOCKET"  # the server's setting of the same meaning


class Memories:
    """See the module. Thread-safe.

    Attributes:
        host: None: the server takes none.
    """

    def __init__(
        self, transport: Transport, control: str | None, max_bytes: int, max_device_bytes: int
    ) -> None:
        """`control`: as `api.connect`; `max_device_bytes`: of each GPU."""
        self._transport = transport
        self._max_device_bytes = max_device_bytes
        self._control: Control | None = None
        self._lock = threading.Lock()
        self._of_gpus: dict[int, Memory | None] = {}
        self._off = control == ""
        path = _control_path(transport.unix_path) if control is None else control
        self.host = self._host(path, max_bytes) if path else None

    def on(self, device: int | None) -> Memory | None:
        """The memory of a GPU, None: of the host. None: the server takes none of it."""
        if device is None:
            return self.host
        with self._lock:
            if self._off:
                return None
            if device not in self._of_gpus:
                return self._gpu(device)
            return self._of_gpus[device]

    def register_again(self) -> bool:
        """A server that was started anew knows none of the regions; False: nor will it."""
        with self._lock:
            for device, memory in list(self._of_gpus.items()):
                if memory is not None and not memory.register_again():
                    memory.close()  # what lies in it is copied from now on
                    del self._of_gpus[device]
        return self.host is None or self.host.register_again()

    def close(self, unregister: bool = True) -> None:
        """Give everything up; arrays that are still referenced stay readable."""
        with self._lock:
            for memory in self._of_gpus.values():
                if memory is not None:
                    memory.close(unregister)
            self._of_gpus.clear()
            self._off = True
        if self.host is not None:
            self.host.close(unregister)
        if self._control is not None:
            self._control.close()

    def _host(self, path: str, max_bytes: int) -> Memory | None:
        """If the server we talk to over HTTP sees what we register at the socket."""
        try:
            self._control = Control(path)
        except ShmserveError:
            return None
        memory = Memory(HostBlocks(self._control), max_bytes)
        block = memory.acquire(1)
        if block is not None:
            memory.release(block)
            with contextlib.suppress(InferenceError):
                status = f"/v2/systemsharedmemory/region/{block.name}/status"
                if self._transport.request("GET", status).status == 200:
                    return memory
        memory.close()
        self._control.close()
        return None

    def _gpu(self, device: int) -> Memory | None:
        """If the server takes a first block. A refusal is for good; no answer is not."""
        blocks = DeviceBlocks(self._transport, device)
        memory = Memory(blocks, self._max_device_bytes)
        block = memory.acquire(1)
        if block is not None:
            memory.release(block)
            self._of_gpus[device] = memory
            return memory
        if blocks.refused:
            self._of_gpus[device] = None
        return None


def _control_path(unix_path: str) -> str:
    named = os.environ.get(CONTROL_VARIABLE, "")
    if named or not unix_path:
        return named
    return os.path.join(os.path.dirname(unix_path), SOCKET_NAME)
