"""Locks that name their holder, pidfds, the run directory, sd_notify."""

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shmserve.errors import ConfigError
from shmserve.transport import rundir
from shmserve.transport.notify import Notifier
from shmserve.transport.processes import (
    FileLock,
    describe_status,
    has_ended,
    pidfd_open,
    send_signal,
    spawn,
)


@pytest.fixture
def other():
    """Another process that takes locks on request."""
    code = (
        "import sys\n"
        "from shmserve.transport.processes import FileLock\n"
        "locks = []\n"
        "for line in sys.stdin:\n"
        "    locks.append(FileLock(line.strip()))\n"
        "    print(locks[-1].acquire(), flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def acquire(process, path) -> bool:
    process.stdin.write(f"{path}\n")
    process.stdin.flush()
    return process.stdout.readline() == "True\n"


def test_a_lock_tells_who_holds_it_and_goes_with_its_process(tmp_path, other):
    path = str(tmp_path / "a.lock")
    assert FileLock(path).holder() is None
    assert acquire(other, path)
    lock = FileLock(path)
    assert lock.holder() == other.pid
    assert lock.acquire() is False
    pid, pidfd = lock.holder_pidfd()
    assert pid == other.pid
    assert not has_ended(pidfd)
    send_signal(pidfd, signal.SIGKILL)
    assert has_ended(pidfd, 60.0)
    os.close(pidfd)
    other.wait(60)
    assert lock.holder_pidfd() is None
    assert lock.acquire()
    assert lock.held
    lock.release()


def test_asking_does_not_take_the_lock(tmp_path, other):
    path = str(tmp_path / "a.lock")
    FileLock(path).acquire()  # makes the file; dropped when its descriptor goes
    lock = FileLock(path)
    lock.holder()
    assert not lock.held


def test_whoever_has_pinned_a_lock_asks_about_its_file_whatever_has_the_name(tmp_path, other):
    path = str(tmp_path / "a.lock")
    pinned = FileLock(path)
    pinned.pin()
    assert acquire(other, path)
    assert pinned.intact()
    os.unlink(path)
    assert not pinned.intact()
    assert FileLock(path).holder() is None
    assert pinned.holder() == other.pid
    assert pinned.acquire() is False
    assert pinned.intact() is False  # still pinned
    assert pinned.holder() == other.pid
    pinned.release()


def test_a_lock_without_space_for_a_beat_is_held_and_says_so(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    lock = FileLock(str(tmp_path / "grpc.lock"))
    monkeypatch.setattr(os, "pwrite", full)
    assert lock.acquire()
    assert lock.beat(), "it lives on"
    assert caplog.text.count("without a sign of life grpc may be taken for dead") == 1
    lock.release()


def test_a_beat_is_never_the_same_and_does_not_outlive_its_holder(tmp_path):
    lock, watcher = FileLock(str(tmp_path / "a.lock")), FileLock(str(tmp_path / "a.lock"))
    assert watcher.last_beat() is None
    lock.acquire()
    assert lock.beat()
    first = watcher.pin() and watcher.last_beat()
    assert lock.beat()
    assert first not in (None, watcher.last_beat())
    lock.release()
    lock.acquire()
    assert watcher.last_beat() is None
    # A full file system has no page for a file that was cut short
    assert (tmp_path / "a.lock").stat().st_size == 8
    (tmp_path / "a.lock").unlink()
    assert not lock.beat()
    lock.release()
    watcher.release()


def test_a_pidfd_of_nobody_is_none():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    assert pidfd_open(process.pid) is None


def test_a_spawned_process_has_its_own_group_and_only_the_descriptors_kept():
    read, write = os.pipe()
    other, _unused = os.pipe()
    code = f"import os; os.write({write}, b'%d %d' % (os.getpgid(0) == os.getpid(), \
len(os.listdir('/proc/self/fd'))))"
    process = spawn([sys.executable, "-c", code], keep=(write,))
    assert process.wait(60) == 0
    assert os.read(read, 100) == b"1 5"  # three standard streams, the pipe, and listdir's own
    for fd in (read, write, other, _unused):
        os.close(fd)


def test_statuses_are_told_in_words():
    assert describe_status(-9) == "signal SIGKILL"
    assert describe_status(1) == "status 1"
    assert describe_status(None) == "status unknown (not a child)"
    assert describe_status(-200) == "signal 200"


def test_the_run_directory_is_made_for_its_user_alone(tmp_path):
    path = str(tmp_path / "a" / "run")
    rundir.prepare(path)
    rundir.prepare(path)
    assert os.stat(path).st_mode & 0o777 == 0o700
    os.chmod(path, 0o750)
    with pytest.raises(ConfigError, match="open to other users"):
        rundir.prepare(path)


def test_a_run_directory_that_is_a_link_or_too_long_is_refused(tmp_path):
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="not a directory"):
        rundir.prepare(str(tmp_path / "link"))
    with pytest.raises(ConfigError, match="too long"):
        rundir.prepare(str(tmp_path / ("x" * 100)))


def test_cleaning_leaves_the_locks(tmp_path):
    run_dir = str(tmp_path)
    assert rundir.read_epoch(run_dir) == ""
    rundir.write_epoch(run_dir, "12345678")
    assert rundir.read_epoch(run_dir) == "12345678"
    for name in ("master.lock", "http.sock", "registry.page", "registry.msgpack.new"):
        (tmp_path / name).touch()
    for name in ("coordinator.sock", "executor-12-9f3a.sock"):
        (tmp_path / name).touch()
    rundir.clean(run_dir)
    assert sorted(os.listdir(run_dir)) == ["http.sock", "master.lock"]  # http.sock: gunicorn's
    rundir.clean_endpoint(run_dir, "executor-1-aaaa")


def test_all_that_is_there_becomes_young(tmp_path):
    """Cleaners go by each name, a link's own time included."""
    (tmp_path / "g1").mkdir()
    (tmp_path / "g1" / "epoch").touch()
    rundir.serve(str(tmp_path), "g1")
    paths = [tmp_path, tmp_path / "g1", tmp_path / "g1" / "epoch", tmp_path / "serving"]
    for path in paths:
        os.utime(path, (0, 0), follow_symlinks=False)
    rundir.touch(str(tmp_path))
    assert all(os.lstat(path).st_mtime > 0 for path in paths)


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(tmp_path, abstract):
    address = f"@shmserve-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address.replace("@", "\0"))
        sock.settimeout(60)
        Notifier(address).send("READY=1", "STATUS=x")
        assert sock.recv(100) == b"READY=1\nSTATUS=x"


def test_without_a_service_manager_nothing_happens(tmp_path):
    Notifier("").send("READY=1")
    Notifier(str(tmp_path / "nobody")).send("READY=1")


def test_a_service_can_read_its_own_files_and_hears_signals() -> None:
    code = """
import os, signal
from shmserve.transport.processes import undo_parents_state
os.umask(0o727)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
undo_parents_state()
print(oct(os.umask(0)), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "0o27 set()\n"


def test_missing_standard_streams_lead_nowhere(tmp_path: Path) -> None:
    """Also for programs that this process becomes."""
    look = (
        "import os; names = [os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)];"
        f"open({str(tmp_path / 'found')!r}, 'w').write(' '.join(names))"
    )
    code = (
        "import os, sys; os.close(0), os.close(1)\n"
        "from shmserve.transport.processes import undo_parents_state\n"
        "undo_parents_state()\n"
        f"os.execv(sys.executable, [sys.executable, '-c', {look!r}])"
    )
    with (tmp_path / "stderr").open("w") as stderr:
        subprocess.run([sys.executable, "-c", code], stderr=stderr, check=True)
    assert (tmp_path / "found").read_text() == f"/dev/null /dev/null {tmp_path / 'stderr'}"
