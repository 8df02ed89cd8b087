"""All the memory that a client shares with its server: the host's, and that of GPUs."""

from __future__ import annotations

import contextlib
import os
import threading

from shmserve.client.client_connection import ControlConnection
from shmserve.client.errors import InferenceError
from shmserve.client.http_transport import Transport
from shmserve.client.memory.block_pool import BlockPool
from shmserve.client.memory.device_blocks import DeviceBlocks
from shmserve.client.memory.host_blocks import HostBlocks
from shmserve.errors import ShmserveError
from shmserve.protocol.control.client_messages import SOCKET_NAME

CONTROL_VARIABLE = "SHMSERVE_CLIENT_SOCKET"  # the server's setting of the same meaning


class SharedMemoryPools:
    """A pool for the host's memory, and one for each GPU that is asked for. Thread-safe.

    Attributes:
        host: None: the server takes none.
        control: the client socket; None: there is none.
    """

    def __init__(
        self, transport: Transport, control: str | None, max_bytes: int, max_device_bytes: int
    ) -> None:
        """`control`: as `api.connect`; `max_device_bytes`: of each GPU."""
        self._transport = transport
        self._max_device_bytes = max_device_bytes
        self.control: ControlConnection | None = None
        self._lock = threading.Lock()
        self._gpu_pools: dict[int, BlockPool | None] = {}
        self._off = control == ""
        path = _control_path(transport.unix_path) if control is None else control
        self.host = self._host_pool(path, max_bytes) if path else None

    def on(self, device: int | None) -> BlockPool | None:
        """The memory of a GPU, None: of the host. None: the server takes none of it."""
        if device is None:
            return self.host
        with self._lock:
            if self._off:
                return None
            if device not in self._gpu_pools:
                return self._gpu_pool(device)
            return self._gpu_pools[device]

    def register_again(self) -> bool:
        with self._lock:
            for device, pool in list(self._gpu_pools.items()):
                if pool is not None and not pool.register_again():
                    pool.close()  # what lies in it is copied from now on
                    del self._gpu_pools[device]
        return self.host is None or self.host.register_again()

    def close(self, unregister: bool = True) -> None:
        with self._lock:
            for pool in self._gpu_pools.values():
                if pool is not None:
                    pool.close(unregister)
            self._gpu_pools.clear()
            self._off = True
        if self.host is not None:
            self.host.close(unregister)
        if self.control is not None:
            self.control.close()

    def _host_pool(self, path: str, max_bytes: int) -> BlockPool | None:
        """If the server we talk to over HTTP sees what we register at the socket."""
        try:
            self.control = ControlConnection(path)
        except ShmserveError:
            return None
        pool = BlockPool(HostBlocks(self.control), max_bytes)
        block = pool.acquire(1)
        if block is not None:
            pool.release(block)
            with contextlib.suppress(InferenceError):
                status = f"/v2/systemsharedmemory/region/{block.name}/status"
                if self._transport.request("GET", status).status == 200:
                    return pool
        pool.close()
        self.control.close()
        self.control = None
        return None

    def _gpu_pool(self, device: int) -> BlockPool | None:
        """If the server takes a first block. A refusal is for good; no answer is not."""
        blocks = DeviceBlocks(self._transport, device)
        pool = BlockPool(blocks, self._max_device_bytes)
        block = pool.acquire(1)
        if block is not None:
            pool.release(block)
            self._gpu_pools[device] = pool
            return pool
        if blocks.refused:
            self._gpu_pools[device] = None
        return None


def _control_path(unix_path: str) -> str:
    named = os.environ.get(CONTROL_VARIABLE, "")
    if named or not unix_path:
        return named
    return os.path.join(os.path.dirname(unix_path), SOCKET_NAME)
