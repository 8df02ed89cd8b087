"""Process identity: tells a process from a later one with the same pid.

A pid goes together with the process's start time, which /proc tells. Where /proc hides the
processes of other users (`hidepid`, systemd's ProtectProc), the second value is the negated inode
number of the process in the kernel's file system of pidfds. Kernels before 6.9 have no such
number, and the value is 0: not known.
"""

import os
import socket

from shmserve.transport.processes import pidfd_open

_SO_PEERPIDFD = 77  # Linux 6.5, not in `socket`


def started_at(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if the process has ended or
    is hidden."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def of_peer(sock: socket.socket, pid: int) -> tuple[int, int]:
    """Return (pid, identity) of a Unix socket's peer; (0, 0) if the peer belongs to another PID
    namespace. `sock`: a connected socket. `pid`: the peer's pid from SO_PEERCRED."""
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
    if pidfd is None:  # the peer has ended; without its pid nobody would notice
        return pid, 0
    try:
        return pid, -_inode(pidfd)
    finally:
        os.close(pidfd)


def is_of(pidfd: int, pid: int, identity: int) -> bool:
    """Return whether `pidfd`, just opened by `pid`, is the process with this identity. An unknown
    identity (0) fits every process."""
    if identity < 0:
        return -_inode(pidfd) == identity
    return not identity or started_at(pid) == identity


def _inode(pidfd: int) -> int:
    """Return the inode of a pidfd; 0 if the kernel has the same inode for all."""
    inode, other = os.fstat(pidfd).st_ino, os.eventfd(0, os.EFD_CLOEXEC)
    try:
        return 0 if inode == os.fstat(other).st_ino else inode
    finally:
        os.close(other)
