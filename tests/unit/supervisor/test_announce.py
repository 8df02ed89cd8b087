"""What the service manager hears, following the registry."""

import socket

import pytest

from shmserve.core.registry import LiveInstance, ModelEntry, ModelState, Snapshot
from shmserve.shm.registry_page import RegistryReader, RegistryWriter
from shmserve.supervisor.announce import Announcer, status_line
from shmserve.tensor.spec import ModelSpec
from shmserve.transport.notify import Notifier

LIVE = (LiveInstance("m/1/0", "executor-1-aa", "x.sock", 1),)


def snapshot(complete=True, draining=False, failed=None, **models):
    entries = {
        name: {
            "1": ModelEntry(
                ModelSpec(name, "1", "", "python", 0, (), ()),
                state,
                LIVE if state is ModelState.READY else (),
            )
        }
        for name, state in models.items()
    }
    return Snapshot("e1", 0, entries, complete, failed or {}, draining)


@pytest.mark.parametrize(
    ("registry", "line", "ready"),
    [
        (snapshot(complete=False), "0 ready, 0 loading", False),
        (snapshot(a=ModelState.READY, b=ModelState.LOADING), "1 ready, 1 loading", False),
        (snapshot(a=ModelState.READY), "1 ready, 0 loading", True),
        (
            snapshot(a=ModelState.READY, b=ModelState.UNAVAILABLE, failed={"c": "line 3"}),
            "1 ready, 0 loading, unavailable: c b/1",
            False,
        ),
        (snapshot(draining=True, a=ModelState.READY), "draining", False),
    ],
)
def test_the_status_line_and_readiness(registry, line, ready):
    assert status_line(registry) == line
    assert registry.ready is ready


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
    writer.publish(snapshot(a=ModelState.LOADING))
    announcer.turn(101.0)
    announcer.turn(102.0)
    assert heard(manager) == ["STATUS=0 ready, 1 loading"]
    writer.publish(snapshot(a=ModelState.UNAVAILABLE))
    announcer.turn(103.0)
    announcer.turn(121.0)  # no start that is over, and no reason to be killed
    assert heard(manager) == [
        "STATUS=0 ready, 0 loading, unavailable: a/1",
        "WATCHDOG=1",
        "EXTEND_TIMEOUT_USEC=60000000",
    ]
    writer.publish(snapshot(a=ModelState.READY))
    announcer.turn(127.0)
    assert heard(manager) == ["WATCHDOG=1", "READY=1\nSTATUS=1 ready, 0 loading"]
    writer.publish(snapshot(a=ModelState.READY, draining=True))
    announcer.turn(128.0)
    announcer.stopping()
    assert heard(manager) == ["STATUS=draining", "STOPPING=1\nSTATUS=draining"]
    writer.close()


def test_an_unhealthy_service_gives_no_sign_of_life(tmp_path, manager):
    announcer = Announcer(Notifier(str(tmp_path / "notify")), RegistryReader(str(tmp_path)), 10.0)
    announcer.healthy = False
    announcer.turn(100.0)
    assert heard(manager) == ["EXTEND_TIMEOUT_USEC=60000000"]
    announcer.healthy = True
    announcer.turn(101.0)
    assert heard(manager) == ["WATCHDOG=1"]
