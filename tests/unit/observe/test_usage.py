"""Memory of a process: anonymous pages, no shared memory, no files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shmserve.observe import usage

MIB = 1 << 20
# A parent with 64 MiB and as much of shared memory and of a file, and a child with 32 MiB more
PROGRAM = """
import mmap, os, sys, tempfile
kept = bytearray(b"x" * (64 << 20))
shared = mmap.mmap(-1, 64 << 20)
shared.write(b"x" * (64 << 20))
file = tempfile.TemporaryFile(dir=sys.argv[1])
file.write(b"x" * (64 << 20))
file.flush()
weights = mmap.mmap(file.fileno(), 64 << 20, access=mmap.ACCESS_READ)
pid = os.fork()
if not pid:
    more = bytearray(b"y" * (32 << 20))
    sum(shared[::4096]) + sum(weights[::4096])
    print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_a_share_of_a_forks_pages_counts_shared_memory_and_files_do_not(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        whole, share = usage.anonymous_memory(child), usage.proportional_memory(child)
        assert whole is not None
        assert share is not None
        assert 96 * MIB < whole < 128 * MIB
        assert 64 * MIB < share < 80 * MIB
        process.communicate()
    assert usage.anonymous_memory(process.pid) is None
    assert usage.proportional_memory(process.pid) is None


def test_a_long_status_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a process with thousands of groups."""
    monkeypatch.setattr(usage, "_MOST", 64)
    used = usage.anonymous_memory(os.getpid())
    assert used is not None
    assert used > MIB


STATUS = b"Name: m\nGroups: 1 2\n\nVmRSS: 900 kB\n"
ROLLUP = b"5-7 ---p 0 00:00 0 [rollup]\nPss: 99 kB\nSwap: 64 kB\nSwapPss: 2 kB\n"


@pytest.mark.parametrize(
    ("status", "rollup", "whole", "share"),
    [
        (b"RssAnon: 7 kB\nVmSwap: 1 kB\n", b"Pss_Anon: 3 kB\nAnonymous: 6 kB\n", 8, 5),
        (b"RssAnon: 7 kB\n", b"Anonymous: 6 kB\n", 7, 8),
        (b"RssAnon: 7 kB\n", b"", 7, 7),
        (b"VmSwap: 1 kB\n", b"Anonymous: 6 kB\n", None, 8),
        (b"VmSwap: 1 kB\n", b"", None, None),
        (b"RssAnon: 7 kB\n", None, 7, 7),
        (b"", None, None, None),
    ],
)
def test_a_line_that_is_missing_is_not_zero(
    monkeypatch: pytest.MonkeyPatch,
    status: bytes,
    rollup: bytes | None,
    whole: int | None,
    share: int | None,
) -> None:
    """Kernels before 4.5, 4.14 and 5.4 lack lines or files, as do sandboxes."""

    def read(path: str) -> bytes:
        if path == "/proc/7/status":
            return STATUS + status
        assert path == "/proc/7/smaps_rollup"
        if rollup is None:
            raise FileNotFoundError(path)
        return ROLLUP + rollup

    monkeypatch.setattr(usage, "_read", read)
    found = usage.anonymous_memory(7), usage.proportional_memory(7)
    assert found == tuple(kib and kib * 1024 for kib in (whole, share))
