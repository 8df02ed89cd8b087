"""Memory of a process: private pages, the share of other pages, no shared memory."""

import subprocess
import sys

from shmserve.observe import usage

MIB = 1 << 20
# A parent with 64 MiB and as much of shared memory, and a child with 32 MiB more
PROGRAM = """
import mmap, os, sys
kept = bytearray(b"x" * (64 << 20))
shared = mmap.mmap(-1, 64 << 20)
shared.write(b"x" * (64 << 20))
pid = os.fork()
if not pid:
    more = bytearray(b"y" * (32 << 20))
    sum(shared[::4096])
    print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_a_share_of_shared_pages_counts_and_shared_memory_does_not() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        mapped, share = usage.mapped_memory(child), usage.proportional_memory(child)
        assert mapped is not None
        assert share is not None
        assert 96 * MIB < mapped < 128 * MIB
        assert 64 * MIB < share < 80 * MIB
        process.communicate()
    assert usage.mapped_memory(process.pid) is None
    assert usage.proportional_memory(process.pid) is None
