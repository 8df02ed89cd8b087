"""Messages to the service manager, derived from the registry."""

import contextlib
import socket

import msgspec
import pytest

from shmserve.core.registry import ModelEntry, Snapshot
from shmserve.errors import NotFound, Unavailable
from shmserve.shm.registry_page import RegistryReader, RegistryWriter
from shmserve.supervisor import announce
from shmserve.supervisor.announce import Announcer, status_line
from shmserve.tensor.spec import ModelSpec
from shmserve.transport.notify import Notifier
from tests.unit.supervisor.snapshots import LOADING, READY, UNAVAILABLE, snapshot


@pytest.mark.parametrize(
    ("registry", "line", "ready"),
    [
        (snapshot(complete=False), "0 ready, 0 loading", False),
        (snapshot(a=READY, b=LOADING), "1 ready, 1 loading", False),
        (snapshot(a=READY), "1 ready, 0 loading", True),
        (
            snapshot(a=READY, b=UNAVAILABLE, failed={"c": "line 3"}),
            "1 ready, 0 loading, unavailable: c b/1",
            False,
        ),
        (snapshot(draining=True, a=READY), "draining", False),
    ],
)
def test_the_status_line_and_readiness(registry, line, ready):
    assert status_line(registry) == line
    assert registry.ready is ready


@pytest.mark.parametrize(
    ("requires", "registry", "missing"),
    [
        (("all",), snapshot(complete=False), "it has not read its repository yet"),
        (("all",), snapshot(draining=True, a=READY), "it is about to stop"),
        (
            ("all",),
            snapshot(a=READY, b=LOADING, c=UNAVAILABLE, failed={"d": "/a/path"}),
            "'d' cannot be served, 'b' version 1 is loading, 'c' version 1 is unavailable",
        ),
        (("any",), snapshot(a=READY, b=LOADING, failed={"d": "line 3"}), ""),
        (("any",), snapshot(b=LOADING), "no model is ready"),
        (("any",), snapshot(a=READY, complete=False), "it has not read its repository yet"),
        (("a",), snapshot(a=READY, b=LOADING, failed={"d": "line 3"}), ""),
        (("a", "b", "e"), snapshot(a=READY, b=LOADING), "'b' is loading, 'e' is not loaded"),
    ],
)
def test_what_is_required_is_missing_or_not(requires, registry, missing):
    registry = msgspec.structs.replace(registry, requires=requires)
    assert registry.why_not_ready == missing
    assert registry.ready is not bool(missing)


def test_not_everything_that_is_missing_is_named():
    registry = snapshot(**{f"m{number}": LOADING for number in range(100)})
    assert registry.why_not_ready.endswith("'m7' version 1 is loading and 92 more")


def test_a_model_without_an_instance_is_missing():
    entry = ModelEntry(ModelSpec("m", "1", "", "python", 0, (), ()), READY)
    registry = Snapshot("e1", 0, {"m": {"1": entry}}, True, requires=("m",))
    assert registry.why_not_ready == "'m' has no instance"


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock


def heard(manager):
    lines = []
    while True:
        try:
            lines.append(manager.recv(1000).decode())
        except BlockingIOError:
            return lines


def test_ready_is_said_once_when_everything_is_loaded(tmp_path, manager):
    run_dir = str(tmp_path)
    announcer = Announcer(Notifier(str(tmp_path / "notify")), RegistryReader(run_dir), 10.0)
    announcer.turn(100.0)
    assert heard(manager) == ["WATCHDOG=1", "EXTEND_TIMEOUT_USEC=60000000"]
    writer = RegistryWriter(run_dir, "e1")
    writer.publish(snapshot(a=LOADING))
    announcer.turn(101.0)
    announcer.turn(102.0)
    assert heard(manager) == ["STATUS=0 ready, 1 loading"]
    writer.publish(snapshot(a=UNAVAILABLE))
    announcer.turn(103.0)
    announcer.turn(121.0)  # no start that is over, and no reason to be killed
    assert heard(manager) == [
        "STATUS=0 ready, 0 loading, unavailable: a/1",
        "WATCHDOG=1",
        "EXTEND_TIMEOUT_USEC=60000000",
    ]
    writer.publish(snapshot(a=READY))
    announcer.turn(127.0)
    assert heard(manager) == ["WATCHDOG=1", "READY=1\nSTATUS=1 ready, 0 loading"]
    writer.publish(snapshot(a=READY, draining=True))
    announcer.turn(128.0)
    announcer.stopping()
    assert heard(manager) == ["STATUS=draining", "STOPPING=1\nSTATUS=draining"]
    writer.close()


def test_what_a_full_queue_does_not_take_is_told_later(tmp_path, manager, monkeypatch):
    """The queue may be full of clients' memory. systemd would wait for READY=1 in vain, and give
    the start up."""
    monkeypatch.setattr(announce, "_PATIENCE_S", 0.0)
    announcer = Announcer(Notifier(str(tmp_path / "notify")), RegistryReader(str(tmp_path)), 0.0)
    announcer.turn(100.0)
    writer = RegistryWriter(str(tmp_path), "e1")
    writer.publish(snapshot(a=READY, b=LOADING))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.connect(str(tmp_path / "notify"))
        other.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                other.send(b"x")
    announcer.turn(101.0)
    writer.publish(snapshot(a=READY))
    announcer.turn(102.0)
    assert announcer.due < 103.0
    writer.publish(snapshot(a=READY, draining=True))
    heard(manager)
    announcer.turn(120.0)
    extended, told = heard(manager)
    assert extended.startswith("EXTEND_TIMEOUT_USEC="), "the start is not over for systemd"
    assert told == "STATUS=draining\nREADY=1"
    announcer.turn(140.0)
    assert heard(manager) == []
    assert announcer.due > 1000.0
    writer.close()


def test_an_unhealthy_service_gives_no_sign_of_life(tmp_path, manager):
    announcer = Announcer(Notifier(str(tmp_path / "notify")), RegistryReader(str(tmp_path)), 10.0)
    announcer.turn(100.0, healthy=False)
    assert heard(manager) == ["EXTEND_TIMEOUT_USEC=60000000"]
    announcer.turn(101.0, healthy=True)
    assert heard(manager) == ["WATCHDOG=1"]


def test_a_generation_that_begins_to_serve_names_its_main_process_once(tmp_path, manager):
    """The previous generation may have died before naming the new main process."""
    serves: list = []
    notifier, reader = Notifier(str(tmp_path / "notify")), RegistryReader(str(tmp_path))
    announcer = Announcer(notifier, reader, 0.0, speaks=lambda: bool(serves), main_pid=7)
    announcer.turn(100.0)
    assert heard(manager) == []
    serves.append(True)
    announcer.turn(101.0)
    announcer.turn(102.0)
    assert heard(manager) == ["EXTEND_TIMEOUT_USEC=60000000", "MAINPID=7"]


def test_a_model_is_unknown_only_once_the_repository_has_been_read():
    with pytest.raises(Unavailable, match=r"'b' is not known yet.* not read its repository yet"):
        snapshot(complete=False).model("b")
    with pytest.raises(NotFound, match="'b' is not found"):
        snapshot(a=READY).model("b")
