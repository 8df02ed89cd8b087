"""Which process a pid means: pids are used again, so something goes with them.

That is the process's start, which /proc tells. Where /proc hides the processes of other users
(`hidepid`, systemd's ProtectProc), it is the number of the process's own inode in the kernel's
file system of pidfds, negated; kernels before 6.9 have none, and then it is 0: not known.
"""

from __future__ import annotations

import os
import socket

from shmserve.transport.processes import pidfd_open

_SO_PEERPIDFD = 77  # Linux 6.5, not in `socket`


def started_at(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0: there is none, or it is hidden."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def of_peer(sock: socket.socket, pid: int) -> tuple[int, int]:
    """The (pid, identity) of a Unix socket's peer; (0, 0): it has ended, or is in no sight.

    Args:
        sock: connected.
        pid: what SO_PEERCRED said.
    """
    if pid <= 0:
        return 0, 0
    started = started_at(pid)
    if started:
        return pid, started
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        pidfd: int | None = int.from_bytes(raw, "little")
    except OSError:  # an older kernel, or the peer has ended
        pidfd = pidfd_open(pid)
    if pidfd is None:
        return 0, 0
    try:
        return pid, -_inode(pidfd)
    finally:
        os.close(pidfd)


def is_of(pidfd: int, pid: int, identity: int) -> bool:
    """Whether the process of `pidfd`, opened by this pid just now, is the one that was meant."""
    if identity < 0:
        return -_inode(pidfd) == identity
    return not identity or started_at(pid) == identity


def _inode(pidfd: int) -> int:
    """0: the kernel has one for all."""
    inode, other = os.fstat(pidfd).st_ino, os.eventfd(0, os.EFD_CLOEXEC)
    try:
        return 0 if inode == os.fstat(other).st_ino else inode
    finally:
        os.close(other)
