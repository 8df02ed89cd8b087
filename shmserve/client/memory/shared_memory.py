"""All the memory that a client shares with its server: the host's, and that of GPUs."""

from __future__ import annotations

import os
import threading
import time
from math import inf

from shmserve.client.client_connection import ControlConnection
from shmserve.client.errors import InferenceError
from shmserve.client.http_transport import Transport
from shmserve.client.memory.block_pool import BlockPool
from shmserve.client.memory.device_blocks import DeviceBlocks
from shmserve.client.memory.host_blocks import HostBlocks
from shmserve.errors import ShmserveError
from shmserve.protocol.control.client_messages import SOCKET_NAME

CONTROL_VARIABLE = "SHMSERVE_CLIENT_SOCKET"  # the server's setting of the same meaning
# The server may have been restarting: it is asked again, ever less often
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 30.0
_LOOK_S = 1.0  # for an answer then, which a request waits for
_STATUS_S = 10.0
_NO_SOCKET = (
    f"there is no client socket beside a TCP address: name it (control, {CONTROL_VARIABLE})"
)


class SharedMemoryPools:
    """A pool for the host's memory, and one for each GPU that is asked for. Thread-safe.

    Attributes:
        control: the client socket; None: there is none now.
        sought: the caller has not said to do without, and there is an address.
        missing: why there is no memory of the host's; "": there is.
    """

    def __init__(
        self, transport: Transport, control: str | None, max_bytes: int, max_device_bytes: int
    ) -> None:
        """`control`: as `api.connect`; `max_device_bytes`: of each GPU."""
        self._transport = transport
        self._max_bytes = max_bytes
        self._max_device_bytes = max_device_bytes
        self.control: ControlConnection | None = None
        self._lock = threading.Lock()
        self._gpu_pools: dict[int, BlockPool | None] = {}
        self._off = control == ""
        self.missing = "it is switched off (control)" if self._off else _NO_SOCKET
        self._path = _control_path(transport.unix_path) if control is None else control
        self._host: BlockPool | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._again_at = inf
        self.sought = bool(self._path)
        if self.sought:
            self._look(inf)

    def on(self, device: int | None) -> BlockPool | None:
        """The memory of a GPU, None: of the host. None: the server takes none of it now."""
        if device is None:
            if self._host is None and time.monotonic() >= self._again_at:
                self._look_again()
            return self._host
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
        return self._host is None or self._host.register_again()

    def close(self, unregister: bool = True) -> None:
        with self._lock:
            for pool in self._gpu_pools.values():
                if pool is not None:
                    pool.close(unregister)
            self._gpu_pools.clear()
            self._off = True
            self._again_at = inf
        if self._host is not None:
            self._host.close(unregister)
        if self.control is not None:
            self.control.close()

    def _look_again(self) -> None:
        if self._lock.acquire(blocking=False):  # else another thread is at it, or at the end
            try:
                if time.monotonic() >= self._again_at:
                    self._look(_LOOK_S)
            finally:
                self._lock.release()

    def _look(self, within_s: float) -> None:
        """For the host's memory, and the server to take it."""
        self._host, self.missing = self._host_pool(within_s)
        self._again_at = inf if self._host is not None else time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)

    def _host_pool(self, within_s: float) -> tuple[BlockPool | None, str]:
        """If the server we talk to over HTTP sees what we register at the socket; else why not."""
        try:
            control = ControlConnection(self._path, within_s)
        except ShmserveError as ex:
            return None, f"the client socket does not answer: {ex.message}"
        pool = BlockPool(HostBlocks(control), self._max_bytes)
        missing = "the server takes none, or max_bytes is too small for a first block"
        block = pool.acquire(1)
        if block is not None:
            pool.release(block)
            status = f"/v2/systemsharedmemory/region/{block.name}/status"
            try:
                reply = self._transport.request("GET", status, timeout_s=min(within_s, _STATUS_S))
                if reply.status == 200:
                    self.control = control
                    return pool, ""
                missing = f"the server does not see it: {reply.error}"
            except InferenceError as ex:
                missing = f"the server does not say whether it sees it: {ex.message}"
        pool.close()
        control.close()
        return None, missing

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
