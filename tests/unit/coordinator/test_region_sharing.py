"""Two generations' coordinators know the same regions."""

import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import msgspec
import pytest

from shmserve.config import Settings
from shmserve.coordinator.regions import region_sharing
from shmserve.coordinator.regions.owners import Owners
from shmserve.coordinator.regions.predecessor import Predecessor
from shmserve.coordinator.regions.registrations import RegionRegistrations
from shmserve.core.caller import Caller
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.memory.budget import Ledger
from shmserve.core.region_kinds import MEMFD
from shmserve.core.registry import Snapshot
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import Welcome
from shmserve.protocol.control.region_messages import (
    RegionAnswer,
    RegionsTaken,
    RegisterRegion,
    SharedRegions,
    StoredRegions,
    StoreRegions,
    UnregisterRegions,
)
from shmserve.transport.channel import MAX_MESSAGE, close_all
from tests.integration.region_client import Memory
from tests.integration.test_client_socket import memfd
from tests.running_server import open_fds

UID = os.geteuid()


class Coordinator:
    """The regions of a coordinator; `told`: messages to the other coordinator, `answers`: answers
    to clients."""

    def __init__(self, run_dir: Path) -> None:
        owners = Owners(lambda *_: None, lambda _: None, True)
        reconciler = Reconciler(Ledger(1000, 0), 60.0, 60.0)
        self.answers: list[int] = []
        self.stored: list[StoreRegions] = []
        self.told: list[tuple[Any, list[int]]] = []
        self.regions = RegionRegistrations(
            Settings(), str(run_dir), reconciler, self._send, owners, lambda: 0
        )

    def _send(self, process: str, message: Any, fds: tuple[int, ...]) -> None:
        if isinstance(message, RegionAnswer):
            self.answers.append(message.ticket)
        if isinstance(message, StoreRegions):
            self.stored.append(message)

    def say(self, message: SharedRegions | RegionsTaken, fds: tuple[int, ...] = ()) -> None:
        self.told.append((message, [os.dup(fd) for fd in fds]))

    def settle(self) -> None:
        self.regions.settle(lambda: True, "supervisor-1")

    def names(self) -> set[str]:
        return {region.name for region in self.regions.book.regions.values()}

    def register(self, ticket: int, name: str, key: str) -> None:
        message = RegisterRegion(ticket, name, key, 0, 64, UID, 0, 0)
        self.regions.handle("http-1", "http", message, 0.0)

    def unregister(self, ticket: int, name: str) -> None:
        self.regions.handle("http-1", "http", UnregisterRegions(ticket, name, UID), 0.0)


def carry(sender: Coordinator, receiver: Coordinator) -> None:
    """Deliver the sender's messages to the receiver."""
    told, sender.told = sender.told, []
    for message, fds in told:
        if isinstance(message, SharedRegions):
            receiver.regions.take(message, fds, 0.0)
        else:
            receiver.regions.sharing.confirmed(message)


def talk(*pair: Coordinator) -> None:
    """Until neither has anything to say."""
    for _ in range(4):
        for sender, receiver in (pair, pair[::-1]):
            sender.settle()
            carry(sender, receiver)
    for one in pair:
        one.settle()
    assert [one.told for one in pair] == [[], []]


@pytest.fixture
def memory():
    with Memory(4096) as made:
        yield made


@pytest.fixture
def old(tmp_path, memory):
    """A coordinator with a named and a sealed region."""
    made = Coordinator(tmp_path)
    made.register(1, "named", memory.name)
    made.regions.system.register_passed(Caller(UID), "sealed", 0, 64, memfd(), MEMFD)
    made.settle()
    yield made
    made.regions.close()


@pytest.fixture
def new(tmp_path, old):
    """The next generation's coordinator, linked to `old`."""
    made = Coordinator(tmp_path)
    old.regions.sharing.begin(old.say, True)
    made.regions.sharing.begin(made.say, False)
    yield made
    made.regions.close()


def test_the_next_generation_knows_what_is_registered(old: Coordinator, new: Coordinator) -> None:
    talk(old, new)
    assert new.names() == old.names() == {"named", "sealed"}
    assert new.regions.book.regions == old.regions.book.regions
    assert {r.name for s in new.stored for r in s.regions} == {"named", "sealed"}


def test_both_hear_what_comes_and_goes_and_their_numbers_differ(old, new, memory) -> None:
    talk(old, new)
    old.register(2, "late", memory.name)
    new.register(3, "early", memory.name)
    talk(old, new)
    assert new.names() == old.names() == {"named", "sealed", "late", "early"}
    assert len({r.number for r in new.regions.book.regions.values()}) == 4
    new.unregister(4, "named")
    old.unregister(5, "early")
    talk(old, new)
    assert new.names() == old.names() == {"sealed", "late"}
    assert (old.answers, new.answers) == ([1, 2, 5], [3, 4])


def test_clients_hear_of_it_when_both_have_published(old, new, memory) -> None:
    talk(old, new)
    old.register(2, "late", memory.name)
    old.settle()
    assert old.answers == [1]
    assert old.regions.urgent
    carry(old, new)
    old.settle()
    assert old.answers == [1]
    new.settle()
    carry(new, old)
    old.settle()
    assert old.answers == [1, 2]


@pytest.mark.parametrize("ended", [True, False])
def test_nobody_waits_for_one_that_ends_or_hangs(old, new, memory, monkeypatch, ended) -> None:
    talk(old, new)
    monkeypatch.setattr(region_sharing, "_PATIENCE_S", 0.0)
    old.register(2, "late", memory.name)
    if ended:
        old.regions.sharing.end()
    old.settle()
    assert old.answers == [1, 2]
    carry(old, new)


def reconnect(old: Coordinator, new: Coordinator) -> None:
    """Reconnect; undelivered messages are lost."""
    for one in (old, new):
        for _, fds in one.told:
            close_all(fds)
        one.told.clear()
    old.regions.sharing.begin(old.say, True)
    new.regions.sharing.begin(new.say, True)


def test_after_a_new_connection_both_know_what_has_come_and_gone_without_one(old, new, memory):
    talk(old, new)
    old.regions.sharing.end()
    old.unregister(2, "named")
    old.register(3, "named", memory.name)
    new.unregister(4, "sealed")
    new.register(5, "early", memory.name)
    old.settle()
    new.settle()
    reconnect(old, new)
    talk(old, new)
    assert new.names() == old.names() == {"named", "early"}
    assert new.regions.book.regions == old.regions.book.regions
    assert old.regions.sharing.gone == new.regions.sharing.gone == {}, "nothing is left to tell"


def test_a_coordinator_that_was_started_again_hears_what_went_without_it(
    old: Coordinator, new: Coordinator, tmp_path, memory: Memory
) -> None:
    talk(old, new)
    regions = dict(old.regions.book.regions)
    new.unregister(4, "named")
    new.register(5, "early", memory.name)
    new.settle()
    again = Coordinator(tmp_path)
    before = Snapshot("cafe0123", 0, regions=regions, next_region=3)
    again.regions.restore(before, 0.0)
    for number, fd in old.regions._fds.items():
        assert again.regions.stored(StoredRegions((number,), True), [os.dup(fd)], 0.0) == []
    reconnect(again, new)
    talk(again, new)
    assert new.names() == again.names() == {"sealed", "early"}
    again.register(6, "late", memory.name)
    assert len({r.number for r in again.regions.book.regions.values()}) == 3
    again.regions.close()


def test_many_that_go_at_once_are_told_in_parts(old: Coordinator, new: Coordinator) -> None:
    talk(old, new)
    sharing = old.regions.sharing
    sharing.tell(old.regions.book, {}, [], list(range(1 << 30, (1 << 30) + 50_000)))
    assert sum(len(message.gone) for message, _ in old.told) == 50_000
    assert all(len(messages.encode(message)) < MAX_MESSAGE for message, _ in old.told)
    carry(old, new)
    new.settle()
    carry(new, old)
    assert sharing.gone == {}


WITH_LOCK = """
import sys
from shmserve.transport import rundir
lock = rundir.lock(sys.argv[1], "master")
print(lock.acquire(), flush=True)
sys.stdin.read()
"""


def test_the_link_ends_with_the_generation_before_whoever_has_its_lock_then(tmp_path, new) -> None:
    """The next master takes the lock at once."""
    before = open_fds(os.getpid())
    command = [sys.executable, "-c", WITH_LOCK, str(tmp_path)]

    def master() -> subprocess.Popen[str]:
        made = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)
        assert made.stdout.readline() == "True\n"
        return made

    with master() as first:
        link = Predecessor(str(tmp_path), "coordinator-2", new.regions, lambda: None)
        link._came(Welcome(messages.VERSION, "cafe0123"), [])
        link.turn(0.0)
        new.regions.sharing.tell(new.regions.book, {}, [], [1])
        assert new.regions.sharing.gone, "it is told"
        first.communicate(timeout=30)
    with master() as second:
        link.turn(0.0)
        new.answers.clear()
        new.unregister(7, "unknown")
        new.settle()
        assert new.answers == [7], "nobody is waited for"
        second.communicate(timeout=30)
    link.close()
    del link
    assert open_fds(os.getpid()) == before


def test_a_name_that_both_have_given_is_the_later_ones(old, new, memory) -> None:
    talk(old, new)
    old.register(2, "same", memory.name)
    old.settle()
    new.register(3, "same", memory.name)
    talk(old, new)
    assert old.names() == new.names()


def test_what_systemd_has_kept_is_registered_again(old, tmp_path, memory) -> None:
    regions = tuple(old.regions.book.regions.values())
    numbers = tuple(region.number for region in regions)
    fds = {number: fd for number, fd in old.regions._fds.items()}
    next_service = Coordinator(tmp_path)
    copies = [os.dup(fds[number]) for number in numbers]
    kept = StoredRegions(numbers, True, regions)
    assert next_service.regions.stored(kept, copies, 0.0) == []
    assert next_service.regions.stored(StoredRegions(()), [], 0.0) == []
    next_service.settle()
    assert next_service.names() == {"named", "sealed"}
    assert {r.name for s in next_service.stored for r in s.regions} == {"named", "sealed"}
    next_service.register(7, "another", memory.name)
    assert len({r.number for r in next_service.regions.book.regions.values()}) == 3
    wrong = StoredRegions((numbers[0],), True, regions[:1])
    assert next_service.regions.stored(wrong, [memfd()], 0.0) == []
    next_service.regions.close()


def test_of_a_process_that_has_ended_nothing_is_registered_again(tmp_path) -> None:
    first = Coordinator(tmp_path)
    fd = memfd()
    caller = Caller(UID)
    first.regions.system.register_passed(caller, "gone", 0, 64, os.dup(fd), MEMFD)
    (region,) = first.regions.book.regions.values()
    dead = msgspec.structs.replace(region, pid=1 << 22, started=1)
    second = Coordinator(tmp_path)
    kept = StoredRegions((dead.number,), True, (dead,))
    assert second.regions.stored(kept, [fd], 0.0) == [dead.number]
    second.settle()
    assert second.names() == set()
    first.regions.close()
    second.regions.close()
