"""The coordinator process against misbehaving peers, over the real socket."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from shmserve.cli.operating import show
from shmserve.core.live_settings import TraceChange
from shmserve.errors import PeerDied, Unavailable
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import (
    Desired,
    Grant,
    Granted,
    Hello,
    Instance,
    Loaded,
    RegistryChanged,
    Show,
    Started,
    Welcome,
)
from shmserve.protocol.control.settings_messages import ChangeTrace, FlagSet, LogChanged, SetFlag
from shmserve.protocol.control.stats_messages import AskReport, CounterPage, StoredPages
from shmserve.shm.registry_page import RegistryReader
from shmserve.tensor.spec import ModelSpec
from shmserve.transport import rundir
from shmserve.transport.channel import Channel
from tests.integration.process_harness import STAND_INS
from tests.running_server import wait_until

POOL = 64 << 20


@pytest.fixture
def run_dir(tmp_path):
    """Run directory of a lone coordinator, with this process as the gunicorn master."""
    run_dir = str(tmp_path / "run")
    rundir.prepare(run_dir)
    (tmp_path / "models.json").write_bytes(
        msgspec.json.encode({"models": {"m": {"name": "m"}}, "failures": {"bad": "line 3"}})
    )
    master = os.pidfd_open(os.getpid())
    environ = {
        **{k: v for k, v in os.environ.items() if not k.startswith("SHMSERVE_")},
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "SHMSERVE_RUN_DIR": run_dir,
        "SHMSERVE_MODEL_REPOSITORY": str(tmp_path),
        "SHMSERVE_POOL_BYTES": str(POOL),
    }
    command = [sys.executable, str(Path(STAND_INS) / "coordinator.py")]
    command += ["--process-id", "coordinator-1-aa", "--epoch", "e1", "--master-fd", str(master)]
    process = subprocess.Popen(command, env=environ, pass_fds=[master])
    wait_until(lambda: show_or_none(run_dir), "the coordinator")
    yield run_dir
    process.terminate()
    assert process.wait(60) == 0
    os.close(master)


def show_or_none(run_dir):
    try:
        return show.ask(run_dir, "processes")
    except Unavailable:
        return None


class Peer:
    def __init__(self, run_dir: str) -> None:
        self.channel = Channel.connect(os.path.join(run_dir, "coordinator.sock"), 60.0)

    def send(self, message) -> None:
        self.channel.send(messages.encode(message))

    def receive(self):
        """Return the next message, skipping notices of publications."""
        while True:
            data, _ = self.channel.receive(60.0)
            message = messages.decode_from_coordinator(data)
            if not isinstance(message, RegistryChanged):
                return message

    def hello(self, role: str, process: str, **fields) -> "Peer":
        self.send(Hello(messages.VERSION, role, process, os.getpid(), **fields))
        welcome = self.receive()
        assert isinstance(welcome, Welcome)
        assert (welcome.version, welcome.epoch) == (messages.VERSION, "e1")
        assert isinstance(self.receive(), LogChanged)
        return self

    def closed(self) -> bool:
        try:
            while True:
                self.channel.receive(60.0)
        except PeerDied:
            return True


@pytest.fixture
def peer(run_dir):
    peers = []

    def connect() -> Peer:
        peers.append(Peer(run_dir))
        return peers[-1]

    yield connect
    for each in peers:
        each.channel.close()


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("", b"\xc1 not msgpack"),
        ("", b"\x80"),
        ("", Show(1, "models")),  # before hello
        ("", Hello(messages.VERSION, "boss", "boss-1-aa", 1)),
        ("", Hello(messages.VERSION, "http", "../x", 1)),
        ("", Hello(messages.VERSION + 1, "http", "http-1-aa", 1)),
        ("", Hello(messages.VERSION, "http", "http-1-aa", 1, held_bytes=-5)),
        ("http", Show(1, "models")),  # not a cli
        ("http", Started("m/1/0", 1)),  # not a supervisor
        ("http", Grant(1, 0)),
        ("http", StoredPages(())),  # not a supervisor
        ("http", SetFlag(1, "no_flag", True)),
        ("executor", SetFlag(1, "grps_online", True)),  # not a frontend
        ("executor", AskReport(1)),
        ("http", ChangeTrace(1, "m", TraceChange(rate=-1))),  # a negative rate
        ("executor", Loaded("m/1/0", ModelSpec("m", "1", "", "", 0, (), ()), "../x.sock")),
    ],
)
def test_whoever_breaks_the_protocol_is_closed_alone(run_dir, peer, role, message):
    bystander = peer().hello("http", "http-9-zz")
    offender = peer()
    if role:
        offender.hello(role, f"{role}-1-aa", instance="m/1/0" if role == "executor" else "")
    offender.channel.send(message if isinstance(message, bytes) else messages.encode(message))
    assert offender.closed()
    bystander.send(Grant(1, 4096))
    assert bystander.receive() == Granted(1, True)


def test_a_flag_of_an_extension_is_published_before_it_is_answered(run_dir, peer):
    registry = RegistryReader(run_dir)
    assert registry.current().flags == {"grps_online": False}
    frontend = peer().hello("http", "http-1-aa")
    for value in (True, False):
        frontend.send(SetFlag(7, "grps_online", value))
        assert frontend.receive() == FlagSet(7)
        assert registry.current().flags == {"grps_online": value}


@pytest.mark.parametrize("nbytes", [-8, 7, 8, 4096, 1 << 40])
def test_pages_that_are_none_are_left_out(run_dir, peer, nbytes):
    http = peer().hello("http", "http-1-aa")
    http.send(CounterPage(4096))  # without a descriptor
    fd = os.memfd_create("page")
    os.write(fd, b"x" * 4096)
    http.channel.send(messages.encode(CounterPage(nbytes)), [fd])
    os.close(fd)
    http.send(AskReport(7))
    assert http.receive().ticket == 7
    assert isinstance(peer().hello("http", "http-2-bb"), Peer)


def flood(peer):
    for _ in range(20_000):
        peer.send(Show(1, "models"))


def test_a_slow_reader_is_closed_and_holds_up_nobody(run_dir, peer):
    slow = peer().hello("cli", "cli-1-aa")
    quick = peer().hello("http", "http-1-bb")
    with pytest.raises(PeerDied):
        flood(slow)
    quick.send(Grant(1, 4096))
    assert quick.receive() == Granted(1, True)


def test_the_pool_is_shared_and_the_dead_give_back(run_dir, peer):
    first, second = peer().hello("http", "http-1-aa"), peer().hello("http", "http-2-bb")
    first.send(Grant(1, POOL - 10))
    assert first.receive() == Granted(1, True)
    second.send(Grant(1, 100))
    asked = first.receive()
    assert type(asked).__name__ == "Trim"
    assert asked.nbytes == 90
    first.channel.close()  # killed instead
    assert second.receive() == Granted(1, True)
    second.send(Grant(2, POOL + 1))
    assert second.receive().granted is False


def test_who_does_not_trim_costs_the_asker_a_moment_and_no_more(run_dir, peer):
    first, second = peer().hello("http", "http-1-aa"), peer().hello("http", "http-2-bb")
    first.send(Grant(1, POOL))
    assert first.receive() == Granted(1, True)
    second.send(Grant(1, 100))
    answer = second.receive()
    assert (answer.granted, answer.ticket) == (False, 1)


def test_a_supervisor_is_told_what_to_run(run_dir, peer):
    supervisor = peer().hello("supervisor", "supervisor-1-aa")
    assert type(supervisor.receive()).__name__ == "Adopt"
    desired = supervisor.receive()
    assert isinstance(desired, Desired)
    assert [type(i) for i in desired.instances] == [Instance]
    assert desired.instances[0].name == "m/1/0"
    assert not desired.more


def test_failures_of_the_scan_are_published(run_dir):
    snapshot = RegistryReader(run_dir).current()
    assert (snapshot.complete, snapshot.failed, snapshot.ready) == (True, {"bad": "line 3"}, False)
    assert {"model": "bad", "reason": "line 3"}.items() <= show.ask(run_dir, "models")[1].items()


def test_the_same_process_reconnecting_takes_over(run_dir, peer):
    before = peer().hello("http", "http-1-aa", held_bytes=POOL)
    after = peer().hello("http", "http-1-aa", held_bytes=0)
    assert before.closed()
    after.send(Grant(1, POOL))
    assert after.receive() == Granted(1, True)


def test_descriptors_sent_along_are_not_kept(run_dir, peer):
    offender = peer().hello("http", "http-1-aa")
    pid = rundir.lock(run_dir, "coordinator").holder()
    before = len(os.listdir(f"/proc/{pid}/fd"))
    read, write = os.pipe()
    for ticket in range(50):
        offender.channel.send(messages.encode(Grant(ticket, 1)), [read])
        assert offender.receive() == Granted(ticket, True)
    os.close(read)
    os.close(write)
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before, "they are closed")


def test_peers_that_come_and_go_leave_nothing(run_dir):
    pid = rundir.lock(run_dir, "coordinator").holder()
    before = len(os.listdir(f"/proc/{pid}/fd"))
    for _ in range(200):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(os.path.join(run_dir, "coordinator.sock"))
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before, "they are closed")
