"""libshmserve against a server: every datatype, streams, time limits, threads, deaths, restarts."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.tensor.dtypes import DATATYPES
from tests.crash.test_keeper import reload
from tests.integration.c_programs import MEMORY, THREADS, CProgram, checks, run, sanitizer
from tests.model_files import model_maker, native
from tests.running_server import wait_until
from tests.servers import SMALL, Server, only

BASIC = "tests/repositories/basic,tests/repositories/streams"
SETTINGS: dict[str, Any] = {**SMALL, "max_lanes": 32}
_NAMES = sorted(DATATYPES)


def _tensors(prefix: str) -> str:
    rows = [
        f'{{ name: "{prefix}_{name}" data_type: {DATATYPES[name].config_name} dims: [ -1 ] }}'
        for name in _NAMES
    ]
    return f"[ {', '.join(rows)} ]"


MIRROR = f'backend: "python"\ninput {_tensors("IN")}\noutput {_tensors("OUT")}\n'
HOLDER = """
backend: "python"
input [ { name: "COMMAND" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { count: 2 } ]
parameters { key: "rerun" value { string_value: "true" } }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with the models `mirror`, which returns its inputs, and `holder`, which holds the
    requests of one process as long as a file with its pid exists."""
    folder = tmp_path_factory.mktemp("models")
    make = model_maker(folder)
    body = f'return {{"OUT_" + n: request.input("IN_" + n).copy() for n in {_NAMES}}}'
    make(native(body), MIRROR, "mirror")
    body = """
        import os, time
        command, _, folder = request.input("COMMAND")[0].decode().partition(":")
        if command == "hold":
            open(f"{folder}/{os.getpid()}", "w").close()
            while len(os.listdir(folder)) == 1:
                time.sleep(0.01)
        return {"OUT": np.ones(1, np.float32)}
    """
    make(native(body), HOLDER, "holder")
    return str(folder)


@pytest.fixture(scope="module")
def server(repository: str) -> Iterator[Server]:
    models = only("echo,pair,misbehaving,teller,mirror,holder")
    with Server(f"{BASIC},{repository}", **models, **SETTINGS) as server:
        server.wait_instances()
        yield server


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checks with sanitizers, as far as the compiler has them."""
    return checks(tmp_path_factory.mktemp("memory"), *sanitizer(MEMORY))


def socket_of(server: Server) -> str:
    return os.path.join(server.run_dir, "client.sock")


# ------------------------------------------------------------------------------------ one server


@pytest.mark.parametrize(
    "name",
    [
        "datatypes",
        "full_sockets",
        "refusals",
        "pool",
        "streams",
        "deadlines",
        "poll_loop",
        "threads",
    ],
)
def test_a_program_in_c(server: Server, program: Path, name: str) -> None:
    run(program, name, socket_of(server))
    wait_until(lambda: not server.show("slots"), "slots are held")
    wait_until(lambda: not server.show("regions"), "regions stay")


def test_threads_do_not_race(server: Server, tmp_path: Path) -> None:
    program = checks(tmp_path, *sanitizer(THREADS))
    for name in ("threads", "deadlines"):  # the second cancels from another thread
        run(program, name, socket_of(server))


def test_no_call_allocates_once_it_is_warm(server: Server, tmp_path: Path) -> None:
    run(checks(tmp_path, "-DCOUNT_ALLOCATIONS"), "warm", socket_of(server))


@pytest.mark.needs("valgrind")
def test_valgrind_has_nothing_to_say(server: Server, tmp_path: Path) -> None:
    program = checks(tmp_path)
    strict = ("--error-exitcode=9", "--leak-check=full", "--track-fds=yes", "-q")
    for name in ("datatypes", "streams"):
        run("valgrind", *strict, program, name, socket_of(server))


def test_the_socket_is_found(server: Server, program: Path, tmp_path: Path) -> None:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("SHMSERVE_", "XDG_"))}
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    (runtime / "shmserve").symlink_to(server.run_dir)
    for found in (
        {"SHMSERVE_CLIENT_SOCKET": socket_of(server)},
        {"SHMSERVE_RUN_DIR": server.run_dir},
        {"XDG_RUNTIME_DIR": str(runtime)},
    ):
        (line,) = run(program, "timing", "", "4096", "3", environ={**plain, **found})
        assert line.startswith("4096 bytes: p50 ")


def test_a_model_is_described(server: Server, program: Path) -> None:
    assert run(program, "describe", socket_of(server), "pair") == [
        *("pair 1 single", "IN FP32 -1", "OUT FP32 -1", "PID INT64 1"),
    ]
    first, *_ = run(program, "describe", socket_of(server), "teller")
    assert first == "teller 1 decoupled"
    (line,) = run(program, "describe", socket_of(server), "nope")
    assert line.startswith("NOT_FOUND ")


# ---------------------------------------------------------------------------- deaths and restarts


@pytest.mark.parametrize("outputs", ["pool", "message"])
def test_an_executor_dies_of_a_request(server: Server, program: Path, outputs: str) -> None:
    """The request fails. Memory that the executor may have been about to write to is renewed, and
    the lane goes on."""
    (line,) = run(program, "obey", socket_of(server), "misbehaving", "leave", outputs)
    assert line == "ABORTED 1 the executor died while it had the request"
    server.wait_instances()


def test_a_request_without_memory_runs_again(server: Server, program: Path, tmp_path: Path) -> None:
    folder = tmp_path / "holders"
    folder.mkdir()
    with CProgram(program, "obey", socket_of(server), "holder", f"hold:{folder}", "message") as p:
        wait_until(lambda: os.listdir(folder), "the model does not begin")
        (pid,) = map(int, os.listdir(folder))
        os.kill(pid, signal.SIGKILL)
        assert p.line().split()[:2] == ["OK", "2"]
        p.end()
    assert len(os.listdir(folder)) == 2, "another executor has the request"
    server.wait_instances()


def test_a_request_with_memory_does_not_run_again(
    server: Server, program: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "holders"
    folder.mkdir()
    with CProgram(program, "obey", socket_of(server), "holder", f"hold:{folder}", "pool") as p:
        wait_until(lambda: os.listdir(folder), "the model does not begin")
        (pid,) = map(int, os.listdir(folder))
        os.kill(pid, signal.SIGKILL)
        assert p.line().split()[:2] == ["ABORTED", "1"]
        p.end()
    server.wait_instances()


def counts(lines: list[str]) -> dict[str, int]:
    """Return how often `checks steady` saw each code."""
    found = dict(line.split("=") for line in lines if "=" in line and ":" not in line)
    return {name: int(count) for name, count in found.items()}


def test_kills_under_load(server: Server, program: Path) -> None:
    """Executors that die cost the request that they had, and a coordinator costs nothing."""
    with CProgram(program, "steady", socket_of(server), "pair") as steady:
        assert steady.line() == "begun"
        for _ in range(2):
            os.kill(server.pids("executor pair")[0], signal.SIGKILL)
            server.wait_instances()
            (coordinator,) = server.pids("coordinator")
            os.kill(coordinator, signal.SIGKILL)
            wait_until(lambda: server.pids("coordinator"), "no new coordinator")
            server.wait_linked()
        lines = steady.end()
    seen = counts(lines)
    assert seen["OK"] > 10, lines
    assert seen.keys() <= {"OK", "ABORTED", "again"}, lines
    assert seen.get("ABORTED", 0) <= 2, lines


@pytest.mark.parametrize("flag", [MEMORY, THREADS])
def test_kills_under_requests_of_all_kinds(server: Server, tmp_path: Path, flag: str) -> None:
    """Threads with several requests each, short time limits and cancellations: no answer is wrong
    or belongs to another request, and no request is left without."""
    program = checks(tmp_path, *sanitizer(flag))
    with CProgram(program, "busy_threads", socket_of(server)) as busy:
        assert busy.line() == "begun"
        for round_ in range(3):
            os.kill(server.pids("executor pair")[round_ % 2], signal.SIGKILL)
            (coordinator,) = server.pids("coordinator")
            os.kill(coordinator, signal.SIGKILL)
            wait_until(lambda: server.pids("coordinator"), "no new coordinator")
            server.wait_linked()
            server.wait_instances()
        (line,) = busy.end()
    assert int(line.removeprefix("answered=")) >= 4 * 50
    wait_until(lambda: not server.show("regions"), "regions stay")


def test_a_newer_version_costs_nothing(server: Server, program: Path) -> None:
    with CProgram(program, "steady", socket_of(server), "echo") as steady:
        assert steady.line() == "begun"
        before = server.pids("executor echo")
        for number in range(3):
            config = (
                f'{{"backend": "python", "parameters": {{"n": {{"string_value": "{number}"}}}},'
            )
            config += ' "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],'
            config += ' "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}]}'
            status, reply = server.control("load", "echo", config=config)
            assert status == 200, reply
        lines = steady.end()
    seen = counts(lines)
    assert seen.keys() == {"OK", "again"}, lines
    wait_until(lambda: set(before).isdisjoint(server.pids("executor echo")), "the old one stays")


@pytest.mark.parametrize("way", ["stop", "kill_all"])
def test_a_restart_of_the_service(program: Path, way: str) -> None:
    """Memory is registered again, and calls wait for the server."""
    server = Server(BASIC, **only("echo"), **SETTINGS)
    try:
        server.start()
        with CProgram(program, "steady", socket_of(server), "echo") as steady:
            assert steady.line() == "begun"
            getattr(server, way)()
            server.start()
            lines = steady.end()
        seen = counts(lines)
        assert seen.get("OK"), lines  # perhaps only the call that waited for the restart
        assert seen.keys() <= {"OK", "ABORTED", "again"}, lines
        assert seen.get("ABORTED", 0) <= (way == "kill_all"), lines
        server.stop()
    finally:
        server.kill_all()


def test_a_handover(program: Path) -> None:
    settings = {**only("echo"), **SETTINGS, "reload": "handover"}
    with Server(BASIC, kept=True, **settings) as server:
        server.wait_instances()
        with CProgram(program, "steady", socket_of(server), "echo") as steady:
            assert steady.line() == "begun"
            reload(server)
            lines = steady.end()
        seen = counts(lines)
        assert seen.keys() == {"OK", "again"}, lines
