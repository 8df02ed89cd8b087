"""The owner of a process, also where /proc hides the process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shmserve.transport.trust import process_identity
from shmserve.transport.trust.peer_credentials import caller_of
from shmserve.transport.trust.process_identity import is_of, started_at


@pytest.mark.needs("mounts")
def test_owners_that_proc_hides_are_watched_too():
    # The process changes to a user without write access to this process's coverage files
    environ = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}
    hide = 'mount -t proc -o hidepid=invisible proc /proc && exec "$@"'
    done = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c", hide, "sh"),
            *(sys.executable, str(Path(__file__).with_name("hidden_owner.py"))),
        ],
        env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_another_process_is_told_by_its_start_and_by_its_inode(monkeypatch):
    own, parent = os.pidfd_open(os.getpid()), os.pidfd_open(os.getppid())
    try:
        assert is_of(own, os.getpid(), started_at(os.getpid()))
        assert not is_of(parent, os.getppid(), started_at(os.getppid()) + 1)
        monkeypatch.setattr(process_identity, "started_at", lambda pid: 0)
        assert not is_of(own, os.getpid(), 7), "it has ended: its start could be seen before"
        assert is_of(own, os.getpid(), -os.fstat(own).st_ino)
        assert not is_of(parent, os.getppid(), -os.fstat(own).st_ino)
    finally:
        os.close(own)
        os.close(parent)


@pytest.mark.parametrize("option", [process_identity._SO_PEERPIDFD, 1 << 30])  # older kernels
def test_a_peer_that_has_ended_has_its_pid(monkeypatch, option: int) -> None:
    monkeypatch.setattr(process_identity, "_SO_PEERPIDFD", option)
    address = f"\0shmserve-ended-{os.getpid()}"
    connect = f"import socket; socket.socket(socket.AF_UNIX).connect({address!r})"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        with subprocess.Popen([sys.executable, "-c", connect]) as peer:
            assert peer.wait(60) == 0
        sock = listener.accept()[0]
    with sock:
        assert caller_of(sock).pid == peer.pid
