"""Regions when the coordinator is replaced and the supervisor is slow."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from shmserve.core.caller import Caller
from shmserve.core.region_kinds import MEMFD
from shmserve.core.registry import Snapshot
from shmserve.errors import ResourceExhausted
from shmserve.protocol.control.region_messages import NeedRegion, RegionGiven, StoredRegions
from tests.integration.region_client import Memory
from tests.integration.test_client_socket import memfd
from tests.running_server import open_fds
from tests.unit.coordinator.test_region_sharing import UID, Coordinator


class Desk(Coordinator):
    """A coordinator's regions, and the messages to executors."""

    def __init__(self, run_dir: Path) -> None:
        self.given: list[RegionGiven] = []
        super().__init__(run_dir)

    def _send(self, process: str, message: Any, fds: tuple[int, ...]) -> None:
        if isinstance(message, RegionGiven):
            assert len(fds) == (not message.error_code)
            self.given.append(message)

    def turn(self, now: float) -> list[str]:
        """Return the names of regions given to executors by `now`; "" for an unknown region."""
        self.regions.tick(now)
        self.regions.settle(lambda: True, "")
        given, self.given = self.given, []
        return [message.region.name if message.region else "" for message in given]


@pytest.fixture
def fd():
    fd = memfd()
    yield fd
    os.close(fd)


@pytest.fixture
def desk(tmp_path, fd):
    """The successor of a coordinator with two regions, and an executor's question about the
    regions."""
    first = Desk(tmp_path)
    with Memory(4096) as memory:
        first.regions.system.register_passed(Caller(UID), "sealed", 0, 64, os.dup(fd), MEMFD)
        first.register(1, "named", memory.name)
        book, desk = first.regions.book, Desk(tmp_path)
        before = Snapshot("e", 1, regions=book.regions, next_region=book.next_number)
        desk.regions.restore(before, 0.0)
        for region in book.regions.values():
            asked = NeedRegion(region.number, region.number)
            desk.regions.handle("executor-1", "executor", asked, 0.0)
        yield desk
    first.regions.close()
    desk.regions.close()


def test_a_supervisor_that_is_late_costs_nobody_a_region(desk: Desk, fd: int) -> None:
    assert desk.turn(1.0) == []
    assert desk.turn(2.0) == ["named"], "it is found without a supervisor"
    assert desk.turn(20.0) == []
    assert desk.names() == {"named", "sealed"}
    (number,) = [r.number for r in desk.regions.book.regions.values() if r.sealed]
    assert desk.regions.stored(StoredRegions((number,)), [os.dup(fd)], 21.0) == []
    assert desk.turn(21.0) == ["sealed"]
    assert desk.names() == {"named", "sealed"}


@pytest.mark.parametrize("there", [True, False])
def test_what_nobody_has_kept_is_lost(desk: Desk, there: bool) -> None:
    if there:  # a supervisor without descriptors
        desk.regions.stored(StoredRegions(()), [], 0.5)
    else:
        assert desk.turn(2.0) == ["named"]
    assert sorted(desk.turn(60.0)) == (["", "named"] if there else [""])
    assert desk.names() == {"named"}


def test_many_new_regions_go_to_the_supervisor_in_few_messages(tmp_path: Path) -> None:
    """A message for each of ten thousand regions would seem to overwhelm the coordinator."""
    desk = Coordinator(tmp_path)
    with Memory(4096) as memory:
        for number in range(100):
            desk.register(number, f"r{number}", memory.name)
        desk.settle()
        desk.regions.close()
    assert [len(message.numbers) for message in desk.stored] == [64, 36]
    assert [len(message.regions) for message in desk.stored] == [64, 36]


def test_regions_leave_descriptors_for_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fd: int
) -> None:
    desk = Coordinator(tmp_path)
    before = open_fds(os.getpid())
    limit = 2 * before  # half of which is kept
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with Memory(4096) as memory:
        for number in range(20):
            desk.register(number, f"r{number}", memory.name)
        with pytest.raises(ResourceExhausted, match="the server can hold no more shared memory"):
            desk.regions.system.register_passed(Caller(UID), "p", 0, 64, os.dup(fd), MEMFD)
        assert len(desk.names()) < 20
        assert max(desk.regions._fds.values(), default=0) < before
        monkeypatch.setattr(resource, "getrlimit", lambda _: (10_000, 10_000))
        desk.regions.system.register_passed(Caller(UID), "p", 0, 64, os.dup(fd), MEMFD)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (1, 1))
        desk.regions.system.register_passed(Caller(UID), "p", 0, 64, os.dup(fd), MEMFD)
        desk.regions.close()
    assert open_fds(os.getpid()) == before


def test_surplus_descriptors_are_closed(desk: Desk, fd: int) -> None:
    before = open_fds(os.getpid())
    desk.regions.stored(StoredRegions((), True), [os.dup(fd)], 0.5)
    assert open_fds(os.getpid()) == before


def test_regions_with_a_key_of_which_no_descriptor_was_kept_are_opened_again(
    tmp_path: Path,
) -> None:
    """The store of a service manager may have less room than there are regions."""
    first, next_service = Coordinator(tmp_path), Coordinator(tmp_path)
    with Memory(4096) as memory:
        first.register(1, "there", memory.name)
        with Memory(4096) as removed:
            first.register(2, "gone", removed.name)
        regions = tuple(first.regions.book.regions.values())
        numbers = tuple(region.number for region in regions)
        assert next_service.regions.stored(StoredRegions(numbers, False, regions), [], 0.0) == [2]
        assert next_service.names() == {"there"}
        next_service.settle()
        assert [message.numbers for message in next_service.stored] == [(1,)]
        next_service.register(3, "new", memory.name)
        assert {r.number for r in next_service.regions.book.regions.values()} == {1, 2}
        first.regions.close()
        next_service.regions.close()
