"""Clients' memory in systemd's descriptor store, and back."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from shmserve.core.registry import Region
from shmserve.supervisor.lasting_regions import LastingRegions, restored
from shmserve.testing.running_server import open_fds
from shmserve.transport.notify import Notifier

REGIONS = {n: Region(f"r{n}", n, f"/key{n}", 0, 64, 1000) for n in (1, 2, 3)}


class Store:
    """What systemd does with FDSTORE=1."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(str(path))
        self.sock.setblocking(False)
        self.kept: dict[str, list[int]] = {}

    def settle(self) -> set[str]:
        """Take what has been sent; the names that are kept."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 1000, 8)
            except BlockingIOError:
                return set(self.kept)
            said = dict(line.split("=", 1) for line in data.decode().splitlines())
            if "FDSTORE" in said:
                self.kept.setdefault(said["FDNAME"], []).extend(fds)
            else:
                for fd in self.kept.pop(said["FDNAME"], []):
                    os.close(fd)

    def close(self) -> None:
        self.sock.close()


def memory(number: int) -> int:
    fd = os.memfd_create(f"test-{number}")
    os.write(fd, str(number).encode())
    return fd


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    before = open_fds(os.getpid())
    store = Store(tmp_path / "notify")
    fds = {number: memory(number) for number in REGIONS}
    lasting = LastingRegions(Notifier(str(tmp_path / "notify")))
    lasting.turn(REGIONS, fds)
    assert store.settle() == {"region-1", "region-2", "region-3", "region-list"}
    lasting.turn({1: REGIONS[1], 2: REGIONS[2]}, fds)
    assert store.settle() == {"region-1", "region-2", "region-list"}
    LastingRegions(Notifier(str(tmp_path / "notify"))).turn(REGIONS, fds)  # the next generation
    assert store.settle() == {"region-1", "region-2", "region-3", "region-list"}
    passed = [(name, fd) for name, kept in store.kept.items() for fd in kept]
    assert len(passed) == 4, "nothing is stored twice"
    extra = memory(9)
    regions, back = restored([*passed, ("region-9", extra)])
    assert regions == REGIONS
    assert {n: os.pread(fd, 9, 0) for n, fd in back.items()} == {1: b"1", 2: b"2", 3: b"3"}
    for fd in (*fds.values(), *back.values()):
        os.close(fd)
    store.close()
    assert open_fds(os.getpid()) == before


def test_without_a_list_nothing_is_known_and_nothing_stays_open() -> None:
    before = open_fds(os.getpid())
    broken = memory(0)
    assert restored([("region-1", memory(1)), ("region-list", broken)]) == ({}, {})
    assert restored([("region-1", memory(1)), ("region-1", memory(1))]) == ({}, {})
    assert open_fds(os.getpid()) == before


@pytest.mark.parametrize("address", ["", "@nobody-listens-here"])
def test_without_systemd_nothing_happens(address: str) -> None:
    fd = memory(1)
    LastingRegions(Notifier(address)).turn({1: REGIONS[1]}, {1: fd})
    os.close(fd)
