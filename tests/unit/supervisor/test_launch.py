"""Checks of the master before any process is launched."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shmserve.config import GENERATION_VARIABLE, Settings
from shmserve.errors import ConfigError
from shmserve.supervisor import launch
from shmserve.supervisor.master_state import MasterState
from shmserve.transport import listen_addresses, rundir
from tests.running_server import free_port


@pytest.mark.parametrize("setting", ["http_bind", "metrics_bind", "agent_bind"])
def test_the_setting_of_a_taken_address_is_named(setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host, port = taken.getsockname()
        addresses = {setting: (f"{host}:{port}",)}
        settings = Settings(grpc_processes=0, **addresses)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{setting}: cannot listen on"):
            launch.claim(settings, [(host, port)])


def test_all_taken_addresses_are_told_at_once() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        http, grpc = taken.getsockname(), other.getsockname()
        binds = [(f"{host}:{port}",) for host, port in (http, grpc)]
        settings = Settings(http_bind=binds[0], grpc_bind=binds[1])
        with pytest.raises(ConfigError) as told:
            launch.claim(settings, [http])
    first, second = told.value.message.splitlines()
    assert first.startswith(f"http_bind: cannot listen on 127.0.0.1:{http[1]}: ")
    assert second.startswith(f"grpc_bind: cannot listen on 127.0.0.1:{grpc[1]}: ")


def test_the_agents_address_is_kept_for_the_coordinators(monkeypatch) -> None:
    """The coordinators listen on this address one after the other, and no other process in
    between."""
    monkeypatch.setattr(launch._state, "places", ())
    place = ("127.0.0.1", free_port())
    settings = Settings(grpc_processes=0, agent_bind=(f"127.0.0.1:{place[1]}",))
    launch.claim(settings, ())
    with pytest.raises(OSError):
        socket.create_server(place)
    address = listen_addresses.parse("agent_bind", settings.agent_bind[0])
    for _ in range(2):
        (listener,) = listen_addresses.listeners("agent_bind", address, 1)
        socket.create_connection(place, 5).close()
        listener.close()
    launch.forked()


def test_metrics_have_no_address_beside_sockets_of_systemd(monkeypatch) -> None:
    """gunicorn binds nothing then."""
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "1")
    launch.claim(Settings(grpc_processes=0), ())
    settings = Settings(grpc_processes=0, metrics_bind=("127.0.0.1:8002",))
    with pytest.raises(ConfigError, match="metrics_bind: cannot be together"):
        launch.claim(settings, ())


PASSED = """
import os, socket, sys
from shmserve.supervisor.generations import activation
taken = activation.take(os.environ, "grpc")
kept = activation.take_all(os.environ, "region-")
named = [socket.socket(fileno=fd).getsockname()[1] for fd in taken]
print(named, [(n, os.pread(fd, 9, 0)) for n, fd in kept], os.environ["LISTEN_FDNAMES"])
places = [("127.0.0.1", int(port)) for port in sys.argv[1:]]
print(activation.are_bound(os.environ), activation.has_all(os.environ, places))
print(activation.has_all(os.environ, places[:1]), activation.has_http(os.environ))
"""


def test_what_is_passed_is_taken_by_name() -> None:
    """By a process that becomes another program through exec, as in a handover."""
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    memory = os.memfd_create("test")
    os.write(memory, b"bytes")
    ports = [sock.getsockname()[1] for sock in socks]
    named: list[tuple[str, socket.socket | int]]
    named = [("region-2", memory), ("bound", socks[0]), ("grpc", socks[1]), ("region-1", memory)]
    named += [("region-2", memory), ("bound", socks[2])]
    passed = [(n, thing if isinstance(thing, int) else thing.fileno()) for n, thing in named]
    command = [sys.executable, "-c", PASSED, str(ports[0]), str(ports[2])]
    become = f"""
import os
from shmserve.supervisor.generations.activation import exec_with
exec_with({command!r}, dict(os.environ), {passed!r})
"""
    fds = [fd for _, fd in passed]
    said = subprocess.check_output([sys.executable, "-c", become], pass_fds=fds, text=True)
    kept = [(f"region-{number}", b"bytes") for number in (2, 1, 2)]
    assert said.splitlines() == [f"[{ports[1]}] {kept} bound:bound", "True True", "False True"]
    os.close(memory)
    for sock in socks:
        sock.close()


MANY = """
import os, resource
from shmserve.supervisor.master_state import MasterState
from shmserve.transport.processes import raise_fd_limit
end = 3 + int(os.environ["LISTEN_FDS"])
resource.setrlimit(resource.RLIMIT_NOFILE, (end, end + 4))
raise_fd_limit()
state = MasterState()
state.take_passed()
inodes = {os.fstat(fd).st_ino for _, fd in state.stored}
inherited = [fd for _, fd in state.stored if os.get_inheritable(fd)]
print(len(state.grpc_fds), len(inodes), inherited, os.environ["LISTEN_FDNAMES"])
"""


def test_taking_what_is_passed_needs_hardly_any_further_descriptors() -> None:
    """A raised soft limit suffices for thousands of regions."""
    sock = socket.create_server(("127.0.0.1", 0))
    regions = [os.memfd_create("test") for _ in range(50)]
    passed = [("region-1", fd) for fd in regions[:25]]
    passed += [("grpc", sock.fileno()), ("http", sock.fileno())]
    passed += [("region-2", fd) for fd in regions[25:]]
    become = f"""
import os
from shmserve.supervisor.generations.activation import exec_with
exec_with({[sys.executable, "-c", MANY]!r}, dict(os.environ), {passed!r})
"""
    command = [sys.executable, "-c", become]
    said = subprocess.check_output(command, pass_fds=[fd for _, fd in passed], text=True)
    assert said == "1 50 [] http\n"
    sock.close()
    for fd in regions:
        os.close(fd)


def test_a_folder_that_cannot_be_locked_does_not_keep_the_master_from_its_beat(
    monkeypatch, tmp_path
) -> None:
    """The folder of a following generation, which awaits the previous generation's lock."""
    (tmp_path / "state" / "master.lock").mkdir(parents=True)
    lock = rundir.lock(str(tmp_path), "master")
    assert lock.acquire()
    settings = Settings(grpc_processes=0, run_dir=str(tmp_path))
    monkeypatch.setattr(launch._state, "lock", lock)
    monkeypatch.setattr(launch._state, "settings", settings)
    monkeypatch.setattr(launch._state, "also", (rundir.lock(str(tmp_path / "state"), "master"),))
    launch.beat()
    assert lock.last_beat() is not None
    lock.release()


MASTER = """
import sys
from shmserve.config import Settings
from shmserve.errors import ConfigError
from shmserve.supervisor import launch
run_dir, state_dir = sys.argv[1:]
try:
    launch.prepare(Settings(model_repository=(), run_dir=run_dir, state_dir=state_dir))
    print("prepared", flush=True)
    sys.stdin.read()
except ConfigError as ex:
    print(ex)
"""


def master(run_dir: Path, state_dir: Path) -> subprocess.Popen[str]:
    """A process that prepares a service, and ends with its standard input."""
    command = [sys.executable, "-c", MASTER, str(run_dir), str(state_dir)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_state_directory_is_one_services_alone(tmp_path) -> None:
    a, b, state = tmp_path / "a", tmp_path / "b", tmp_path / "state"
    with master(a, state) as first:
        assert first.stdout.readline() == "prepared\n"
        wanted = f"is in use by another server (pid {first.pid})"
        for run_dir, theirs in ((b, state), (b, a), (state, b)):
            said, _ = master(run_dir, theirs).communicate(timeout=30)
            assert said.count(wanted)
            assert said.startswith("run_dir" if run_dir == state else f"state_dir: {theirs} ")
        said, _ = master(b, b).communicate(timeout=30)
        assert said == "prepared\n", "a run directory that is named as both"
        first.communicate(timeout=30)
    said, _ = master(b, state).communicate(timeout=30)
    assert said == "prepared\n"


class Beating:
    """A living master of generation `g1` in a run directory; a predecessor may wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
        (base / "g1").mkdir()
        self.base = str(base)
        self.ends: list[int] = []
        self.reading, writing = os.pipe()
        monkeypatch.setenv(GENERATION_VARIABLE, "g1")
        monkeypatch.setattr(os, "kill", lambda pid, number: self.ends.append(number))
        state = MasterState()
        state.settings = self.settings = Settings(run_dir=self.base)
        state.lock = rundir.lock(str(base / "g1"), "master")
        assert state.lock.acquire()
        state.report = (writing,)
        monkeypatch.setattr(launch, "_state", state)
        self.state = state

    def close(self) -> None:
        self.state.lock.release()
        for fd in self.state.report:
            os.close(fd)


@pytest.fixture
def beating(monkeypatch, tmp_path):
    made = Beating(monkeypatch, tmp_path)
    yield made
    made.close()


def test_a_generation_ends_with_a_handover_that_did_not_let_it_serve(beating: Beating) -> None:
    launch.beat()
    assert beating.ends == []
    os.close(beating.reading)
    launch.beat()
    assert beating.ends == [signal.SIGTERM]


def test_a_generation_that_serves_outlives_its_handover(beating: Beating) -> None:
    rundir.serve(beating.base, "g1")
    os.close(beating.reading)
    launch.beat()
    launch.beat()
    assert beating.ends == []
    rundir.serve(beating.base, "g2")
    launch.beat()
    assert beating.ends == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("serves", "passed", "bound", "stays"),
    [
        (True, False, False, False),
        (True, True, True, False),
        (False, True, True, True),
        (True, True, False, True),
    ],
    ids=["the first", "after a reload", "a reload failed", "systemd's"],
)
def test_files_of_http_sockets_go_with_the_generation_that_serves(
    beating: Beating, tmp_path, serves: bool, passed: bool, bound: bool, stays: bool
) -> None:
    beating.state.passed, beating.state.bound = passed, bound
    beating.state.stopping_fd = os.eventfd(0)
    if serves:
        rundir.serve(beating.base, "g1")
    path = tmp_path / "http"
    with socket.create_server(str(path), family=socket.AF_UNIX) as sock:
        launch.stopping(beating.settings, [sock.getsockname(), ("127.0.0.1", 1)])
        assert path.exists() is stays
    assert os.eventfd_read(beating.state.stopping_fd) == 1
    os.close(beating.state.stopping_fd)
    os.close(beating.reading)


def test_a_reload_says_at_once_that_a_unix_socket_of_grpc_cannot_follow(beating: Beating) -> None:
    settings = Settings(grpc_bind=("127.0.0.1:0", "unix:/run/grpc"), client_shm_mode="off")
    with pytest.raises(ConfigError, match=r"^grpc_bind: unix:/run/grpc cannot change hands: "):
        launch.claim(settings, ())
    beating.state.grpc_fds = (0,)
    launch.claim(settings, ())
    os.close(beating.reading)


KEPT = """
import fcntl, os, sys
from shmserve.supervisor.generations import activation, keeper
pipe = fcntl.fcntl(os.pipe()[1], fcntl.F_DUPFD, 10)
report = os.pipe()[1]
environ = {**os.environ, keeper.VARIABLE: keeper.passed_on(pipe, os.getpid())}
if not os.fork():
    activation.exec_with([sys.executable, "-c", sys.argv[1]], environ, [("report", report)])
os.wait()
"""
KEPT_MASTER = """
import os
from shmserve.supervisor import launch
launch.settings()
launch.beat()
print(launch.follows(), launch._state.tied)
pipe = launch._state.keeper_fd
launch.forked()
print(os.path.exists(f"/proc/self/fd/{pipe}"), launch._state.keeper_pid == os.getppid())
"""


def test_a_master_is_tied_to_the_keeper_that_a_handover_has_started() -> None:
    """The predecessor knew of no keeper. Forks of the master have no part in the keeper's pipe."""
    said = subprocess.check_output([sys.executable, "-c", KEPT, KEPT_MASTER], text=True)
    assert said.splitlines() == ["True True", "False True"]
