"""Clients' memory in systemd's descriptor store, and back."""

import os
import socket
from pathlib import Path

import msgspec
import pytest

from shmserve.core.registry import Region
from shmserve.supervisor.generations import lasting_regions
from shmserve.supervisor.generations.lasting_regions import LastingRegions, restored
from shmserve.transport.notify import Notifier
from tests.running_server import open_fds


class Store:
    """systemd's store of descriptors (FDSTORE=1), of `limit` descriptors."""

    def __init__(self, path: Path) -> None:
        self.limit = 1000
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(str(path))
        self.sock.setblocking(False)
        self.kept: dict[str, list[int]] = {}
        self.received = 0  # descriptors, ever

    def settle(self) -> list[bytes]:
        """Take the messages sent; return the first bytes of the stored objects, without the
        list."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 1000, 64)
            except BlockingIOError:
                break
            said = dict(line.split("=", 1) for line in data.decode().splitlines())
            self.received += len(fds)
            if "FDSTORE" in said:
                room = self.limit - sum(map(len, self.kept.values()))
                self.kept.setdefault(said["FDNAME"], []).extend(fds[:room])
                for fd in fds[room:]:
                    os.close(fd)
            else:
                for fd in self.kept.pop(said["FDNAME"], []):
                    os.close(fd)
        objects = [fd for name, fds in self.kept.items() if name != "region-list" for fd in fds]
        return sorted(os.pread(fd, 9, 0) for fd in objects)

    def passed(self) -> list[tuple[str, int]]:
        """Return the descriptors passed to the next start."""
        kept, self.kept = self.kept, {}
        return [(name, fd) for name, fds in kept.items() for fd in fds]

    def close(self) -> None:
        self.sock.close()


def memory(number: int) -> int:
    fd = os.memfd_create(f"test-{number}")
    os.write(fd, str(number).encode())
    return fd


def region(number: int, fd: int) -> Region:
    info = os.fstat(fd)
    identity = info.st_dev, info.st_ino
    return Region(f"r{number}", number, "", 0, 64, 1000, 0, 0, *identity, sealed=True)


class Clients:
    """Clients of a service, with one memory for each number; the last two numbers share a
    memory."""

    def __init__(self, count: int) -> None:
        self.fds = {number: memory(number) for number in range(1, count)}
        self.fds[count] = os.dup(self.fds[count - 1])
        self.regions = {number: region(number, fd) for number, fd in self.fds.items()}

    def without(self, *gone: int) -> dict[int, Region]:
        return {number: region for number, region in self.regions.items() if number not in gone}

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(lasting_regions, "_PATIENCE_S", 0.0)
    before = open_fds(os.getpid())
    made = Store(tmp_path / "notify")
    yield made
    made.close()
    assert open_fds(os.getpid()) == before


@pytest.fixture
def clients(store):
    made = Clients(4)
    yield made
    made.close()


class OneLife:
    """One life of a supervisor. systemd's queue is often full, so telling takes several turns."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lasting = LastingRegions(Notifier(store.sock.getsockname()))

    def tell(self, regions: dict[int, Region], fds: dict[int, int]) -> list[bytes]:
        """Tell systemd about the regions; return the stored contents."""
        for _ in range(20):
            self._lasting.turn(regions, fds)
            kept = self._store.settle()
        return kept


def test_what_is_stored_comes_back(store: Store, clients: Clients) -> None:
    supervisor = OneLife(store)
    assert supervisor.tell(clients.regions, clients.fds) == [b"1", b"2", b"3", b"3"]
    assert supervisor.tell(clients.without(1), clients.fds) == [b"2", b"3", b"3"]
    assert supervisor.tell(clients.without(1, 3), clients.fds) == [b"2", b"3"]
    next_generation = OneLife(store)
    assert next_generation.tell(clients.regions, clients.fds) == [b"1", b"2", b"3", b"3"]
    regions, back = restored([*store.passed(), ("region-9", memory(9))])
    assert regions == clients.regions
    assert {n: os.pread(back[n], 9, 0) for n in back} == {1: b"1", 2: b"2", 3: b"3", 4: b"3"}
    for fd in back.values():
        os.close(fd)


def test_one_description_that_two_regions_have_comes_back_for_both(clients: Clients) -> None:
    """systemd keeps no descriptor twice."""
    listed = os.memfd_create("test-list")
    os.write(listed, msgspec.msgpack.encode(tuple(clients.regions.values())))
    passed = [(f"region-{n}", os.dup(clients.fds[n])) for n in (1, 2, 3)]
    regions, back = restored([*passed, ("region-list", listed)])
    assert regions == clients.regions
    assert {os.fstat(back[n]).st_ino for n in (3, 4)} == {os.fstat(clients.fds[3]).st_ino}
    for fd in back.values():
        os.close(fd)


def test_what_went_while_there_was_no_supervisor_is_removed(store: Store, clients: Clients) -> None:
    OneLife(store).tell(clients.regions, clients.fds)
    assert OneLife(store).tell(clients.without(1, 2), clients.fds) == [b"3", b"3"]
    assert OneLife(store).tell({}, {}) == []
    assert restored(store.passed()) == ({}, {})


def test_of_many_none_is_lost(store: Store) -> None:
    clients = Clients(200)
    assert len(OneLife(store).tell(clients.regions, clients.fds)) == 200
    regions, back = restored(store.passed())
    assert regions == clients.regions
    for fd in back.values():
        os.close(fd)
    clients.close()


def test_a_full_store_keeps_the_old_regions(store: Store) -> None:
    clients = Clients(200)
    store.limit = 100
    old = clients.without(*range(100, 201))
    supervisor = OneLife(store)
    for told in (old, clients.regions):
        assert len(supervisor.tell(told, clients.fds)) == 99
    regions, back = restored(store.passed())
    assert regions == old
    for fd in back.values():
        os.close(fd)
    clients.close()


def test_a_full_store_gets_a_further_region_once_another_has_gone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = Clients(20)
    store.limit = 10
    monkeypatch.setenv("FDSTORE", "10")
    supervisor = OneLife(store)
    oldest = sorted(clients.fds)[:9]
    for gone in (), (), oldest[-1:], oldest:
        there = clients.without(*gone)
        kept = supervisor.tell(there, clients.fds)
        assert kept == sorted(str(number).encode() for number in sorted(there)[:9])
    for _, fd in store.passed():
        os.close(fd)
    clients.close()


def test_a_further_region_is_stored_without_the_others(store: Store) -> None:
    """systemd compares a new descriptor with each stored descriptor."""
    clients = Clients(200)
    supervisor = OneLife(store)
    supervisor.tell(clients.without(200), clients.fds)
    before = store.received
    assert len(supervisor.tell(clients.regions, clients.fds)) == 200
    assert store.received == before + 2, "the list and the region"
    regions, back = restored(store.passed())
    assert regions == clients.regions
    for fd in back.values():
        os.close(fd)
    clients.close()


def test_a_region_with_a_key_needs_no_descriptor(store: Store, clients: Clients) -> None:
    sealed = clients.regions.items()
    named = {n: msgspec.structs.replace(r, key="name", sealed=False) for n, r in sealed}
    OneLife(store).tell(named, clients.fds)
    kept = store.passed()
    for name, fd in kept:
        if name != "region-list":
            os.close(fd)
    assert restored([each for each in kept if each[0] == "region-list"]) == (named, {})


def test_regions_that_the_store_has_not_kept_are_counted_in_the_log(
    store: Store, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    OneLife(store).tell(clients.regions, clients.fds)
    kept = store.passed()
    for name, fd in kept:
        if name != "region-list":
            os.close(fd)
    assert restored([each for each in kept if each[0] == "region-list"]) == ({}, {})
    assert "4 of 4 regions that clients had registered are lost" in caplog.text


@pytest.mark.parametrize("first", [True, False])
def test_a_foreign_descriptor_with_the_name_of_the_list_costs_nothing(
    store: Store, clients: Clients, first: bool
) -> None:
    OneLife(store).tell(clients.regions, clients.fds)
    reading, writing = os.pipe()
    foreign = [("region-list", reading), ("region-list", memory(7)), ("region-1", writing)]
    kept = store.passed()
    regions, back = restored([*foreign, *kept] if first else [*kept, *foreign])
    assert regions == clients.regions
    for fd in back.values():
        os.close(fd)


def test_without_a_list_nothing_is_known_and_nothing_stays_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = open_fds(os.getpid())
    broken = memory(0)
    assert restored([("region-1", memory(1)), ("region-list", broken)]) == ({}, {})
    assert restored([("region-1", memory(1)), ("region-1", memory(1))]) == ({}, {})
    assert caplog.text.count("the list of clients' memory was not kept") == 2
    assert open_fds(os.getpid()) == before


@pytest.mark.parametrize("address", ["", "@nobody-listens-here"])
def test_without_systemd_nothing_happens(address: str) -> None:
    fd = memory(1)
    LastingRegions(Notifier(address)).turn({1: region(1, fd)}, {1: fd})
    os.close(fd)
