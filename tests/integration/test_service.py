"""The service as systemd and a shell see it: gunicorn's hooks with the real processes."""

import json
import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from shmserve.cli.operating import show
from shmserve.transport import rundir
from tests.model_files import model_maker
from tests.running_server import ROOT, WATCHDOG_S, RunningServer, wait_until
from tests.servers import SMALL, Server, Starting, failed_start, only, run_shmserve

SETTINGS = SMALL | only("identity")


def titles(server):
    return sorted(server.processes().values())


def role_pid(server, role):
    return rundir.lock(server.run_dir, role).holder() or 0


@pytest.fixture
def manager(tmp_path):
    """Lines that systemd receives, read at once by a thread: the socket buffers only a few."""
    lines: Any = queue.SimpleQueue()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))

        def read():
            while said := sock.recv(4096):
                for line in said.decode().splitlines():
                    lines.put(line)

        reader = threading.Thread(target=read)
        reader.start()
        yield lines
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(tmp_path / "notify"))
        reader.join()


def hear(manager, wanted):
    """Return all lines up to `wanted`."""
    said = []
    while wanted not in said:
        said.append(manager.get(timeout=WATCHDOG_S))
    return said


def test_systemd_hears_of_readiness_from_the_supervisor_when_models_are_loaded(tmp_path, manager):
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
    with Server(environ=environ, **SETTINGS) as server:
        said = hear(manager, "READY=1")
        assert "STATUS=Gunicorn arbiter booted" not in said
        server.wait_log("try: curl http://127.0.0.1:")
        server.wait_log("all models ready after ")
        server.wait_log(f"HTTP: {server.base_url} unix:{server.unix_path}, gRPC: none")
        assert {row["state"] for row in show.ask(server.run_dir, "models")} == {"READY"}
        hear(manager, "WATCHDOG=1")
        for pid in server.pids("executor"):  # a model's library must not speak for the service
            environ = Path(f"/proc/{pid}/environ").read_bytes()  # type: ignore[assignment]
            assert b"NOTIFY_SOCKET" not in environ
            assert b"WATCHDOG_USEC" not in environ
        os.kill(role_pid(server, "supervisor"), signal.SIGKILL)
        hear(manager, "READY=1")  # the next master speaks to systemd, too
        assert server.log().count("all models ready after ") == 1
        server.stop()
        hear(manager, "STOPPING=1")


def test_systemd_hears_of_no_readiness_while_a_model_is_missing(tmp_path, manager):
    model_maker(tmp_path / "models")("import nothing_of_that_name", name="broken")
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    with Starting(tmp_path / "models", environ, grpc_processes=0) as server:
        said = hear(manager, "STATUS=0 ready, 0 loading, unavailable: broken/1")
        assert "EXTEND_TIMEOUT_USEC=60000000" in said
        assert "READY=1" not in said
        server.stop()
        assert "READY=1" not in hear(manager, "STOPPING=1")


def test_a_start_without_models_says_what_the_repository_has_instead(tmp_path):
    (tmp_path / "models/a").mkdir(parents=True)
    (tmp_path / "models/a/model.py").touch()
    with Server(tmp_path / "models", grpc_processes=0) as server:
        server.wait_log("models: none")
        folder = f"{tmp_path}/models/a has model.py, but no version folder"
        server.wait_log(f"model_repository has no model; {folder}: move model.py to 1/model")
        server.wait_log(" s, without a model")


def test_ps_shows_who_is_who_and_a_stop_leaves_nobody():
    with Server(**{**SETTINGS, "http_workers": 2}) as server:
        names = titles(server)
        assert names[:1] == ["shmserve: coordinator"]
        assert "shmserve: executor identity/1/0" in names
        assert [n for n in names if "http" in n] == [
            "shmserve: http worker 1",
            "shmserve: http worker 2",
        ]
        # A process that was just forked has the title of its parent for a moment
        assert sorted(set(names))[-3:] == [
            f"shmserve: master ({server.run_dir})",
            f"shmserve: supervisor ({server.run_dir})",
            "shmserve: template",
        ]
        assert server.stop() == 0


def test_a_reload_replaces_http_workers_and_nothing_else():
    with Server(**SETTINGS) as server:
        before = {r["process"]: r["role"] for r in show.ask(server.run_dir, "processes")}
        assert run_shmserve("reload", environ=server.environ).returncode == 0

        def replaced():
            rows = show.ask(server.run_dir, "processes")
            http = [r["process"] for r in rows if r["role"] == "http"]
            return len(http) == 1 and http[0] not in before

        wait_until(replaced, "another HTTP worker")
        after = {r["process"]: r["role"] for r in show.ask(server.run_dir, "processes")}
        for role in ("coordinator", "supervisor", "executor"):
            assert [p for p in before if before[p] == role] == [
                p for p in after if after[p] == role
            ]
        assert server.get("/v2/health/ready")[0] == 200


class Activated(Server):
    """Server started as by systemd: named descriptors from 3 on, for the pid in LISTEN_PID."""

    def __init__(self, listeners, **settings):
        super().__init__(**settings)
        self._listeners = listeners
        for name in {"", "http"} & set(listeners):
            self.http_port = listeners[name].getsockname()[1]

    def start(self, wait_ready=True):
        saved = self.pass_fds = [os.dup(each.fileno()) for each in self._listeners.values()]
        moves = "".join(f"{place}<&{fd} " for place, fd in enumerate(saved, 3))
        told = f"LISTEN_FDS={len(saved)} LISTEN_FDNAMES={':'.join(self._listeners)}"
        script = f'exec {moves}; export LISTEN_PID=$$ {told}; exec "$@"'
        self.within = ("bash", "-c", script, "bash")
        super().start(wait_ready=False)
        for fd in saved:
            os.close(fd)
        for listener in self._listeners.values():
            listener.close()
        if wait_ready:
            self.wait_ready()


def test_systemd_may_hold_the_listening_socket():
    listener = socket.create_server(("127.0.0.1", 0))
    with Activated({"": listener}, **SETTINGS) as server:
        assert "unix:" not in server.log()


def test_systemd_may_hold_sockets_of_http_and_grpc_and_each_takes_its_own(tmp_path):
    path = str(tmp_path / "http.sock")
    grpc_listener = socket.create_server(("127.0.0.1", 0))
    http_listener = socket.create_server(("127.0.0.1", 0))
    unix_listener = socket.create_server(path, family=socket.AF_UNIX)
    target = f"127.0.0.1:{grpc_listener.getsockname()[1]}"
    listeners = {"other": unix_listener, "grpc": grpc_listener, "http": http_listener}

    def grpc_lives():
        with grpc.insecure_channel(target) as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            return live(b"", WATCHDOG_S, wait_for_ready=True) == b"\x08\x01"

    with Activated(listeners, **SETTINGS | {"grpc_processes": 2}) as server:
        assert grpc_lives()
        for pid in server.pids("grpc"):
            os.kill(pid, signal.SIGKILL)
        assert grpc_lives(), "whose place successors take"
    assert os.path.exists(path), "it is systemd's to remove"


def limited_files(limit: int, what: str = "FSIZE") -> tuple[str, ...]:
    """Return a command that runs another one, whose files have at most so many bytes; NOFILE: which
    may open at most so many files."""
    code = f"resource.setrlimit(resource.RLIMIT_{what}, ({limit}, {limit}))"
    code = f"import os, resource, sys; {code}; os.execvp(sys.argv[1], sys.argv[1:])"
    return (sys.executable, "-c", code)


READ_ONLY = 'mount -t tmpfs -o ro shm /dev/shm && exec "$@"'
REMOVED = f'cd "$(mktemp -d)" && rmdir "$PWD" && PYTHONPATH="{ROOT}" exec "$@"'


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"http_restricted_api": "x:y=z"}, "http_restricted_api: unknown restricted api 'x'"),
        ({"model_repository": "/nowhere"}, "model_repository: '/nowhere' is not a directory"),
        ({"http_worker": 1}, "unknown setting SHMSERVE_HTTP_WORKER in the environment; did you me"),
        (
            {"http_bind": "127.0.0.1:http"},
            "http_bind: '127.0.0.1:http' is no HOST:PORT and no unix",
        ),
        (
            {"grpc_bind": "127.0.0.1:66000"},
            "grpc_bind: '127.0.0.1:66000' is no HOST:PORT and no un",
        ),
        ({"client_socket": __file__}, f"client_socket: unix:{__file__} is there already and no so"),
        (
            {"client_socket": "/nowhere/c.sock"},
            "client_socket: cannot listen on unix:/nowhere/c.sock: its folder is missing or cannot",
        ),
        (
            {"state_dir": f"{__file__}/x"},
            f"state_dir: {__file__}/x cannot be made: Not a directory",
        ),
        (
            {"within": limited_files(500_000)},
            "the limit on the size of files is 500000 bytes (LimitFSIZE, ulimit -f), and sh",
        ),
        (
            {"within": limited_files(16, "NOFILE")},
            "the limit of open files is 16 (LimitNOFILE, ulimit -n), and the service needs 64",
        ),
        pytest.param(
            {"within": ("unshare", "--mount", "sh", "-c", READ_ONLY, "sh")},
            "/dev/shm is missing, or cannot be written: mount a tmpfs there, for tensors",
            marks=pytest.mark.needs("mounts"),
        ),
        (
            {"kept": True, "within": ("sh", "-c", REMOVED, "sh")},
            "the working directory has been removed or is closed to this user: start in another",
        ),
        (
            {"environ": {"SHMSERVE_RUN_DIR": "/proc/nowhere"}},
            "run_dir: /proc/nowhere cannot be made: No such file or directory; set another (",
        ),
    ],
)
def test_a_service_that_cannot_work_says_why_and_does_not_start(settings, message):
    said = failed_start(RunningServer(**settings))
    assert f"shmserve: {message}" in said
    assert "Traceback" not in said


def test_a_limit_on_files_is_a_limit_on_tensors() -> None:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [4], "data": [0] * 4}
    settings = {**SMALL, "grpc_processes": 1, "within": limited_files(4 << 20)}
    with RunningServer(**settings) as server:
        assert server.infer("identity", {"inputs": [tensor]})[0] == 200
        large = {**tensor, "shape": [2 << 20], "data": [0] * (2 << 20)}
        assert server.infer("identity", {"inputs": [large]})[0] == 503
        server.wait_log("files, and so tensors, may have 4 MiB at most")
    assert server.leaks() == []


@pytest.mark.parametrize("setting", ["http_bind", "grpc_bind"])
def test_a_taken_address_ends_the_start_before_anything_is_launched(setting, tmp_path):
    traces = tmp_path / "traces.json"
    traces.write_text("of the service that is there")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        server = RunningServer(**{setting: address}, trace_file=str(traces))  # type: ignore[arg-type]
        said = failed_start(server)
        told = f"shmserve: {setting}: cannot listen on {address}: Address already in use, by pid "
        assert told in said
        assert f"by pid {os.getpid()} (" in said
        assert "supervisor" not in said
        assert traces.read_text() == "of the service that is there"
        assert rundir.lock(server.run_dir, "supervisor").last_beat() is None


def test_a_live_services_socket_is_not_taken_away(tmp_path):
    path = tmp_path / "http.sock"
    with socket.create_server(str(path), family=socket.AF_UNIX):
        said = failed_start(RunningServer(http_bind=f"unix:{path}"))
        assert f"http_bind: cannot listen on unix:{path}: another process listens" in said
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_socket_for_grpc_that_nobody_would_take():
    server = Activated({"grpc": socket.create_server(("127.0.0.1", 0))}, **SETTINGS)
    told = "shmserve: grpc_processes: 0, but systemd passes a socket for gRPC"
    assert told in failed_start(server)


def test_http_survives_the_supervisor_being_told_to_stop():
    """The supervisor's drain must not close gunicorn's socket. The guard starts another."""
    with Server(**SETTINGS) as server:
        supervisor = role_pid(server, "supervisor")
        os.kill(supervisor, signal.SIGTERM)
        wait_until(lambda: role_pid(server, "supervisor") not in (0, supervisor), "another")
        wait_until(server.ready, "readiness")
        assert os.path.exists(server.unix_path)


def test_killed_executors_leave_no_sockets_behind_and_every_line_is_an_object():
    with Server(**SETTINGS, log_format="json", access_log="true") as server:

        def sockets():
            return {n for n in os.listdir(server.run_dir) if n.startswith("executor-")}

        before = sockets()
        assert before
        for pid in server.pids("executor"):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not (sockets() & before), "the old sockets' end")
        wait_until(server.ready, "readiness")
    lines = [json.loads(line) for line in server.log().splitlines()]
    roles = {line["process"].split()[0] for line in lines}
    assert {"master", "http", "supervisor", "coordinator"} <= roles
    asked = [line["message"] for line in lines if line["logger"] == "gunicorn.access"]
    assert any('"GET /v2/health/ready HTTP/1.1" 200' in message for message in asked)


def test_the_access_log_has_fields_where_lines_are_objects():
    with Server(**SETTINGS, log_format="json", access_log="true") as server:
        fields = {"X-Request-ID": "mine-7"}
        assert server.request("POST", "/v2/models/nobody/infer?x=y", b"{}", fields)[0] == 404

        def lines():
            found = [json.loads(line) for line in server.log().splitlines() if "mine-7" in line]
            return [line for line in found if line["logger"] == "gunicorn.access"]

        wait_until(lines, "the line of the request")
        (line,) = lines()
        assert (line["method"], line["path"]) == ("POST", "/v2/models/nobody/infer")
        assert (line["status"], line["client"], line["request"]) == (404, "127.0.0.1", "mine-7")
        assert line["bytes"] > 0
        assert line["duration_ms"] > 0
        assert '"POST /v2/models/nobody/infer?x=y HTTP/1.1" 404' in line["message"]


def test_with_the_master_everything_ends():
    with Server(**SETTINGS) as server:
        server.master.kill()
        server.master.wait(WATCHDOG_S)
        wait_until(lambda: not server.processes(), f"the end of {server.processes()}")
        left = [
            name
            for name in os.listdir(server.run_dir)
            if name not in ("log", "http.sock", "events", "history")
        ]
        assert [name for name in left if not name.endswith(".lock")] == []
        told = json.loads(Path(server.run_dir, "events", "bad-end.json").read_text())
        assert "the gunicorn master is gone" in [row["text"] for row in told]
