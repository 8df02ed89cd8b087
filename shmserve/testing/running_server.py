"""A real shmserve for tests: gunicorn, coordinator, supervisor, executors, and what is left.

    with RunningServer(repository=path) as server:
        requests.get(server.url("/v2"))
    assert server.leaks() == []

Every process of a server is found by the run directory in its environment, so that a
leak is told from what other servers on the machine do.
"""

from __future__ import annotations

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
_SIDE_BY_SIDE = 16  # processes of pytest-xdist whose ports are apart
_BIRTH_S = 10.0  # a segment has a name for microseconds, unless its process starves right then
ROOT = Path(__file__).parents[2]


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = WATCHDOG_S) -> None:
    """Poll until `condition` holds; a watchdog, not an assertion about speed.

    Raises:
        TimeoutError: it never did; says what.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s in vain: {what}")
        time.sleep(0.02)


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody has, none twice in one process, nor in those that run
    other tests of the same session.

    It lies below those the kernel gives out: a client that tries such a one again and again before
    anybody listens there can be given it as its own, connect to itself, and keep the server out.
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
    given_out = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    first, end = 10_000, max(11_000, int(given_out.split()[0]))
    first += int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _SIDE_BY_SIDE
    ports = range(first, end, _SIDE_BY_SIDE)
    start = random.randrange(len(ports))
    return itertools.cycle([*ports[start:], *ports[:start]])


_PORTS = _ports()


_REMOVALS: list[Callable[[], object]] = []


def folder_of(owner: object) -> str:
    """A temporary folder that is removed when its owner goes, at the latest with this process."""
    folder = tempfile.mkdtemp(prefix="shmserve-")
    _REMOVALS.append(weakref.finalize(owner, _remove, folder, os.getpid()))
    return folder


def remove_folders() -> None:
    """Remove them now, whoever still refers to their owners."""
    for removal in _REMOVALS:
        removal()
    _REMOVALS.clear()


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # not a fork that ends
        shutil.rmtree(folder, ignore_errors=True)


STARTED: weakref.WeakSet[RunningServer] = weakref.WeakSet()  # those that have a log, still


class RunningServer:
    """One service in a run directory of its own. `settings` are keys of `config.Settings`, `within`
    is a command that runs its command, such as ``ip netns exec <name>``, `output` a descriptor for
    its output instead of a file. `kept`: it is started by ``shmserve serve`` and so has a keeper,
    which then is `master`; False: by gunicorn."""

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
        self.http_host = "127.0.0.1"
        self.http_port = free_port()
        self.unix_path = os.path.join(self.run_dir, "http.sock")
        self.grpc_address = f"127.0.0.1:{free_port()}"
        self.log_path = Path(self.run_dir) / "log"
        self._gunicorn = gunicorn
        self._within = within
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
        # A process that sets its title may write it over its environment, by which we find it.
        self.environ["SPT_NOENV"] = "1"
        self.environ.update(environ or {})
        self.tls: ssl.SSLContext | None = None  # of this side, where the server's HTTP has it
        self.master: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------ life

    def start(self, wait_ready: bool = True) -> None:
        """Run the command of the README; returns when every model and everybody else is there."""
        STARTED.add(self)
        command = ["gunicorn", "-c", str(ROOT / "gunicorn.conf.py"), *self._gunicorn]
        command += ["shmserve.app"]
        if self._kept:
            command = ["shmserve", "serve", "--", *self._gunicorn]
        with self.log_path.open("ab") as file:
            log = file if self._output is None else self._output
            self.master = subprocess.Popen(
                [*self._within, sys.executable, "-m", *command],
                cwd=ROOT,
                env=self.environ,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        if wait_ready:
            self.wait_ready()
            self.wait_linked()

    def wait_ready(self) -> None:
        """Until the readiness endpoint says so.

        Raises:
            TimeoutError: it never did; the log's end is in the message.
        """
        try:
            wait_until(self.ready, "the server is not ready")
        except TimeoutError as ex:
            raise TimeoutError(f"{ex}\n{self.log()[-6000:]}") from None

    def ready(self) -> bool:
        """Whether every model is loaded."""
        return self._healthy("ready")

    def lives(self) -> bool:
        """Whether HTTP is answered, whatever is loaded."""
        return self._healthy("live")

    def _healthy(self, state: str) -> bool:
        if self.master is not None and self.master.poll() is not None:
            raise RuntimeError(f"the server has ended: {self.master.returncode}\n{self.log()}")
        try:
            return self.get(f"/v2/health/{state}")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def stop(self) -> int:
        """SIGTERM, and wait for the master to end; its exit status."""
        assert self.master is not None
        if self.master.poll() is None:
            self.master.send_signal(signal.SIGTERM)
        status = self.master.wait(WATCHDOG_S)
        wait_until(lambda: not self.processes(), f"processes are left: {self.processes()}")
        return status

    def kill_all(self) -> None:
        """SIGKILL for everything of this server; for tests that failed."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
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
        """One request on a connection of its own: status, headers (lower case), body."""
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
        """Status and JSON of an inference with JSON tensors."""
        body = json.dumps(document).encode()
        status, _, answer = self.request("POST", f"/v2/models/{model}/infer", body, headers)
        return status, json.loads(answer)

    @property
    def base_url(self) -> str:
        return f"http://{self.http_host}:{self.http_port}"

    # ------------------------------------------------------------ inspection

    def show(self, table: str) -> list[dict[str, Any]]:
        """Rows of ``shmserve show <table>``; waits for a coordinator that is being replaced.

        Raises:
            Unavailable: there never was one.
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
        """Until every instance of every model runs; readiness waits for one of each.

        Of one that has just been killed the coordinator may not know yet.
        """

        def all_run() -> bool:
            rows, alive = self.show("models"), self.processes()
            running = (
                r["instance_state"] == "READY" and r["pid"] in alive for r in rows if r["instance"]
            )
            return all(running) and all(row["state"] == "READY" for row in rows)

        wait_until(all_run, "instances are not ready")

    def wait_linked(self) -> None:
        """Until every process has its link to the coordinator; none is needed to be ready.

        Only then it has the name and the descriptors that it keeps, and hears what is told to all.
        """

        def all_linked() -> bool:
            linked = {row["pid"] for row in self.show("processes")}
            unlinked = {pid for role in _UNLINKED for pid in self.pids(role)}
            started = self.master.pid if self.master is not None else 0
            return set(self.processes()) - {started, *unlinked} <= linked

        wait_until(all_linked, "processes have no link")

    def wait_arenas(self) -> None:
        """Until whoever takes part in requests has its first memory, granted by the coordinator."""

        def all_hold() -> bool:
            rows = [r for r in self.show("processes") if r["role"] in ("http", "grpc", "executor")]
            return all(row["held_bytes"] for row in rows)

        wait_until(all_hold, "processes have no arena")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """Live processes of this server: pid to title."""
        mark = f"SHMSERVE_RUN_DIR={self.run_dir}".encode()
        titles: dict[int, str] = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            try:
                if mark not in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    continue
                title = Path(f"/proc/{entry}/cmdline").read_bytes()
                state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state != "Z":
                titles[int(entry)] = title.replace(b"\0", b" ").decode(errors="replace").strip()
        return titles

    def pids(self, title: str) -> list[int]:
        """Pids of the processes whose title starts with ``shmserve: <title>``."""
        wanted = f"shmserve: {title}"
        return sorted(pid for pid, name in self.processes().items() if name.startswith(wanted))

    def leaks(self) -> list[str]:
        """What a stopped server left behind: names in /dev/shm, processes, sockets."""
        left = segments_left()
        left += [f"process {pid}: {title}" for pid, title in self.processes().items()]
        left += [
            f"{self.run_dir}/{name}"
            for name in os.listdir(self.run_dir)
            if name.endswith(".sock") and name != "http.sock"
        ]
        return left


def segments_left() -> list[str]:
    """Names of segments that nobody removes any more, of whichever server."""
    names, give_up = _segment_names(), time.monotonic() + _BIRTH_S
    while names and time.monotonic() < give_up:  # of other servers, for a moment
        time.sleep(0.02)
        names &= _segment_names()
    return [f"/dev/shm/{name}" for name in sorted(names)]


def _segment_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "shmserve." in name}


def open_fds(pid: int) -> int:
    """How many file descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def rss_bytes(pid: int) -> int:
    """Resident memory of a process that is its own: anonymous pages, without shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
