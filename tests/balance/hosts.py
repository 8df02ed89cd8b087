"""Hosts of a small network: services and HAProxy, each in a separate network namespace.

The network is closed: programs here reach HAProxy and each service over Unix sockets.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.model_files import model_maker
from tests.needs import ip
from tests.running_server import ROOT, WATCHDOG_S, RunningServer, wait_until
from tests.servers import UnixConnection

CONFIGS = (ROOT / "deploy/haproxy/haproxy.cfg", ROOT / "deploy/haproxy/grpc_per_call.cfg")
NAMES = ("host1", "host2", "host3")
BACKENDS = ("shmserve_http", "shmserve_grpc", "shmserve_grpc_per_call")
_BALANCER = "10.0.0.1/24"
# Tells which requests have begun here, and takes as long as the host is slow.
_MODEL = """
import os, time
import numpy as np

HOST, FOLDER = os.environ["DRILL_HOST"], os.environ["DRILL_FOLDER"]

class Model:
    def __init__(self, context):
        path = os.path.join(FOLDER, "begun-" + HOST)
        self.begun = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def infer(self, request):
        os.write(self.begun, b"%d\\n" % int(request.input("ID")[0]))
        time.sleep(0.3 if os.path.exists(os.path.join(FOLDER, "slow-" + HOST)) else 0.02)
        return {"ID": request.input("ID")[:1].copy(), "HOST": np.array([HOST.encode()], object)}
"""
_MODEL_CONFIG = """
backend: "python"
input [ { name: "ID" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [ { name: "ID" data_type: TYPE_INT64 dims: [ 1 ] },
         { name: "HOST" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { count: 2 } ]
"""


class InsideServer(RunningServer):
    """A server in a network namespace, which is asked over a Unix socket."""

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,  # type: ignore[override]
        headers: Mapping[str, str] | None = None,
        timeout_s: float = WATCHDOG_S,
    ) -> tuple[int, dict[str, str], bytes]:
        with contextlib.closing(UnixConnection(self.unix_path, timeout_s)) as connection:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()


class Host(InsideServer):
    """Service in a namespace, at 10.0.0.11 and so on, as in the configuration."""

    def __init__(self, number: int, folder: str) -> None:
        self.name = NAMES[number]
        self.namespace = f"shmserve-{self.name}-{os.getpid()}"
        address = f"10.0.0.{11 + number}"
        super().__init__(
            os.path.join(folder, "repository"),
            {"DRILL_HOST": self.name, "DRILL_FOLDER": folder},
            within=("ip", "netns", "exec", self.namespace),
            agent_bind=f"{address}:8009",
            http_workers=1,
            pool_bytes="64MiB",
            arena_bytes="4MiB",
            max_caller_share=1,
            max_queue=4,
            dashboard="false",
        )
        binds = {"HTTP_BIND": f"{address}:8000,unix:{self.unix_path}"}
        binds["GRPC_BIND"] = f"{address}:8001"
        self.environ |= {f"SHMSERVE_{name}": bind for name, bind in binds.items()}

    def signal_all(self, number: signal.Signals) -> None:
        """To every process of the host; twice, because some may be forked meanwhile."""
        for _ in range(2):
            for pid in self.everybody():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def everybody(self) -> list[int]:
        """Return the pids of all processes in the host's namespace."""
        command = ["ip", "netns", "pids", self.namespace]
        return [int(pid) for pid in subprocess.check_output(command, timeout=20).split()]

    def kill(self) -> None:
        """SIGKILL for every process, as if the host had gone."""
        self.signal_all(signal.SIGKILL)
        assert self.master is not None
        self.master.wait(WATCHDOG_S)
        wait_until(lambda: not self.everybody(), "processes are left")


class Balancer:
    """HAProxy with the shipped configuration, and Unix sockets `http`, `grpc`, `grpc_per_call`."""

    def __init__(self, folder: str) -> None:
        self.namespace = f"shmserve-balancer-{os.getpid()}"
        self._folder = folder
        names = ("http.sock", "grpc.sock", "grpc-per-call.sock", "admin.sock")
        self.http, self.grpc, self.grpc_per_call, self._admin = (
            os.path.join(folder, name) for name in names
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        path = Path(self._folder) / "haproxy.cfg"
        text = "".join(config.read_text() for config in CONFIGS)
        for there, here in {
            "/run/haproxy/admin.sock": self._admin,
            "log /dev/log local0": "log stdout format raw local0",
            "    bind :8000\n": f"    bind :8000\n    bind unix@{self.http}\n",
            "    bind :8001\n": f"    bind unix@{self.grpc}\n",
            "    bind :8011 proto h2\n": f"    bind unix@{self.grpc_per_call} proto h2\n",
        }.items():
            assert text.count(there) == 1, there
            text = text.replace(there, here)
        path.write_text(text)
        with (Path(self._folder) / "haproxy.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, "haproxy", "-db", "-f", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(self._runs, "HAProxy does not run")
        wait_until(lambda: all(map(self.serves, NAMES)), f"hosts are not up: {self.table()}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(WATCHDOG_S)

    def _runs(self) -> bool:
        try:
            return bool(self.tell("show info"))
        except OSError:  # HAProxy makes the socket's file before listening
            return False

    def log(self) -> str:
        return (Path(self._folder) / "haproxy.log").read_text()

    def tell(self, command: str) -> str:
        """Return HAProxy's answer to a command of the runtime API."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(self._admin)
            sock.sendall(f"{command}\n".encode())
            return sock.makefile().read()

    def table(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return HAProxy's statistics of each server, by backend and name."""
        names, *rows = self.tell("show stat").removeprefix("# ").strip().splitlines()
        made = (dict(zip(names.split(","), row.split(","), strict=False)) for row in rows)
        return {(row["pxname"], row["svname"]): row for row in made}

    def states(self, host: str) -> set[str]:
        """Return the states of a host in all backends: UP, DOWN, NOLB, DRAIN."""
        table = self.table()
        return {table[backend, host]["status"] for backend in BACKENDS}

    def serves(self, host: str) -> bool:
        """Return True if HAProxy sends requests to the host in all backends."""
        return self.states(host) == {"UP"}

    def set(self, host: str, state: str) -> None:
        """``drain`` or ``ready``, in all backends."""
        for backend in BACKENDS:
            said = self.tell(f"set server {backend}/{host} state {state}")
            assert not said.strip(), said

    def wait_idle(self, host: str) -> None:
        """Wait until the host has answered all requests.

        Connections of gRPC stay; the host tells their clients to go elsewhere once it stops.
        """

        def idle() -> bool:
            table = self.table()
            return not any(int(table[backend, host]["scur"]) for backend in BACKENDS[::2])

        wait_until(idle, f"requests at {host} do not end")


@contextlib.contextmanager
def network() -> Iterator[tuple[Balancer, list[Host]]]:
    """Three ready services and HAProxy before them. Afterwards all is removed."""
    folder = tempfile.mkdtemp(prefix="shmserve-balance-")
    model_maker(Path(folder) / "repository")(_MODEL, _MODEL_CONFIG, "work")
    balancer = Balancer(folder)
    hosts = [Host(number, folder) for number in range(len(NAMES))]
    namespaces = [balancer.namespace, *(host.namespace for host in hosts)]
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for namespace in namespaces:
            assert ip("netns", "add", namespace), namespace
            stack.callback(ip, "netns", "delete", namespace)
        _connect(balancer.namespace, hosts)
        for host in hosts:
            stack.callback(host.kill_all)
            host.start(wait_ready=False)
        for host in hosts:
            host.wait_ready()
            host.wait_instances()
        stack.callback(balancer.stop)
        balancer.start()
        yield balancer, hosts


def _connect(balancer: str, hosts: list[Host]) -> None:
    """Create a bridge in the balancer's namespace, and a cable from each host to the bridge."""
    for words in (
        ("link", "add", "bridge", "type", "bridge"),
        ("address", "add", _BALANCER, "dev", "bridge"),
        ("link", "set", "bridge", "up"),
        ("link", "set", "lo", "up"),
    ):
        assert ip("-n", balancer, *words), words
    for number, host in enumerate(hosts):
        cable = ("peer", "name", "eth0", "netns", host.namespace)
        assert ip("-n", balancer, "link", "add", host.name, "type", "veth", *cable)
        assert ip("-n", balancer, "link", "set", host.name, "master", "bridge", "up")
        for words in (
            ("address", "add", f"10.0.0.{11 + number}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            assert ip("-n", host.namespace, *words), words


def begun(folder: str) -> list[tuple[int, str]]:
    """Return the requests that a model has begun, with the host; a second run is a second entry."""
    return [(int(line), name) for name in NAMES for line in _lines(Path(folder) / f"begun-{name}")]


def _lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


@contextlib.contextmanager
def slow(folder: str, host: str) -> Iterator[float]:
    """Make a host fifteen times slower; yield the start time."""
    mark = Path(folder) / f"slow-{host}"
    mark.touch()
    try:
        yield time.monotonic()
    finally:
        mark.unlink()
