"""A real shmserve for tests: gunicorn, coordinator, supervisor, executors, and a check for leaks.

    with RunningServer(repository=path) as server:
        requests.get(server.url("/v2"))
    assert server.leaks() == []

Processes of a server have its run directory in their environment. So leaks of this server are told
apart from other servers on the machine.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import itertools
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from shmserve.cli.operating import show
from shmserve.errors import Unavailable

WATCHDOG_S = 90.0
_UNLINKED = ("keeper", "master", "template")  # roles without a link to the coordinator
_SIDE_BY_SIDE = 16  # pytest-xdist workers with distinct ports
# a segment has a name for microseconds, or longer if its process gets no processor time
_BIRTH_S = 10.0
ROOT = Path(__file__).parents[1]


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = WATCHDOG_S) -> None:
    """Poll until `condition` is true. The timeout is a watchdog, not an assertion about speed.

    Raises:
        TimeoutError: the condition never became true; the text has `what`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s in vain: {what}")
        time.sleep(0.02)


def free_port() -> int:
    """Return a free TCP port on 127.0.0.1.

    No port is returned twice in one process, nor in parallel processes of the test session. The
    port lies below the kernel's ephemeral ports. A client that repeatedly connects to a port
    before the server listens could otherwise be given this port as its own, connect to itself, and
    keep the server out.
    """
    for port in _PORTS:
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("unreachable: they go round")


def _ports() -> Iterator[int]:
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    first, end = 10_000, max(11_000, int(ephemeral.split()[0]))
    first += int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _SIDE_BY_SIDE
    ports = range(first, end, _SIDE_BY_SIDE)
    start = random.randrange(len(ports))
    return itertools.cycle([*ports[start:], *ports[:start]])


_PORTS = _ports()
_REMOVALS: list[Callable[[], object]] = []


def folder_of(owner: object) -> str:
    """Return a temporary folder, removed with its owner or at the end of this process."""
    folder = tempfile.mkdtemp(prefix="shmserve-")
    _REMOVALS.append(weakref.finalize(owner, _remove, folder, os.getpid()))
    return folder


def remove_folders() -> None:
    """Remove all these folders now, even if references to the owners remain."""
    for removal in _REMOVALS:
        removal()
    _REMOVALS.clear()


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # a fork that ends must not remove the folder
        shutil.rmtree(folder, ignore_errors=True)


# started servers whose log still exists
STARTED: weakref.WeakSet[RunningServer] = weakref.WeakSet()


class RunningServer:
    """A service with a separate run directory.

    Args:
        settings: keys of `config.Settings`.
        within: command that runs another command, such as ``ip netns exec <name>``.
        output: descriptor for the server's output; None: a file.
        kept: True: ``shmserve serve`` starts the service with a keeper, which is then `master`;
            False: gunicorn starts the service.
    """

    def __init__(
        self,
        repository: str | Path = ROOT / "workers",
        environ: Mapping[str, str] | None = None,
        gunicorn: tuple[str, ...] = (),
        within: tuple[str, ...] = (),
        output: int | None = None,
        kept: bool = False,
        **settings: object,
    ) -> None:
        self.run_dir = str(settings.get("run_dir") or folder_of(self))
        os.makedirs(self.run_dir, 0o700, exist_ok=True)
        self.mark = ""  # in the environment of this server's processes; "": `run_dir`
        self.http_host = "127.0.0.1"
        self.http_port = free_port()
        self.unix_path = os.path.join(self.run_dir, "http.sock")
        self.grpc_address = f"127.0.0.1:{free_port()}"
        self.log_path = Path(self.run_dir) / "log"
        self._gunicorn = gunicorn
        self.within = within
        self.pass_fds: list[int] = []
        self.options: tuple[str, ...] = ()  # of `shmserve serve`
        self._output = output
        self._kept = kept
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("SHMSERVE_")}
        values: dict[str, object] = {
            "run_dir": self.run_dir,
            "model_repository": repository,
            "http_bind": f"{self.http_host}:{self.http_port},unix:{self.unix_path}",
            "grpc_bind": self.grpc_address,
            "drain_timeout_s": 10,
            **settings,
        }
        self.environ.update({f"SHMSERVE_{k.upper()}": str(v) for k, v in values.items()})
        # A process that sets its title may overwrite its environment, which `processes` searches.
        self.environ["SPT_NOENV"] = "1"
        self.environ.update(environ or {})
        # processes of the server do not import from the working directory
        path = (self.environ.get("PYTHONPATH", ""), str(ROOT))
        self.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        # the client's context, if the server has TLS for HTTP
        self.tls: ssl.SSLContext | None = None
        self.master: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------ life

    def start(self, wait_ready: bool = True) -> None:
        """Start the service. By default, wait until all models are loaded and all processes
        linked."""
        STARTED.add(self)
        command = ["gunicorn", "-c", str(ROOT / "gunicorn.conf.py"), *self._gunicorn]
        command += ["shmserve.app"]
        if self._kept:
            command = ["shmserve", "serve", *self.options, "--", *self._gunicorn]
        with self.log_path.open("ab") as file:
            log = file if self._output is None else self._output
            self.master = subprocess.Popen(
                [*self.within, sys.executable, "-m", *command],
                cwd=ROOT,
                env=self.environ,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                pass_fds=self.pass_fds,
            )
        if wait_ready:
            self.wait_ready()
            self.wait_linked()

    def wait_ready(self) -> None:
        """Wait for the readiness endpoint.

        Raises:
            TimeoutError: the server never became ready; the text has the log's end.
        """
        try:
            wait_until(self.ready, "the server is not ready")
        except TimeoutError as ex:
            raise TimeoutError(f"{ex}\n{self.log()[-6000:]}") from None

    def ready(self) -> bool:
        """Return True if every model is loaded."""
        return self._healthy("ready")

    def lives(self) -> bool:
        """Return True if the server answers over HTTP, with or without models."""
        return self._healthy("live")

    def _healthy(self, state: str) -> bool:
        if self.master is not None and self.master.poll() is not None:
            raise RuntimeError(f"the server has ended: {self.master.returncode}\n{self.log()}")
        try:
            return self.get(f"/v2/health/{state}")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def stop(self) -> int:
        """Send SIGTERM and wait for all processes to end. Return the master's exit status."""
        assert self.master is not None
        if self.master.poll() is None:
            self.master.send_signal(signal.SIGTERM)
        status = self.master.wait(WATCHDOG_S)
        wait_until(lambda: not self.processes(), f"processes are left: {self.processes()}")
        return status

    def kill_all(self) -> None:
        """Send SIGKILL to every process of this server, also to processes started
        meanwhile."""

        def all_dead() -> bool:
            pids = self.processes()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        wait_until(all_dead, "processes live on")
        if self.master is not None:
            self.master.wait(WATCHDOG_S)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self.kill_all()

    # ------------------------------------------------------------- requests

    def request(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = WATCHDOG_S,
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request on a new connection. Return status, headers (lower case) and body."""
        place = (self.http_host, self.http_port)
        connection = http.client.HTTPConnection(*place, timeout=timeout_s)
        if self.tls is not None:
            connection = http.client.HTTPSConnection(*place, timeout=timeout_s, context=self.tls)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            fields = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, fields, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, Any]:
        status, _, body = self.request("GET", path)
        return status, json.loads(body) if body else None

    def infer(self, model: str, document: Any, **headers: str) -> tuple[int, Any]:
        """Return status and JSON of an inference with JSON tensors."""
        return self.post(f"/v2/models/{model}/infer", document, **headers)

    def post(self, path: str, document: Any, **headers: str) -> tuple[int, Any]:
        """Return status and JSON of the answer to a JSON document; None: the answer is empty."""
        status, _, answer = self.request("POST", path, json.dumps(document).encode(), headers)
        return status, json.loads(answer) if answer else None

    def index(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the rows of the repository's index."""
        status, rows = self.post("/v2/repository/index", fields)
        assert status == 200, rows
        return list(rows)

    def control(self, action: str, model: str, **parameters: Any) -> tuple[int, Any]:
        """Load or unload a model; return status and JSON, None for an empty answer."""
        path = f"/v2/repository/models/{model}/{action}"
        return self.post(path, {"parameters": parameters} if parameters else {})

    def infer_binary(self, model: str, array: Any, *others: Any, **names: str) -> tuple[bytes, Any]:
        """Return the bytes of the outputs, and the receipt, of an inference that must succeed.
        The arguments are those of `binary_request`."""
        body, headers = binary_request(array, *others, **names)
        headers["shmserve-receipt"] = "1"
        status, fields, answer = self.request("POST", f"/v2/models/{model}/infer", body, headers)
        assert status == 200, answer[:500]
        outputs = answer[int(fields["inference-header-content-length"]) :]
        return outputs, json.loads(fields["shmserve-receipt"])

    @property
    def base_url(self) -> str:
        return f"http://{self.http_host}:{self.http_port}"

    # ------------------------------------------------------------ inspection

    def show(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of ``shmserve show <table>``, waiting for a coordinator if need be.

        Raises:
            Unavailable: no coordinator has answered.
        """
        give_up = time.monotonic() + WATCHDOG_S
        while True:
            try:
                return show.ask(self.run_dir, table)
            except Unavailable:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.02)

    def wait_instances(self) -> None:
        """Wait until every instance of every model runs. Readiness needs one instance per model.

        Each instance's process is looked up, too: the coordinator may not know yet of a recent
        kill.
        """

        def all_run() -> bool:
            rows, alive = self.show("models"), self.processes()
            running = (
                r["instance_state"] == "READY" and r["pid"] in alive for r in rows if r["instance"]
            )
            return all(running) and all(row["state"] == "READY" for row in rows)

        wait_until(all_run, "instances are not ready")

    def wait_linked(self) -> None:
        """Wait until every process has a link to the coordinator, which readiness does not need.

        Without a link, a process lacks its final name and descriptors and does not hear the
        coordinator.
        """

        def all_linked() -> bool:
            linked = {row["pid"] for row in self.show("processes")}
            unlinked = {pid for role in _UNLINKED for pid in self.pids(role)}
            started = self.master.pid if self.master is not None else 0
            return set(self.processes()) - {started, *unlinked} <= linked

        wait_until(all_linked, "processes have no link")

    def wait_arenas(self) -> None:
        """Wait until every process that serves requests has its first memory."""

        def all_hold() -> bool:
            rows = [r for r in self.show("processes") if r["role"] in ("http", "grpc", "executor")]
            return all(row["held_bytes"] for row in rows)

        wait_until(all_hold, "processes have no arena")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_log(self, text: str) -> None:
        """Wait until the log has the text: processes write their lines a moment later."""
        wait_until(lambda: text in self.log(), f"the log has {text!r}")

    def processes(self) -> dict[int, str]:
        """Return the live processes of this server: pid to title."""
        titles: dict[int, str] = {}
        for pid in marked(self.mark or f"SHMSERVE_RUN_DIR={self.run_dir}"):
            with contextlib.suppress(OSError):  # it has ended
                title = Path(f"/proc/{pid}/cmdline").read_bytes()
                if is_running(pid):
                    titles[pid] = title.replace(b"\0", b" ").decode(errors="replace").strip()
        return titles

    def pids(self, title: str) -> list[int]:
        """Return the pids of processes whose title starts with ``shmserve: <title>``."""
        prefix = f"shmserve: {title}"
        return sorted(pid for pid, name in self.processes().items() if name.startswith(prefix))

    def leaks(self) -> list[str]:
        """Return the traces of a stopped server: names in /dev/shm, processes, sockets."""
        leaks = segments_left()
        leaks += [f"process {pid}: {title}" for pid, title in self.processes().items()]
        leaks += [
            f"{self.run_dir}/{name}"
            for name in os.listdir(self.run_dir)
            if name.endswith(".sock") and name != "http.sock"
        ]
        return leaks


def binary_request(array: Any, *others: Any, name: str = "IN") -> tuple[bytes, dict[str, str]]:
    """Return body and headers of an inference: an FP32 array in bytes, outputs in bytes, and other
    inputs in JSON."""
    tensor = {"name": name, "shape": list(array.shape), "datatype": "FP32"}
    binary = {**tensor, "parameters": {"binary_data_size": array.nbytes}}
    head = {"inputs": [*others, binary], "parameters": {"binary_data_output": True}}
    text = json.dumps(head).encode()
    return text + array.tobytes(), {"Inference-Header-Content-Length": str(len(text))}


def marked(word: str) -> set[int]:
    """Return the pids of other processes with this word in their environment."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # another user's process, or one that has ended
            if word.encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.add(int(entry))
    return found - {os.getpid()}


def is_running(pid: int) -> bool:
    """Return True if the process runs. A zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def segments_left() -> list[str]:
    """Return the names of segments, of any server, that stay for longer than a moment."""
    names, give_up = _segment_names(), time.monotonic() + _BIRTH_S
    while names and time.monotonic() < give_up:  # other servers may just be making segments
        time.sleep(0.02)
        names &= _segment_names()
    return [f"/dev/shm/{name}" for name in sorted(names)]


def _segment_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "shmserve." in name}


def open_fds(pid: int) -> int:
    """Return the number of open file descriptors of a process."""
    if pid == os.getpid():
        gc.collect()  # else descriptors left by earlier tests may be closed at any time
    return len(os.listdir(f"/proc/{pid}/fd"))


def rss_bytes(pid: int) -> int:
    """Return the private resident memory of a process, in bytes: anonymous pages only."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
