"""Service of a node: starts, watches and restarts the server, and loads and unloads models as
ordered. The server is asked through its Unix socket, like by any local client. This module does
not depend on who gives the orders."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from shmserve.client.wire.http_transport import Transport
from shmserve.client.wire.inference_error import InferenceError
from shmserve.cluster.cluster_file import ClusterSettings
from shmserve.cluster.haproxy_slots import Address
from shmserve.cluster.policies.cluster_plan import AGAIN_S
from shmserve.cluster.policies.measured_load import NodeLook, ReplicaCounts
from shmserve.errors import Unavailable, UnreadableMessage
from shmserve.protocol.decoding import json_decoder

_LOOK_S = 0.25
_ABSENT_S = 30.0  # seconds without a service until a node reports no room for models
_ASK_S = 5.0
# pauses in seconds after the first end of the service, the second, …
_LAUNCH_AGAIN_S = (0.5, 1.0, 2.0, 5.0, 10.0)
_LIVED_S = 60.0  # lifetime in seconds after which an end counts as the first again
_NOT_NOW = (0, 503)  # statuses that do not blame the model: no answer, or a service that is ending
_GONE_S = 10.0  # seconds for a killed service to end

_decode = json_decoder()
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeReport:
    """Report of a node to the controller.

    Attributes:
        look: state of the models, for the plan.
        http, grpc: addresses of the service; None: not listening.
        launches: number of starts of the service.
        problem: last problem, as text.
    """

    look: NodeLook
    http: Address | None = None
    grpc: Address | None = None
    pid: int = 0
    launches: int = 0
    problem: str = ""


def checked(report: object) -> NodeReport:
    """Return a node's report. Raise Unavailable if it cannot be read: the node may run another
    version of the server, or another program of the same Ray answers in the node's place."""
    try:
        return msgspec.convert(msgspec.to_builtins(report), NodeReport)
    except (TypeError, ValueError) as ex:
        raise Unavailable(f"its report cannot be read: {ex}") from None


class NodeService:
    """Service process of a node, and the threads that keep it running until `stop`. `host`: address
    of the node. `room`: memory for models, in bytes."""

    def __init__(self, settings: ClusterSettings, host: str, room: int, run_dir: str) -> None:
        os.makedirs(run_dir, 0o700, exist_ok=True)
        self._settings = settings
        self._host = host
        self._room = room
        self._run_dir = run_dir
        self._socket = os.path.join(run_dir, "http.sock")
        self._ports = (0, 0)
        self._end = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # guards the next fields
        self._orders: frozenset[str] | None = None  # models to load; others are to be unloaded
        self._ready: frozenset[str] = frozenset()
        self._changing = ""
        self._changes = 0
        self._failed: dict[str, tuple[str, float]] = {}
        self._counts: dict[str, ReplicaCounts] = {}
        self._up = False
        self._up_at = time.monotonic()  # of the last successful look, or of the creation
        self._unseen = ""  # reason why the last look failed
        self._grpc_up = False  # the gRPC process listens later than the HTTP workers
        self._launches = 0
        self._problem = ""
        self._threads = [
            threading.Thread(target=work, name=work.__name__, daemon=True)
            for work in (self._keep_alive, self._look_on, self._follow_orders)
        ]
        for thread in self._threads:
            thread.start()

    def update(self, orders: frozenset[str] | None) -> NodeReport:
        """Take the models to load from now on (None: as before), and return a report, at once.
        Raise ValidationError, and change nothing, if `orders` are no names: any program of the same
        Ray can call this method. Raise Unavailable after `stop`."""
        orders = msgspec.convert(orders, frozenset[str] | None)
        if self._end.is_set():  # perhaps by a controller that has died
            raise Unavailable("the node's service was stopped")
        with self._lock:
            if orders is not None:
                self._orders = orders
            return self._report()

    def stop(self) -> None:
        """End the service after running requests, await the end, delete the run directory."""
        self._end.set()
        for thread in self._threads:
            thread.join(self._settings.service_stop_timeout_s + _GONE_S)
        if self._process is None or self._process.poll() is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _report(self) -> NodeReport:
        changing = {self._changing} if self._changing else set()
        failed = {name: why for name, (why, _) in self._failed.items()}
        absent = not self._up and time.monotonic() - self._up_at > _ABSENT_S
        # no room, so that the node's models are placed elsewhere
        room = 0 if absent else self._room
        look = NodeLook(room, self._ready | changing, self._ready, failed, dict(self._counts))
        if not self._up:
            problem = self._problem or self._unseen
            return NodeReport(look, launches=self._launches, problem=problem)
        http, grpc = (Address(self._host, port, self._ports[0]) for port in self._ports)
        pid = self._process.pid if self._process is not None else 0
        grpc_address = grpc if self._grpc_up else None
        return NodeReport(look, http, grpc_address, pid, self._launches, self._problem)

    # ------------------------------------------------------------- the process

    def _keep_alive(self) -> None:
        """Start the service again and again. The service ends with the starting thread."""
        ends = 0
        while not self._end.is_set():
            begun = time.monotonic()
            try:
                self._process = self._launch()
                self._wait_for_end(self._process)
            except OSError as ex:
                self._note(f"the service could not be started: {ex.strerror}")
            ends = 0 if time.monotonic() - begun > _LIVED_S else ends + 1
            self._end.wait(_LAUNCH_AGAIN_S[min(ends, len(_LAUNCH_AGAIN_S) - 1)])

    def _launch(self) -> subprocess.Popen[bytes]:
        ports = (self._settings.service_http_port, self._settings.service_grpc_port)
        self._ports = tuple(port or _free_port(self._host) for port in ports)  # type: ignore[assignment]
        with self._lock:
            self._launches += 1
            self._grpc_up = False
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "shmserve.cluster.service_child", str(os.getpid())],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
        )

    def _environment(self) -> dict[str, str]:
        settings = self._settings
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SHMSERVE_")}
        if settings.service_config:
            environ["SHMSERVE_CONFIG"] = settings.service_config
        values: Mapping[str, object] = {
            "run_dir": self._run_dir,
            "model_repository": ",".join(settings.service_model_repository),
            "model_control": "explicit",
            "ready_requires": "any",
            "http_bind": f"{self._host}:{self._ports[0]},unix:{self._socket}",
            "grpc_bind": f"{self._host}:{self._ports[1]}",
            "http_workers": settings.service_http_workers,
            "load_timeout_s": settings.service_load_timeout_s,
            "max_caller_share": 1,  # all requests come from a single caller, the balancer
        }
        environ.update({f"SHMSERVE_{name.upper()}": str(value) for name, value in values.items()})
        return environ

    def _wait_for_end(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not self._end.wait(_LOOK_S):
            pass
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(self._settings.service_stop_timeout_s)
            except subprocess.TimeoutExpired:
                self._kill(process)
        else:
            self._note(f"the service ended with status {process.returncode}")
        with self._lock:
            self._up, self._ready, self._counts = False, frozenset(), {}

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        try:
            process.wait(_GONE_S)
        except subprocess.TimeoutExpired:
            self._note(f"the service, process {process.pid}, does not end")

    def _note(self, problem: str) -> None:
        _log.warning("%s", problem)
        with self._lock:
            self._problem = problem

    # -------------------------------------------------------------- the models

    def _look_on(self) -> None:
        transport = Transport(f"unix:{self._socket}", _ASK_S)
        while not self._end.wait(_LOOK_S):
            changes = self._changes
            if self._up and not self._grpc_up:
                self._grpc_up = _accepts(self._host, self._ports[1])
            try:
                ready = _ready(_ask(transport, "POST", "/v2/repository/index", {"ready": True}))
                counts = _counts(_ask(transport, "GET", "/v2/models/stats")) if ready else {}
            except (InferenceError, UnreadableMessage, KeyError, TypeError) as ex:
                with self._lock:
                    self._up, self._ready = False, frozenset()
                    self._unseen = f"the service does not answer as it should: {ex}"
                continue
            with self._lock:
                self._up_at = time.monotonic()
                if not self._up and not self._failed:
                    self._problem = ""
                if changes == self._changes:  # otherwise the answers may be older than a change
                    self._up, self._ready, self._counts = True, ready, counts
        transport.close()

    def _follow_orders(self) -> None:
        wait_s = self._settings.service_load_timeout_s + _ASK_S
        transport = Transport(f"unix:{self._socket}", wait_s)
        while not self._end.wait(_LOOK_S):
            while not self._end.is_set():
                with self._lock:
                    change = self._next_change()
                if change is None:
                    break
                if not self._change(transport, *change):
                    break  # pause before the next attempt
        transport.close()

    def _next_change(self) -> tuple[str, str] | None:
        """Return the next model to unload, else to load; None if all models are as ordered."""
        now = time.monotonic()
        self._failed = {name: f for name, f in self._failed.items() if now - f[1] < AGAIN_S}
        if not self._up or self._orders is None:
            return None
        for name in sorted(self._ready - self._orders):
            return "unload", name
        for name in sorted(self._orders - self._ready - self._failed.keys()):
            self._changing = name
            return "load", name
        return None

    def _change(self, transport: Transport, what: str, name: str) -> bool:
        """Load or unload a model. Return True on success."""
        path = f"/v2/repository/models/{urllib.parse.quote(name, safe='')}/{what}"
        problem, status = "", 0
        try:
            _ask(transport, "POST", path, {})
        except (InferenceError, UnreadableMessage) as ex:
            problem, status = f"{what} {name}: {ex}", getattr(ex, "status", 0)
            _log.warning("%s", problem)
        with self._lock:
            self._changing = ""
            self._changes += 1
            if problem:
                self._problem = problem
                if what == "load" and status not in _NOT_NOW:
                    self._failed[name] = (problem, time.monotonic())
            else:
                self._ready = self._ready | {name} if what == "load" else self._ready - {name}
        return not problem


def _ask(transport: Transport, method: str, path: str, body: object = None) -> Any:
    """Return the document of a response. Raise InferenceError or UnreadableMessage on failure."""
    pieces = [msgspec.json.encode(body)] if body is not None else ()
    reply = transport.request(method, path, {"Content-Type": "application/json"}, pieces)
    if reply.status != 200:
        raise InferenceError(reply.status, reply.error)
    return _decode(reply.body.data) if method == "GET" or reply.body.size else None


def _ready(index: Any) -> frozenset[str]:
    return frozenset(row["name"] for row in index if row.get("state") == "READY")


def _counts(document: Any) -> dict[str, ReplicaCounts]:
    """Return the counts of each model, summed over versions."""
    counts: dict[str, ReplicaCounts] = {}
    for row in document["model_stats"]:
        stats, before = row["inference_stats"], counts.get(row["name"], ReplicaCounts())
        busy = sum(stats[s]["ns"] for s in ("compute_input", "compute_infer", "compute_output"))
        counts[row["name"]] = ReplicaCounts(
            before.requests + stats["queue"]["count"],
            before.waited_s + stats["queue"]["ns"] / 1e9,
            before.busy_s + busy / 1e9,
        )
    return counts


def _accepts(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), _ASK_S):
            return True
    except OSError:
        return False


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
