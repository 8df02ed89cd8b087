"""Two generations' coordinators know the same regions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shmserve.config import Settings
from shmserve.coordinator.regions import region_sharing
from shmserve.coordinator.regions.owners import Owners
from shmserve.coordinator.regions.registrations import RegionRegistrations
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.memory.budget import Ledger
from shmserve.core.regions.region_book import Caller
from shmserve.protocol.control.region_messages import (
    RegionAnswer,
    RegionsTaken,
    RegisterRegion,
    SharedRegions,
    StoredRegions,
    StoreRegions,
    UnregisterRegions,
)
from tests.integration.region_client import Memory
from tests.integration.test_client_socket import memfd

UID = os.geteuid()


class Coordinator:
    """The regions of one; `told`: what the other one is told, `answers`: what clients are."""

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
        self.regions.settle(lambda: None, "supervisor-1")

    def names(self) -> set[str]:
        return {region.name for region in self.regions.book.regions.values()}

    def register(self, ticket: int, name: str, key: str) -> None:
        message = RegisterRegion(ticket, name, key, 0, 64, UID, 0, 0)
        self.regions.handle("http-1", "http", message, 0.0)

    def unregister(self, ticket: int, name: str) -> None:
        self.regions.handle("http-1", "http", UnregisterRegions(ticket, name, UID), 0.0)


def carry(sender: Coordinator, receiver: Coordinator) -> None:
    """What one has told arrives."""
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
def memory() -> Iterator[Memory]:
    with Memory(4096) as made:
        yield made


@pytest.fixture
def old(tmp_path: Path, memory: Memory) -> Iterator[Coordinator]:
    """One with a named and a sealed region."""
    made = Coordinator(tmp_path)
    made.register(1, "named", memory.name)
    made.regions.system.register_sealed(Caller(UID), "sealed", 0, 64, memfd())
    made.settle()
    yield made
    made.regions.close()


@pytest.fixture
def new(tmp_path: Path, old: Coordinator) -> Iterator[Coordinator]:
    """The next generation's, linked to it."""
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


def test_both_hear_what_comes_and_goes_and_their_numbers_differ(
    old: Coordinator, new: Coordinator, memory: Memory
) -> None:
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


def test_clients_hear_of_it_when_both_have_published(
    old: Coordinator, new: Coordinator, memory: Memory
) -> None:
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
def test_nobody_waits_for_one_that_ends_or_hangs(
    old: Coordinator, new: Coordinator, memory: Memory, monkeypatch: Any, ended: bool
) -> None:
    talk(old, new)
    monkeypatch.setattr(region_sharing, "_PATIENCE_S", 0.0)
    old.register(2, "late", memory.name)
    if ended:
        old.regions.sharing.end()
    old.settle()
    assert old.answers == [1, 2]
    carry(old, new)


def test_a_name_that_both_have_given_is_the_later_ones(
    old: Coordinator, new: Coordinator, memory: Memory
) -> None:
    talk(old, new)
    old.register(2, "same", memory.name)
    old.settle()
    new.register(3, "same", memory.name)
    talk(old, new)
    assert old.names() == new.names()


def test_what_systemd_has_kept_is_registered_again(
    old: Coordinator, tmp_path: Path, memory: Memory
) -> None:
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


def test_of_a_process_that_has_ended_nothing_is_registered_again(tmp_path: Path) -> None:
    first = Coordinator(tmp_path)
    fd = memfd()
    caller = Caller(UID)
    first.regions.system.register_sealed(caller, "gone", 0, 64, os.dup(fd))
    (region,) = first.regions.book.regions.values()
    dead = msgspec.structs.replace(region, pid=1 << 22, started=1)
    second = Coordinator(tmp_path)
    kept = StoredRegions((dead.number,), True, (dead,))
    assert second.regions.stored(kept, [fd], 0.0) == [dead.number]
    second.settle()
    assert second.names() == set()
    first.regions.close()
    second.regions.close()
