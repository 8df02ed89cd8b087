"""Disturbances of a service: one table, for `make chaos` and its short form.

A disturbance is a context manager: it lasts as long as the caller stays in the context.
"""

import contextlib
import os
import random
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.frontends.http2 import PREFACE
from tests.crash.faults import Fault, killed, stopped
from tests.crash.reload import changed
from tests.integration.lane_client import Program, floats, request
from tests.running_server import RunningServer, binary_request

ROLES = (
    *("http worker", "grpc", "executor echo", "executor pair", "executor gathered"),
    *("template", "coordinator", "supervisor"),
)
_LEFT = 256 << 10  # bytes of a filled file system
_CLIENTS = 16


@dataclass
class Scene:
    """The service, the random generator, and the setting for disturbances.

    `shm` and `state`: folders on our own small file systems. Empty if there are none, because a
    test must not fill the machine's file systems.
    """

    server: RunningServer
    rng: random.Random
    clock: Path
    shm: str = ""
    state: str = ""
    turn: int = 0


Disturbance = Callable[[Scene], contextlib.AbstractContextManager[object]]


def _befalling(role: str, fault: Fault) -> Disturbance:
    """Return a fault of one process of a role, drawn anew each time."""

    def befall(scene: Scene) -> contextlib.AbstractContextManager[object]:
        server = scene.server
        pids = server.pids(role) if role != "master" else [server.master.pid]
        # without pids, the last process of the role is not back yet
        return fault(scene.rng.choice(pids)) if pids else contextlib.nullcontext()

    return befall


@contextlib.contextmanager
def _filled(folder: str) -> Iterator[None]:
    """Fill a file system almost completely with one file."""
    space = os.statvfs(folder)
    fd, path = tempfile.mkstemp(prefix="chaos-filling-", dir=folder)
    try:
        # another process was quicker: the file system is full anyway
        with contextlib.suppress(OSError):
            os.posix_fallocate(fd, 0, max(1, space.f_bavail * space.f_frsize - _LEFT))
        yield
    finally:
        os.close(fd)
        os.unlink(path)


def full_shm(scene: Scene) -> contextlib.AbstractContextManager[None]:
    return _filled(scene.shm)


def full_state(scene: Scene) -> contextlib.AbstractContextManager[None]:
    return _filled(scene.state)


@contextlib.contextmanager
def clock_jump(scene: Scene) -> Iterator[None]:
    """The wall clock is wrong by up to a month, and right again."""
    with scene.clock.open("r+b", buffering=0) as file:
        file.write(struct.pack("<d", scene.rng.uniform(-1, 1) * 30 * 86400))
        try:
            yield
        finally:
            file.seek(0)
            file.write(struct.pack("<d", 0.0))


def _head(floats: int) -> tuple[bytes, bytes]:
    body, fields = binary_request(np.ones(floats, np.float32))
    lines = ["POST /v2/models/echo/infer HTTP/1.1", "Host: localhost"]
    lines += [f"{key}: {value}" for key, value in fields.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode(), body


@contextlib.contextmanager
def _connections(scene: Scene, address: tuple[str, int] | None = None) -> Iterator[list[Any]]:
    """Open connections to HTTP or to `address`. Failed connections are left out."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(_CLIENTS):
            with contextlib.suppress(OSError):
                place = address or (scene.server.http_host, scene.server.http_port)
                made.append(stack.enter_context(socket.create_connection(place, 5)))
        yield made


@contextlib.contextmanager
def half_requests(scene: Scene) -> Iterator[None]:
    """Send heads and bodies that are cut at random places."""
    head, body = _head(100_000)
    with _connections(scene) as socks:
        for sock in socks:
            whole = head + body
            with contextlib.suppress(OSError):
                cut = scene.rng.choice((len(head), len(whole)))
                sock.sendall(whole[: scene.rng.randrange(1, cut)])
        yield


@contextlib.contextmanager
def half_calls(scene: Scene) -> Iterator[None]:
    """Send gRPC connections that stop within the first frames."""
    host, port = scene.server.grpc_address.split(":")
    with _connections(scene, (host, int(port))) as socks:
        for sock in socks:
            whole = PREFACE + bytes(9) + b"\0\0\x40\1\0\0\0\0\1" + bytes(20)
            with contextlib.suppress(OSError):
                sock.sendall(whole[: scene.rng.randrange(1, len(whole))])
        yield


@contextlib.contextmanager
def never_reading(scene: Scene) -> Iterator[None]:
    """Request large answers over HTTP and lanes, and never read."""
    head, body = _head(100_000)
    with _connections(scene) as socks, contextlib.ExitStack() as stack:
        for sock in socks:
            sock.settimeout(0.2)  # the server stops reading, too
            with contextlib.suppress(OSError):
                for _ in range(8):
                    sock.sendall(head + body)
        # other disturbances may cause a refusal
        with contextlib.suppress(OSError, AssertionError):
            program = stack.enter_context(Program(scene.server.run_dir))
            lane = program.lane("echo")
            stack.callback(lane.close)
            lane.sock.settimeout(0.2)
            for number in range(200):
                lane.send(request(number, floats(*range(500))))
        yield


@contextlib.contextmanager
def slow_sending(scene: Scene) -> Iterator[None]:
    """Clients that send one byte now and then."""
    head, body = _head(1000)
    with _connections(scene) as socks:
        for sock in socks:
            sock.settimeout(1)
            with contextlib.suppress(OSError):
                sock.sendall((head + body)[: scene.rng.randrange(len(head), len(head + body))])
        yield
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.sendall(b"\0")


@contextlib.contextmanager
def reloading(scene: Scene) -> Iterator[None]:
    """Replace a model; load and unload another.

    A coordinator that dies meanwhile may not answer, so the clients' requests show the result.
    """
    scene.turn += 1
    with contextlib.suppress(OSError):
        scene.server.control("load", "echo", config=changed(scene.turn))
        scene.server.control("load", "other")
    yield
    with contextlib.suppress(OSError):
        scene.server.control("unload", "other")


KILLS: dict[str, Disturbance] = {f"kill {role}": _befalling(role, killed) for role in ROLES}
OTHERS: dict[str, Disturbance] = {
    **{f"stop {role}": _befalling(role, stopped) for role in (*ROLES, "master")},
    "full /dev/shm": full_shm,
    "full state": full_state,
    "clock jump": clock_jump,
    "half requests": half_requests,
    "half calls": half_calls,
    "clients that do not read": never_reading,
    "slow clients": slow_sending,
    "reload": reloading,
}
