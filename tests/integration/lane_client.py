"""Raw client of the client socket and of lanes: sends exactly what a test gives, valid or not."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from shmserve.protocol.control import client_messages as control
from shmserve.protocol.control import lane_messages as wire
from shmserve.protocol.control.lane_messages import LaneRequest, LaneTensor, LaneWindow

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Connection:
    """A connected socket of packets, closed at the end of its `with` block."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(30)

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send bytes as they are, or a message."""
        data = message if isinstance(message, bytes) else wire.encode(message)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        self.sock.sendmsg([data], [rights] if fds else [])

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(path)
    return sock


class Program(Connection):
    """A program's connection to the client socket."""

    def __init__(self, run_dir: str, socket_path: str = "") -> None:
        super().__init__(connected(socket_path or os.path.join(run_dir, "client.sock")))
        self.ask(control.ClientHello(control.VERSION))

    def ask(self, message: Any, fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
        self.send(message, fds)
        data, received, _, _ = socket.recv_fds(self.sock, 1 << 17, 4)
        return control.decode_from_server(data), received

    def region(self, name: str, nbytes: int) -> np.ndarray:
        """Register sealed memory of this size and return a view of the memory."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        reply, _ = self.ask(control.RegisterMemfd(name, 0, nbytes), [fd])
        assert reply == control.Ok(), reply
        view = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        os.close(fd)
        return view

    def lane(self, model: str, version: str = "") -> RawLane:
        """Open a lane, with retries.

        A lane that has ended counts against the limit until the executor has reported the end, and
        the executor may not have noticed yet.
        """
        until = time.monotonic() + 30
        while True:
            reply, fds = self.ask(control.OpenLane(model, version))
            if isinstance(reply, control.LaneOpened):
                break
            assert reply.code == "RESOURCE_EXHAUSTED", reply
            assert time.monotonic() < until, reply
            time.sleep(0.02)
        (fd,) = fds
        return RawLane(socket.socket(fileno=fd), reply)


class RawLane(Connection):
    """Client's end of a lane."""

    def __init__(self, sock: socket.socket, opened: control.LaneOpened) -> None:
        super().__init__(sock)
        self.opened = opened

    def receive(self) -> wire.LaneAnswer:
        data = self.sock.recv(1 << 18)
        assert data, "the lane has ended"
        answer: wire.LaneAnswer = wire.decode_from_lane(data)
        return answer

    def ask(self, message: wire.ToLane) -> wire.LaneAnswer:
        self.send(message)
        return self.receive()

    def ended(self) -> bool:
        """Return True once the executor has closed the lane; discard all messages before."""
        try:
            while self.sock.recv(1 << 18):
                continue
        except ConnectionError:
            pass
        return True


def floats(*values: float, name: str = "IN") -> LaneTensor:
    """Return a small tensor whose data travels in the message."""
    data = np.array(values, "<f4")
    return LaneTensor(name, "FP32", data.shape, data.tobytes())


def in_region(region: str, count: int, offset: int = 0, nbytes: int = -1) -> LaneTensor:
    """Return a tensor of FP32 elements in a region."""
    nbytes = count * 4 if nbytes < 0 else nbytes
    return LaneTensor("IN", "FP32", (count,), LaneWindow(region, offset, nbytes))


def request(number: int, *inputs: LaneTensor, **more: Any) -> LaneRequest:
    return LaneRequest(number, inputs, **more)


def command(text: str, number: int = 1, **more: Any) -> LaneRequest:
    """For the model `misbehaving`."""
    data = text.encode()
    element = len(data).to_bytes(4, "little") + data
    return LaneRequest(number, (LaneTensor("COMMAND", "BYTES", (1,), element),), **more)
