"""Programs in C on libshmserve: builds and runs them, and a peer that answers with any packets."""

import array
import functools
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from shmserve.protocol.control import client_messages as control
from tests.running_server import ROOT, WATCHDOG_S

LIBRARY = ROOT / "client/c"
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-Wconversion", "-pthread")
MEMORY = "-fsanitize=address,undefined"
THREADS = "-fsanitize=thread"
_TRY = "int main(void) { return 0; }"


def cc(*arguments: str | Path, compiler: str = "cc") -> subprocess.CompletedProcess[str]:
    """Run the compiler. Raise AssertionError with its output if it fails."""
    command = [compiler, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_S)
    assert not done.returncode, done.stderr
    return done


@functools.cache
def sanitizer(flag: str) -> tuple[str, ...]:
    """Return flags for a sanitizer, or none if the compiler or the kernel does not have it."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "try.c"), Path(folder, "try")
        source.write_text(_TRY)
        try:
            cc(flag, "-o", program, source)
            subprocess.run([program], check=True, timeout=WATCHDOG_S)
        except (AssertionError, subprocess.SubprocessError):
            return ()
    return (flag, "-fno-sanitize-recover=all")


def checks(folder: Path, *flags: str) -> Path:
    """Build `client/c/tests/checks.c` with the library's source."""
    program = folder / "checks"
    library = folder / "shmserve.o"
    cc(*STRICT, "-O1", "-g", *flags, "-c", "-o", library, LIBRARY / "shmserve.c")
    source = LIBRARY / "tests/checks.c"
    cc(
        "-std=c11",
        "-Wall",
        "-Werror",
        "-O1",
        "-g",
        *flags,
        "-o",
        program,
        source,
        library,
        "-pthread",
    )
    return program


class CProgram:
    """A running program, whose output is read in lines. Killed at the end of the `with` block."""

    def __init__(self, *command: str | Path, environ: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def tell(self) -> None:
        """Have the program, which waits for a line of its input, go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> list[str]:
        """Close the program's input, wait for success, and return the remaining lines."""
        out, err = self.process.communicate(timeout=WATCHDOG_S)
        assert self.process.returncode == 0, f"{out}\n{err}"
        return out.splitlines()

    def __enter__(self) -> "CProgram":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.communicate()


def run(*command: str | Path, environ: Mapping[str, str] | None = None) -> list[str]:
    """Run a program, which must succeed, and return its lines."""
    with CProgram(*command, environ=environ) as program:
        return program.end()


class FakePeer:
    """Server that answers each question, by the name of its message, with given packets.

    `replies`: packet by name; empty: no reply. A question without entry ends the connection. The
    reply to "OpenLane" has a lane's descriptor.
    `questions`: decoded messages of the client socket, in the order in which they came.
    `lane`: packets sent at once for each packet that comes over a lane; an empty packet closes the
    lane. `descriptors`: how many descriptors ride along with each reply, and with each packet of
    lanes.
    """

    def __init__(
        self, replies: Mapping[str, bytes], lane: tuple[bytes, ...], descriptors: int = 0
    ) -> None:
        self._replies = replies
        self._lane = lane
        self._descriptors = descriptors
        self.questions: list[list[Any]] = []
        self._sockets: list[socket.socket] = []
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    @contextmanager
    def listening(self, folder: Path) -> Iterator[Path]:
        """Serve at a path in the folder."""
        path = folder / "client.sock"
        listener = self._kept(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(str(path))
        listener.listen()
        self._start(self._accept, listener)
        try:
            yield path
        finally:
            for sock in self._sockets:
                with _ignored():
                    sock.shutdown(socket.SHUT_RDWR)
            for thread in self._threads:
                thread.join(WATCHDOG_S)
            for sock in self._sockets:
                sock.close()
            os.unlink(path)

    def _kept(self, sock: socket.socket) -> socket.socket:
        self._sockets.append(sock)
        return sock

    def _start(self, serve: object, sock: socket.socket) -> None:
        thread = threading.Thread(target=serve, args=(sock,))  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with _ignored():
            while True:
                self._connections.append(self._kept(listener.accept()[0]))
                self._start(self._answer, self._connections[-1])

    def hang_up(self) -> None:
        """End all connections. New ones are taken."""
        for sock in self._connections:
            with _ignored():
                sock.shutdown(socket.SHUT_RDWR)

    def _answer(self, sock: socket.socket) -> None:
        with _ignored():
            while True:
                question, fds, _, _ = socket.recv_fds(sock, 1 << 17, 4)
                for fd in fds:
                    os.close(fd)
                if not question:
                    break
                self.questions.append(msgspec.msgpack.decode(question))
                name = self.questions[-1][0]
                if name not in self._replies:
                    break
                if not self._replies[name]:
                    continue
                if name == "OpenLane":
                    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    self._start(self._serve_lane, self._kept(ours))
                    with theirs:
                        self._send(sock, self._replies[name], theirs.fileno())
                else:
                    self._send(sock, self._replies[name])
        sock.shutdown(socket.SHUT_RDWR)

    def _serve_lane(self, sock: socket.socket) -> None:
        with _ignored():
            while sock.recv(1 << 17):
                for packet in self._lane:
                    if not packet:
                        sock.shutdown(socket.SHUT_RDWR)
                        return
                    self._send(sock, packet)

    def _send(self, sock: socket.socket, packet: bytes, *fds: int) -> None:
        fds += (0,) * self._descriptors
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        sock.sendmsg([packet], [rights] if fds else [])


GOOD: dict[str, bytes] = {
    "ClientHello": control.encode(control.ServerHello(1, lanes=True, models=True)),
    "DescribeModel": control.encode(
        control.ModelDescribed("3", (control.DescribedTensor("IN", "FP32", (-1,)),), (), False)
    ),
    "RegisterMemfd": control.encode(control.Ok()),
    "Unregister": control.encode(control.Ok()),
    "OpenLane": control.encode(control.LaneOpened("1", "m-1-0", False, 10**9)),
}


class _ignored:
    """Context that ignores the end of a socket."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, OSError)
