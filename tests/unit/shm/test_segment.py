"""Segments: real POSIX shared memory, and nothing left of it."""

import mmap
import os

import numpy as np
import posix_ipc
import pytest

from shmserve.errors import ArenaExhausted
from shmserve.shm import segment as segments
from shmserve.shm.segment import Mapping, Segment, sweep
from tests.running_server import open_fds

EPOCH = f"{os.getpid():08x}"  # servers and other tests make segments meanwhile


def _ours() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"shmserve.{EPOCH}.")]


def test_a_segment_has_no_name_and_is_read_through_its_fd() -> None:
    segment = Segment(EPOCH, 1 << 20)
    assert _ours() == []
    segment.view[:5] = b"hello"
    fd = segment.reader_fd()
    mapping = Mapping(fd, 1 << 20)
    os.close(fd)
    assert bytes(mapping.view[:5]) == b"hello"
    assert mapping.view.readonly
    segment.close()
    assert bytes(mapping.view[:5]) == b"hello"  # lives as long as a reader


def test_a_reader_cannot_write_or_map_for_writing() -> None:
    segment = Segment(EPOCH, 4096)
    fd = segment.reader_fd()
    try:
        with pytest.raises(OSError):
            mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        array = np.frombuffer(Mapping(fd, 4096).view, np.uint8)
        with pytest.raises(ValueError):
            array.flags.writeable = True
    finally:
        os.close(fd)
        segment.close()


def test_free_gives_the_memory_back_under_a_reader() -> None:
    segment = Segment(EPOCH, 1 << 20)
    fd = segment.reader_fd()
    mapping = Mapping(fd, 1 << 20)
    segment.view[:3] = b"abc"
    segment.free()
    assert bytes(mapping.view[:3]) == b"\0\0\0"  # no SIGBUS: the object keeps its size
    assert os.fstat(fd).st_blocks <= 16  # at most the pages looked at since
    os.close(fd)


def test_an_fd_that_is_too_small_is_not_mapped() -> None:
    segment = Segment(EPOCH, 4096)
    fd = segment.reader_fd()
    with pytest.raises(OSError):
        Mapping(fd, 8192)
    os.close(fd)
    segment.close()


def _no_space(fd: int, offset: int, size: int) -> None:
    raise OSError(28, "No space left on device")


def test_full_shared_memory_is_an_error_at_once(monkeypatch) -> None:
    monkeypatch.setattr(segments.os, "posix_fallocate", _no_space)  # type: ignore[attr-defined]
    fds = open_fds(os.getpid())
    with pytest.raises(ArenaExhausted):
        Segment(EPOCH, 4096)
    assert open_fds(os.getpid()) == fds
    assert _ours() == []


def test_a_shortage_is_logged_once_until_it_is_over(monkeypatch, caplog) -> None:
    Segment(EPOCH, 4096).close()  # an earlier shortage is over
    for shortage in (1, 2):
        with monkeypatch.context() as full:
            full.setattr(segments.os, "posix_fallocate", _no_space)  # type: ignore[attr-defined]
            for _ in range(20):
                with pytest.raises(ArenaExhausted):
                    Segment(EPOCH, 4096)
        Segment(EPOCH, 4096).close()
        assert len(caplog.records) == shortage


def test_sweep_removes_what_is_ours_and_nothing_else() -> None:
    left = posix_ipc.SharedMemory("/shmserve.dead0000.0123", posix_ipc.O_CREX, size=4096)
    left.close_fd()
    other = posix_ipc.SharedMemory("/notshmserve.test", posix_ipc.O_CREX, size=4096)
    other.close_fd()
    try:
        os.symlink("/etc/hostname", "/dev/shm/shmserve.link")
        sweep()  # or the coordinator of another test's server was faster
        assert not os.path.exists("/dev/shm/shmserve.dead0000.0123")
        assert os.path.exists("/dev/shm/notshmserve.test")
        assert os.path.islink("/dev/shm/shmserve.link")
    finally:
        os.unlink("/dev/shm/shmserve.link")
        other.unlink()
