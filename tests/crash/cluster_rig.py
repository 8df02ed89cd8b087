"""Cluster for drills: several Ray nodes on this machine, and a HAProxy in front of their services.

Every process listens on 127.0.0.1. All files are in one folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

# Before Ray is imported: disable usage reports, and use only the loopback address
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
# Clients of this Ray need a token. Without these variables Ray would keep a token in the home
# folder.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
# Processes are found by their environment, which setting a process title may overwrite
os.environ["SPT_NOENV"] = "1"

from shmserve.cluster import cluster_file, commands
from shmserve.cluster.controller import Status
from shmserve.cluster.haproxy_socket import Balancer
from shmserve.errors import Unavailable
from tests.model_files import model_maker
from tests.running_server import free_port, is_running, marked, wait_until
from tests.servers import run_shmserve

_HOST = "127.0.0.1"
_MIB = 1 << 20
_STORE = 80 * _MIB  # Ray's object store, which is almost unused
_END_S = 60.0

CONFIG = """backend: "python"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { count: 1 } ]
"""
CODE = """import time


class Model:
    def __init__(self, context):
        pass

    def infer(self, request):
        time.sleep(%f)
        source = request.input("IN")
        request.output("OUT", source.shape)[...] = source + 1
"""


class ClusterRig:
    """Cluster as a context manager.

    `models`: memory in MiB, replicas and most replicas, by name. Each model runs for `run_s`.
    Nodes have `room` MiB.
    """

    def __init__(self, models: dict[str, tuple[int, int, int]], room: int, run_s: float) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.http_port, self.grpc_port = free_port(), free_port()
        self.room = room
        self._models = models
        self._run_s = run_s
        self._ray: Any = None
        self._cluster: Any = None
        self._haproxy: subprocess.Popen[bytes] | None = None
        self._nodes: dict[str, Any] = {}
        self.file_path = self.folder / "cluster.toml"
        self.balancer = Balancer(str(self.folder / "h.sock"))

    # ------------------------------------------------------------------ life

    def __enter__(self) -> ClusterRig:
        try:
            self._write_files()
            self._start_ray()
            self._start_haproxy()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        pids = self._all_pids()
        with contextlib.suppress(Exception):
            if self._ray is not None:
                self._ray.shutdown()
        with contextlib.suppress(Exception):
            if self._cluster is not None:
                self._cluster.shutdown()
        if self._haproxy is not None:
            self._haproxy.terminate()
            self._haproxy.wait(_END_S)
        kill(pids | self._all_pids())
        wait_until(lambda: not any(map(is_running, pids)), "processes are left", _END_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_files(self) -> None:
        for name in self._models:
            model_maker(self.folder / "models")(CODE % self._run_s, CONFIG, name)
        tables = "".join(
            f'[models.{name}]\nmemory_bytes = "{memory}MiB"\nreplicas = {least}\n'
            f'max_replicas = {most}\nqueue_s = "5ms"\nup_s = 1\ndown_s = 600\n'
            for name, (memory, least, most) in self._models.items()
        )
        self.file_path.write_text(
            f'interval_s = "500ms"\nnode_timeout_s = 10\ndrain_s = 1\n'
            f'[nodes]\nresource = "model_memory_mib"\n'
            f'[service]\nmodel_repository = ["{self.folder}/models"]\n'
            f'run_dir = "{self.folder}"\nhttp_port = 0\ngrpc_port = 0\nhttp_workers = 1\n'
            f'[haproxy]\nsockets = ["{self.folder}/h.sock"]\nslots = 6\ncheck_s = "500ms"\n'
            f'http_bind = "{_HOST}:{self.http_port}"\ngrpc_bind = "{_HOST}:{self.grpc_port}"\n'
            + tables
        )
        self.file = cluster_file.read(str(self.file_path))

    def _start_ray(self) -> None:
        os.environ["RAY_TMPDIR"] = str(self.folder)
        (self.folder / "ray").mkdir()
        (self.folder / "plasma").mkdir()
        import ray
        from ray.cluster_utils import Cluster

        self._ray = ray
        self._cluster = Cluster()
        self._cluster.add_node(num_cpus=0, include_dashboard=False, **self._node_words())
        ray.init(
            address=self._cluster.address,
            namespace="shmserve",
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address=_HOST,
        )

    def _node_words(self) -> dict[str, Any]:
        return {
            "node_ip_address": _HOST,
            "object_store_memory": _STORE,
            "plasma_directory": str(self.folder / "plasma"),
        }

    def _start_haproxy(self) -> None:
        config = self.folder / "haproxy.cfg"
        config.write_text(self.command("haproxy"))
        self._haproxy = subprocess.Popen(
            ["haproxy", "-db", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=(self.folder / "haproxy.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        wait_until((self.folder / "h.sock").exists, "the balancer has no socket")

    # ------------------------------------------------------------------ operations

    def command(self, *words: str) -> str:
        """Return the output of ``shmserve cluster``."""
        done = run_shmserve("cluster", *words, self.file_path, timeout_s=240)
        if done.returncode == 2:
            raise RuntimeError(done.stderr)
        return done.stdout

    def add_node(self) -> str:
        """Start a node and return the node's id."""
        node = self._cluster.add_node(
            num_cpus=0, resources={"model_memory_mib": self.room}, **self._node_words()
        )
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def kill_node(self, name: str) -> None:
        """Kill every process of a node at once, as when a host loses power."""
        node = self._nodes.pop(name)
        raylet = node.all_processes["raylet"][0].process.pid
        kill(descendants(raylet) | self.service_pids(name) | {raylet})
        self._cluster.remove_node(node, allow_graceful=False)

    def service_pids(self, name: str) -> set[int]:
        """Processes of the service of a node."""
        return marked(f"SHMSERVE_RUN_DIR={self.folder}/shmserve-{name[:12]}")

    def up(self) -> Status:
        return commands.up(self.file)

    def status(self) -> Status:
        """Return the controller's status; wait if the controller is being restarted."""
        deadline = time.monotonic() + _END_S
        while True:
            try:
                return commands.status(self.file)
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def ready(self) -> dict[str, int]:
        return commands.ready(self.status())

    def wait_ready(self, replicas: dict[str, int], timeout_s: float = 90.0) -> None:
        """Wait until each of these models is ready on at least so many nodes."""
        try:
            wait_until(lambda: self._has(replicas), f"{replicas}", timeout_s)
        except TimeoutError as ex:
            raise TimeoutError(f"{ex}: {self.status()}\n{self.logs()}") from None

    def _has(self, replicas: dict[str, int]) -> bool:
        ready = self.ready()
        return all(ready.get(name, 0) >= number for name, number in replicas.items())

    def kill_controller(self) -> None:
        """Kill the controller's process and wait until the process is gone; Ray starts another.

        Ray's own `kill` returns before the process ends, which may still answer.
        """
        pids: set[int] = set()

        def found() -> bool:
            pids.update(filter(_is_controller, self._all_pids()))
            return bool(pids)

        wait_until(found, "no controller runs", _END_S)
        kill(pids)
        wait_until(lambda: not any(map(is_running, pids)), "the controller does not end", _END_S)

    def answered_by(self, port: int) -> int:
        """Return the balancer's count of 2xx answers from the service with this HTTP port."""
        servers = {
            (row["be_name"], row["srv_name"])
            for row in _rows(self.balancer.ask(["show servers state"]).partition("\n")[2], " ")
            if row["srv_port"] == str(port)
        }
        stats = _rows(self.balancer.ask(["show stat"]), ",")
        rows = [row for row in stats if (row["pxname"], row["svname"]) in servers]
        return sum(int(row["hrsp_2xx"] or 0) for row in rows)

    def balancer_counts(self) -> dict[str, int]:
        """Retries and requests given to another server, of all backends."""
        rows = _rows(self.balancer.ask(["show stat"]), ",")
        backends = [row for row in rows if row["svname"] == "BACKEND"]
        return {what: sum(int(row[what] or 0) for row in backends) for what in ("wretr", "wredis")}

    def logs(self) -> str:
        """Return the ends of the logs of actors, services and the balancer."""
        paths = [*self.folder.glob("ray/session_2*/logs/worker-*.err"), self.folder / "haproxy.log"]
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in paths
            if path.exists() and path.stat().st_size
        )

    def _all_pids(self) -> set[int]:
        """Return the pids of all processes that were started for this cluster."""
        return marked(f"RAY_TMPDIR={self.folder}") - _ancestors()


def _is_controller(pid: int) -> bool:
    """Return True if Ray calls this process the controller: `ray::controller`, or by its class."""
    with contextlib.suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        return title.startswith((b"ray::controller", b"ray::ControllerActor"))
    return False


def kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> set[int]:
    parents: dict[int, list[int]] = {}
    for child, parent in _parents().items():
        parents.setdefault(parent, []).append(child)
    found: set[int] = set()
    ahead = [pid]
    while ahead:
        children = parents.get(ahead.pop(), [])
        found.update(children)
        ahead += children
    return found


def _ancestors() -> set[int]:
    parents, pid, found = _parents(), os.getpid(), set()
    while pid:
        found.add(pid)
        pid = parents.get(pid, 0)
    return found


def _parents() -> dict[int, int]:
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found[int(entry)] = int(
                Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
            )
    return found


def _rows(text: str, separator: str) -> list[dict[str, str]]:
    lines = [line for line in text.strip().splitlines() if line]
    names = lines[0].lstrip("# ").split(separator)
    return [dict(zip(names, line.split(separator), strict=False)) for line in lines[1:]]


def seconds_since(begun: float) -> float:
    return round(time.monotonic() - begun, 2)
