"""Memory that a client shares with its server, on the host and on GPUs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from math import inf

from shmserve.client.memory.block_pool import BlockPool
from shmserve.client.memory.device_blocks import DeviceBlocks
from shmserve.client.memory.host_blocks import HostBlocks
from shmserve.client.wire.client_connection import ControlConnection
from shmserve.client.wire.http_transport import Transport
from shmserve.client.wire.inference_error import InferenceError
from shmserve.errors import ShmserveError
from shmserve.protocol.control.client_messages import SOCKET_NAME

# equals the environment variable of the server's setting
CONTROL_VARIABLE = "SHMSERVE_CLIENT_SOCKET"
# Seconds between attempts, doubling: the server may have been restarting.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 30.0
_STATUS_S = 10.0
_SERVICES = "/run/shmserve"  # systemd's run directory, which root makes and other users can reach
_NOWHERE = (
    "no client socket is known for this address: connect to a unix:/PATH of http_bind in the "
    f"socket's folder, or name the socket (control, or {CONTROL_VARIABLE})"
)


class SharedMemoryPools:
    """Pool of host memory, and a pool for each GPU in use. Thread-safe.

    Attributes:
        control: connection to the client socket; None: not connected now.
        sought: True if shared memory is available or may become so, False if it never will.
        why_not: reason why the server takes no host memory; "" if the server does.
    """

    def __init__(
        self, transport: Transport, control: str | None, max_bytes: int, max_device_bytes: int
    ) -> None:
        """Look for the server's client socket.

        Args:
            control: path of the client socket, as for `api.connect`.
            max_device_bytes: limit for each GPU, in bytes.
        """
        self._transport = transport
        self._max_bytes = max_bytes
        self._max_device_bytes = max_device_bytes
        self.control: ControlConnection | None = None
        self._lock = threading.Lock()
        self._gpu_pools: dict[int, BlockPool | None] = {}
        self._off = control == ""
        self.why_not = "control is empty" if self._off else _NOWHERE
        self._named = control
        self._host: BlockPool | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._again_at = inf
        somewhere = bool(control) or transport.is_local or CONTROL_VARIABLE in os.environ
        self.sought = somewhere and not self._off
        if self.sought:
            self._look()

    def on(self, device: int | None) -> BlockPool | None:
        """Return the pool of a GPU or, for None, of the host. Return None if the server takes no
        such memory now."""
        if device is None:
            if self._host is None and time.monotonic() >= self._again_at:
                self._again_at = inf
                # requests must not wait for this
                threading.Thread(target=self._look, daemon=True).start()
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
                    pool.close()  # inputs in this memory will be copied from now on
                    del self._gpu_pools[device]
        return self._host is None or self._host.register_again()

    def close(self, unregister: bool = True) -> None:
        """Close all pools. `unregister` is False in a forked child, which must not take the lock
        (only this thread exists) and must leave its parent's regions registered."""
        if unregister:
            with self._lock:
                self._end()
        else:
            self._end()
        for pool in self._gpu_pools.values():
            if pool is not None:
                pool.close(unregister)
        self._gpu_pools.clear()
        if self._host is not None:
            self._host.close(unregister)
        if self.control is not None:
            self.control.close()

    def _end(self) -> None:
        self._off = True
        self._again_at = inf

    def _look(self) -> None:
        """Look for a client socket whose server takes host memory."""
        opened = None
        for path in [self._named] if self._named else _control_paths(self._transport):
            opened = self._host_pool(path)
            if opened is not None:
                break
        with self._lock:
            if opened is not None and self._off:
                pool, control = opened
                pool.close()
                control.close()
            elif opened is not None:
                self._host, self.control = opened
            elif not self._off:
                self._again_at = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)

    def _host_pool(self, path: str) -> tuple[BlockPool, ControlConnection] | None:
        """Connect to a client socket. Return None unless the HTTP server sees memory registered
        there."""
        try:
            control = ControlConnection(path)
        except ShmserveError as ex:
            self.why_not = f"no server at the client socket {path}: {ex.message}"
            return None
        reason = f"the server at the client socket {path} takes no memory"
        pool = BlockPool(HostBlocks(control), self._max_bytes)
        block = pool.acquire(1)
        if block is not None:
            pool.release(block)
            status = f"/v2/systemsharedmemory/region/{block.name}/status"
            try:
                reply = self._transport.request("GET", status, timeout_s=_STATUS_S)
                if reply.status == 200:
                    self.why_not = ""
                    return pool, control
                reason = f"the client socket {path} belongs to another server"
            except InferenceError as ex:
                reason = f"the server does not say whether it sees memory: {ex.message}"
        self.why_not = reason
        pool.close()
        control.close()
        return None

    def _gpu_pool(self, device: int) -> BlockPool | None:
        """Make a pool for a GPU if the server takes a first block. A refusal is final, a missing
        answer is not."""
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


def _control_paths(transport: Transport) -> Iterator[str]:
    """Yield paths where the client socket may be. `_host_pool` checks the server behind a path
    before tensors go there."""
    named = os.environ.get(CONTROL_VARIABLE, "")
    if named:
        yield named
    elif transport.unix_path:
        yield os.path.join(os.path.dirname(transport.unix_path), SOCKET_NAME)
    # the run directory of a server started with this program's user and environment
    elif transport.is_local:
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        folders = (
            os.environ.get("SHMSERVE_RUN_DIR", ""),
            os.path.join(runtime, "shmserve") if runtime else "",
            f"/tmp/shmserve-{os.getuid()}",
            _SERVICES,
        )
        for folder in filter(None, folders):
            path = os.path.join(folder, SOCKET_NAME)
            if _is_nobody_elses(folder) and os.path.exists(path):
                yield path


def _is_nobody_elses(folder: str) -> bool:
    """Return True if no other user can have put a socket into `folder` to receive this client's
    tensors."""
    try:
        return folder == _SERVICES or os.lstat(folder).st_uid in (os.getuid(), 0)
    except OSError:
        return False
