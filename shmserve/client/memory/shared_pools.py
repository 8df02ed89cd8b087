"""Memory that a client shares with its server, on the host and on GPUs."""

import os
import threading
import time
from collections.abc import Iterator, Set
from math import inf

from shmserve.client.memory.block_pool import BlockPool
from shmserve.client.memory.device_blocks import DeviceBlocks
from shmserve.client.memory.host_blocks import HostBlocks
from shmserve.client.wire.client_connection import ControlConnection
from shmserve.client.wire.http_transport import Transport
from shmserve.client.wire.inference_error import InferenceError
from shmserve.errors import ShmserveError, UnreadableMessage
from shmserve.protocol.control.client_messages import SOCKET_NAME
from shmserve.protocol.decoding import json_decoder

# equals the environment variable of the server's setting
CONTROL_VARIABLE = "SHMSERVE_CLIENT_SOCKET"
# Seconds between attempts, doubling: the server may have been restarting.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 30.0
_STATUS_S = 10.0
_SERVICES = "/run/shmserve"  # systemd's run directory, which root makes and other users can reach
WHERE = "/shmserve/client-socket"  # the route that tells where the client socket is
_OUT_OF_REACH = (
    "this user may not open the client socket {path}: let the server's setting client_socket name "
    "a path that this user can reach"
)
_NOWHERE = (
    "no client socket is known for this address: name the server's client_socket "
    f"(control, or {CONTROL_VARIABLE})"
)


_decode = json_decoder()


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
        """Look for the server's client socket. `control`: path of the client socket, as for
        `api.connect`. `max_device_bytes`: limit for each GPU, in bytes."""
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
        """Return the pool of a GPU or, for None, of the host. None: no such memory is taken now."""
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
        opened: tuple[BlockPool, ControlConnection] | str = ""
        reasons: list[str] = []
        for path, owners in self._places(reasons):
            opened = self._host_pool(path, owners)
            if not isinstance(opened, str):
                break
            reasons.append(opened)
        with self._lock:
            self.why_not = (reasons or [_NOWHERE])[0] if isinstance(opened, str) else ""
            if not isinstance(opened, str) and self._off:
                pool, control = opened
                pool.close()
                control.close()
            elif not isinstance(opened, str):
                self._host, self.control = opened
            elif not self._off:
                self._again_at = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)

    def _places(self, reasons: list[str]) -> Iterator[tuple[str, Set[int] | None]]:
        """Yield paths where the client socket may be, each with the users who may serve the socket
        (None: any): root, this user, and the user who answered over HTTP, unless this program's
        user named the path. `_host_pool` checks the server behind a path. Append to `reasons` why
        the server tells no path."""
        named = self._named or os.environ.get(CONTROL_VARIABLE, "")
        if named:
            yield named, None
        elif self._transport.is_local:
            owners = {0, os.geteuid()}
            told = self._told_place(owners, reasons)
            if told:
                yield told, owners
            yield from ((path, owners) for path in _guessed_paths(self._transport))

    def _told_place(self, owners: set[int], reasons: list[str]) -> str:
        """Ask the HTTP server where the client socket is. Return the path; "" if the answer is of
        no use. Add the user who answered to `owners`, if known, and append to `reasons` why the
        server tells no path, unless the server knows no such question."""
        try:
            reply = self._transport.request("GET", WHERE, timeout_s=_STATUS_S, whose=True)
        except InferenceError as ex:
            reasons.append(f"the server does not tell its client socket: {ex.message}")
            return ""
        if reply.user is not None:
            owners.add(reply.user)
        if reply.status in (401, 403, 501):
            reasons.append(f"the server does not tell its client socket: {reply.error}")
        elif reply.status == 200 and reply.user is None:
            reasons.append("the kernel does not show that the server is on this host")
        elif reply.status == 200:
            try:
                path = str(_decode(reply.body.data)["client_socket"])
            except (UnreadableMessage, KeyError, TypeError):
                return ""
            return path if path.startswith("/") and "\0" not in path else ""
        return ""

    def _host_pool(
        self, path: str, owners: Set[int] | None
    ) -> tuple[BlockPool, ControlConnection] | str:
        """Connect to a client socket. Return the reason if the HTTP server sees no memory there."""
        try:
            control = ControlConnection(path, owners)
        except ShmserveError as ex:
            if isinstance(ex.__cause__, PermissionError):
                return _OUT_OF_REACH.format(path=path)
            return f"no server at the client socket {path}: {ex.message}"
        reason = f"the server at the client socket {path} takes no memory"
        pool = BlockPool(HostBlocks(control), self._max_bytes)
        block = pool.acquire(1)
        if block is not None:
            pool.release(block)
            status = f"/v2/systemsharedmemory/region/{block.name}/status"
            try:
                reply = self._transport.request("GET", status, timeout_s=_STATUS_S)
                if reply.status == 200:
                    return pool, control
                reason = f"the client socket {path} belongs to another server"
            except InferenceError as ex:
                reason = f"the server does not say whether it sees memory: {ex.message}"
        pool.close()
        control.close()
        return reason

    def _gpu_pool(self, device: int) -> BlockPool | None:
        """Return a GPU's pool if the server takes a first block. Only a refusal is final."""
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


def _guessed_paths(transport: Transport) -> Iterator[str]:
    """Yield paths where the client socket may be: in a container other ones than the server's own,
    and servers before 0.2 tell none."""
    if transport.unix_path:
        yield os.path.join(os.path.dirname(transport.unix_path), SOCKET_NAME)
    else:  # the run directory of a server started with this program's user and environment
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
    """Return True if no other user can have put a socket into the folder to receive tensors."""
    try:
        return folder == _SERVICES or os.lstat(folder).st_uid in (os.getuid(), 0)
    except OSError:
        return False
