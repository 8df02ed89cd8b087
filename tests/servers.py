"""Servers that must leave nothing behind, their settings and clients; programs beside them."""

import contextlib
import http.client
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from shmserve.client import InferenceError
from tests.running_server import ROOT, WATCHDOG_S, RunningServer

SMALL: dict[str, Any] = {"http_workers": 1, "grpc_processes": 0}


def only(models: str) -> dict[str, Any]:
    """Return settings to load these models at the start; clients may load others."""
    return {"model_control": "explicit", "load_models": models}


class Server(RunningServer):
    """A service that must leave nothing; checked only if the `with` block succeeds."""

    def address(self, protocol: str = "http") -> str:
        """Return HOST:PORT of HTTP, or of gRPC."""
        return self.grpc_address if protocol == "grpc" else f"{self.http_host}:{self.http_port}"

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if error == (None, None, None):
            left = self.leaks()
            assert not left, left


class Starting(Server):
    """A `Server` whose `with` block begins before it is ready."""

    def __enter__(self) -> Self:
        self.start(wait_ready=False)
        return self


def failed_start(server: RunningServer) -> str:
    """Return the log of a server whose start must fail and leave nothing."""
    if server.master is None:
        server.start(wait_ready=False)
    assert server.master is not None
    try:
        status = server.master.wait(WATCHDOG_S)
        left = server.leaks()
    finally:
        server.kill_all()
    assert status != 0, status
    assert not left, left
    return server.log()


@contextlib.contextmanager
def inference_error(status: int, words: str | None = None) -> Iterator[None]:
    """Expect an error of `shmserve.client` with this status."""
    with pytest.raises(InferenceError, match=words) as caught:
        yield
    assert caught.value.status == status, caught.value


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float = WATCHDOG_S) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def served(*arguments: Any, **settings: Any) -> Any:
    """Return a fixture: a `Server` with all instances running, for the tests of one module."""

    @pytest.fixture(scope="module")
    def server() -> Iterator[Server]:
        with Server(*arguments, **settings) as running:
            running.wait_instances()
            yield running

    return server


def completed(
    *command: str | Path,
    environ: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout_s: float = 150.0,  # below pytest's timeout of 180 s
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with any status. `environ`: the whole environment."""
    words = [str(word) for word in command]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout_s, env=environ, cwd=cwd
    )


@contextlib.contextmanager
def beside(
    *command: str | Path, environ: Mapping[str, str] | None = None, given: str = ""
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the first line that a Python program prints, and the program, which is then killed.
    `environ`: the whole environment; `given`: what the program reads."""
    words = [sys.executable, *map(str, command)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, env=environ, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        print(given, end="", file=process.stdin, flush=True)
        yield process.stdout.readline(), process
    finally:
        process.kill()
        process.communicate()


def output(*command: str | Path, **options: Any) -> str:
    """Return the output of a command that must succeed. `options`: of `completed`."""
    done = completed(*command, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def python(*words: str | Path, **options: Any) -> str:
    """Return the output of a Python program that must succeed."""
    return output(sys.executable, *words, **options)


def triton(*words: str | Path, **options: Any) -> None:
    """Run a function of tests/integration/triton_program.py in a process of its own."""
    python(ROOT / "tests/integration/triton_program.py", *words, **options)


def run_shmserve(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of `shmserve`, with any status."""
    return completed(sys.executable, "-m", "shmserve", *words, **options)
