"""The keeper with small programs: signals, the followed master, and the end."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.supervisor.generations.keeper import _Masters
from tests.running_server import wait_until

# As `shmserve serve` starts the keeper. If MANAGED, a socket is passed, as systemd does.
START = '''
import os, subprocess, sys
from shmserve.transport.processes import adopt_orphans
adopt_orphans()
if sidecar := os.environ.get("SIDECAR"):
    subprocess.Popen([sys.executable, "-c", sidecar])
if os.environ["MANAGED"]:
    os.environ["LISTEN_PID"] = str(os.getpid())
keeper = """
from shmserve.supervisor.generations import keeper
keeper._LAST_S = float(keeper.sys.argv.pop(1))
keeper.sys.exit(keeper.main())
"""
script, last_s, run_dir, limit_s, again = sys.argv[1:]
words = ["-c", keeper, last_s, "shmserve: keeper (x)", run_dir, limit_s, again]
words += [sys.executable, "-c", script]
os.execv(sys.executable, [sys.executable, *words])
'''
# A master tells each signal, and `hand_over` is the handover's part.
MASTER = """
import os, select, signal
keeper, keeper_pid = map(int, os.environ["_SHMSERVE_KEEPER_FD"].split(":"))
assert keeper_pid == os.getppid()
def serve(name, heard):
    def told(number, _):
        print(name, signal.Signals(number).name, flush=True)
        heard(signal.Signals(number).name)
    for number in ("HUP", "INT", "QUIT", "USR1", "USR2", "TERM", "TTIN", "TTOU"):
        signal.signal(getattr(signal, "SIG" + number), told)
    print(name, os.getpid(), os.environ.get("LISTEN_PID") == str(os.getpid()), flush=True)
    while True:
        signal.pause()
def hand_over(successor, serves=True):
    first = os.pidfd_open(os.getpid())
    if os.fork():
        return
    waits, told = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(told)
        os.read(waits, 1)
        successor()
    os.write(keeper, b"%d\\n" % pid * (1 + serves))
    os.close(told)
    select.select([first], [], [])
    os._exit(0)
def second():
    serve("second", lambda name: os._exit(7) if name == "SIGTERM" else None)
"""


class Kept:
    """A keeper and its first master, a program in Python; `more`: further words for START."""

    def __init__(self, script: str, *more: str, managed: bool = True) -> None:
        with socket.create_server(("127.0.0.1", 0)) as passed:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, MASTER + script, *more],
                env={**os.environ, "MANAGED": "yes" if managed else ""},
                pass_fds=[passed.fileno()],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.pid = self.process.pid

    def says(self) -> str:
        return self.process.stdout.readline().strip()

    def master(self) -> int:
        """Return the pid reported by the next master."""
        return int(self.says().split()[1])

    def asked(self, number: signal.Signals) -> str:
        """Send a signal to the keeper, and return the next output."""
        self.process.send_signal(number)
        return self.says()

    def children(self) -> list[int]:
        text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in text.split()]


@contextlib.contextmanager
def kept(
    script: str,
    last_s: float = 600.0,
    run_dir: Path = Path("/nowhere"),
    limit_s: float = 600.0,
    again: str = "",
    managed: bool = True,
) -> Iterator[Kept]:
    """`last_s`: how long the keeper awaits descendants after the last master. `again`: the program
    that the keeper starts after a kill."""
    words = shlex.join([sys.executable, "-c", MASTER + again])
    made = Kept(script, str(last_s), str(run_dir), str(limit_s), words, managed=managed)
    try:
        yield made
    finally:
        for pid in (*made.children(), made.pid) if made.process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):  # has just ended
                os.kill(pid, signal.SIGKILL)
        made.process.wait()
        made.process.stdout.close()


def test_signals_are_the_masters_and_so_are_passed_sockets_and_the_status() -> None:
    with kept("serve('first', lambda name: os._exit(3) if name == 'SIGINT' else None)") as keeper:
        name, pid, is_for_master = keeper.says().split()
        assert (name, is_for_master) == ("first", "True"), "LISTEN_PID"
        for number in ("HUP", "QUIT", "USR1", "USR2", "TERM", "TTIN", "TTOU", "TERM"):
            assert keeper.asked(signal.Signals[f"SIG{number}"]) == f"first SIG{number}"
        open_there = {int(fd) for fd in os.listdir(f"/proc/{keeper.pid}/fd")}
        assert len(open_there - {0, 1, 2}) == 1, "the pipe, and no socket"
        assert keeper.children() == [int(pid)]
        assert Path(f"/proc/{keeper.pid}/cmdline").read_text().strip("\0") == "shmserve: keeper (x)"
        assert keeper.asked(signal.SIGINT) == "first SIGINT"
        assert keeper.process.wait() == 3


def test_a_master_that_is_killed_ends_the_service_once_its_processes_have_ended() -> None:
    script = """
first = os.pidfd_open(os.getpid())
if not os.fork():
    select.select([first], [], [])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    print("orphan", os.getpid(), flush=True)
    signal.sigwait({signal.SIGUSR1})
    os._exit(0)
serve("first", print)
"""
    with kept(script) as keeper:
        os.kill(keeper.master(), signal.SIGKILL)
        orphan = keeper.master()
        wait_until(lambda: keeper.children() == [orphan], "the master is not reaped")
        os.kill(orphan, signal.SIGUSR1)
        assert keeper.process.wait() == 128 + signal.SIGKILL


def test_a_handover_moves_signals_and_the_service_to_the_next_master() -> None:
    script = "serve('first', lambda name: hand_over(second) if name == 'SIGUSR2' else None)"
    with kept(script) as keeper:
        first = keeper.master()
        assert keeper.asked(signal.SIGUSR2) == "first SIGUSR2"
        second = keeper.master()
        assert keeper.asked(signal.SIGHUP) == "second SIGHUP", "although the first one lives"
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: keeper.children() == [second], "others are not reaped")
        assert keeper.asked(signal.SIGHUP) == "second SIGHUP"
        assert keeper.asked(signal.SIGTERM) == "second SIGTERM"
        assert keeper.process.wait() == 7


def test_what_ends_the_service_reaches_a_master_that_is_told_of_later() -> None:
    with kept("serve('first', lambda name: hand_over(second))") as keeper:
        first = keeper.master()
        assert keeper.asked(signal.SIGTERM) == "first SIGTERM"
        keeper.master()
        os.kill(first, signal.SIGKILL)
        assert keeper.says() == "second SIGTERM"
        assert keeper.process.wait() == 7


def test_a_next_master_that_ends_before_it_serves_leaves_the_service_to_the_first() -> None:
    script = """
def heard(name):
    if name == 'SIGUSR2':
        hand_over(lambda: os._exit(1), serves=False)
    if name == 'SIGTERM':
        os._exit(0)
serve('first', heard)
"""
    with kept(script) as keeper:
        first = keeper.master()
        assert keeper.asked(signal.SIGUSR2) == "first SIGUSR2"
        wait_until(lambda: _children_of(first) != [], "no handover")
        (handover,) = _children_of(first)
        wait_until(lambda: _is_zombie(_children_of(handover)), "the next master lives")
        os.kill(handover, signal.SIGKILL)
        wait_until(lambda: _is_zombie([handover]), "the handover lives")
        wait_until(lambda: keeper.children() == [first], "the next master is not reaped")
        assert keeper.asked(signal.SIGHUP) == "first SIGHUP"
        assert keeper.asked(signal.SIGTERM) == "first SIGTERM"
        assert keeper.process.wait() == 0


def test_a_master_that_served_is_the_status_although_the_one_before_ends_later() -> None:
    script = """
def heard(name):
    if name == 'SIGUSR2':
        hand_over(second)
    if name == 'SIGUSR1':
        os._exit(0)
serve('first', heard)
"""
    with kept(script) as keeper:
        first = keeper.master()
        assert keeper.asked(signal.SIGUSR2) == "first SIGUSR2"
        second = keeper.master()
        (handover,) = _children_of(first)
        os.kill(handover, signal.SIGKILL)
        wait_until(lambda: second in keeper.children(), "the second is not adopted")
        os.kill(second, signal.SIGTERM)
        assert keeper.says() == "second SIGTERM"
        wait_until(lambda: keeper.children() == [first], "the second is not reaped")
        os.kill(first, signal.SIGUSR1)
        assert keeper.says() == "first SIGUSR1"
        assert keeper.process.wait() == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_stop_before_the_master_hears_it_is_clean(number: signal.Signals) -> None:
    # A shell's background job, as the tests may be, has SIGINT and SIGQUIT ignored.
    script = (
        "signal.signal(2, signal.SIG_DFL); signal.signal(3, signal.SIG_DFL)\n"
        "print('x', os.getpid(), flush=True); signal.pause()"
    )
    with kept(script) as keeper:
        keeper.master()
        keeper.process.send_signal(number)
        assert keeper.process.wait() == 0
    with kept(script) as keeper:
        os.kill(keeper.master(), number)
        assert keeper.process.wait() == 128 + number, "by somebody else"


STUBBORN = """
waits, told = os.pipe()
if not os.fork():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("orphan", os.getpid(), flush=True)
    os.write(told, b"x")
    if not os.fork():
        os.setsid()
    signal.pause()
os.read(waits, 1)
"""


def test_a_second_signal_to_end_ends_what_is_left_at_once() -> None:
    with kept(STUBBORN + "serve('first', lambda name: os._exit(3))") as keeper:
        orphan, _ = keeper.master(), keeper.master()
        assert keeper.asked(signal.SIGTERM) == "first SIGTERM"
        wait_until(lambda: keeper.children() == [orphan], "the master is not reaped")
        keeper.process.send_signal(signal.SIGTERM)
        assert keeper.process.wait(60) == 3
        assert not Path(f"/proc/{orphan}").exists()


def test_a_master_that_leaves_for_the_background_is_an_error() -> None:
    script = """
waits, told = os.pipe()
if os.fork():
    os.read(waits, 1)
    os._exit(0)
print("daemon", os.getpid(), flush=True)
os.write(told, b"x")
signal.pause()
"""
    with kept(script, last_s=0.5) as keeper:
        daemon = keeper.master()
        assert keeper.says().startswith("shmserve: the main process ended, and what it had")
        assert keeper.process.wait() == 1
        assert not Path(f"/proc/{daemon}").exists()


def test_a_service_whose_master_was_killed_is_started_again_but_not_twice_a_minute() -> None:
    first = STUBBORN + "serve('first', print)"
    with kept(first, 0.2, again="serve('again', print)", managed=False) as keeper:
        orphan, master = keeper.master(), keeper.master()
        os.kill(orphan, signal.SIGSTOP)
        os.kill(master, signal.SIGKILL)
        assert "(signal 9): starting the service again" in keeper.says()
        master = keeper.master()
        assert keeper.children() == [master]
        assert keeper.asked(signal.SIGHUP) == "again SIGHUP"
        os.kill(master, signal.SIGSEGV)
        assert "main process was killed again (signal 11): ending" in keeper.process.stdout.read()
        assert keeper.process.wait() == 128 + signal.SIGSEGV


def test_a_child_of_the_program_before_the_keeper_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of `sidecar & exec shmserve serve` in a shell."""
    code = "import os, time; print('sidecar', os.getpid(), flush=True); time.sleep(60)"
    monkeypatch.setenv("SIDECAR", code)
    with kept("serve('first', print)", 0.2, again="serve('again', print)", managed=False) as keeper:
        lines = sorted((keeper.says(), keeper.says()))
        master, sidecar = (int(line.split()[1]) for line in lines)
        os.kill(master, signal.SIGKILL)
        assert "starting the service again" in keeper.says()
        keeper.master()
        assert Path(f"/proc/{sidecar}").exists()
        keeper.process.terminate()
        os.kill(sidecar, signal.SIGTERM)


def test_a_new_master_that_has_never_served_is_neither_judged_nor_counted() -> None:
    masters = _Masters(10)
    assert masters.must_beat
    masters.pids.append(11)  # as `told`
    masters.ended(10, -signal.SIGKILL)
    assert masters.serving == 11
    assert not masters.must_beat
    masters.ended(11, 1)
    assert masters.was_killed


@pytest.mark.parametrize("ends", ["exit(3)", "kill(os.getpid(), 15)"])
def test_a_master_that_ends_by_itself_is_not_started_again(ends: str) -> None:
    with kept(f"os.{'_' * ends.startswith('exit')}{ends}", managed=False) as keeper:
        assert keeper.process.wait() in (3, 128 + signal.SIGTERM)


SILENT = """
import sys, time
def beats(count):
    for number in range(1, count + 1):
        with open(sys.argv[1] + "/master.lock", "wb") as file:
            file.write(number.to_bytes(8))
        time.sleep(0.05)
    serve("silent", print)
"""


def test_a_master_that_gives_no_sign_of_life_is_killed(tmp_path: Path) -> None:
    """The generation that serves is judged, and a master that has never given a sign is not."""
    (tmp_path / "g5").mkdir()
    (tmp_path / "serving").symlink_to("g5")
    script = SILENT.replace("sys.argv[1]", repr(str(tmp_path / "g5")))
    with kept(script + "beats(40)", run_dir=tmp_path, limit_s=1.5) as keeper:
        keeper.master()
        assert keeper.says() == "shmserve: the main process gives no sign of life: killing it"
        assert keeper.process.wait() == 128 + signal.SIGKILL
    (tmp_path / "g5" / "master.lock").write_bytes(bytes(8))
    with kept("serve('new', print)", run_dir=tmp_path, limit_s=0.1) as keeper:
        keeper.master()
        time.sleep(1.0)
        assert keeper.asked(signal.SIGHUP) == "new SIGHUP"


def test_a_keeper_that_is_stopped_for_longer_than_a_look_goes_on() -> None:
    script = "serve('first', lambda name: os._exit(3) if name == 'SIGINT' else None)"
    with kept(script, limit_s=0.4) as keeper:
        keeper.master()
        for _ in range(3):
            os.kill(keeper.pid, signal.SIGSTOP)
            time.sleep(0.2)
            os.kill(keeper.pid, signal.SIGCONT)
            assert keeper.asked(signal.SIGHUP) == "first SIGHUP"
        keeper.process.send_signal(signal.SIGSTOP)
        keeper.process.send_signal(signal.SIGINT)
        assert keeper.asked(signal.SIGCONT) == "first SIGINT"
        assert keeper.process.wait() == 3


def test_a_new_master_goes_on_if_the_one_before_is_killed() -> None:
    script = """
serve('first', lambda name: hand_over(second, serves=False) if name == 'SIGUSR2' else None)
"""
    with kept(script, managed=False) as keeper:
        first = keeper.master()
        assert keeper.asked(signal.SIGUSR2) == "first SIGUSR2"
        second = keeper.master()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: keeper.children() == [second], "the first is not reaped")
        assert keeper.asked(signal.SIGHUP) == "second SIGHUP"
        assert keeper.asked(signal.SIGTERM) == "second SIGTERM"
        assert keeper.process.wait() == 7


def test_a_service_is_started_again_if_the_new_master_does_not_come_to_serve() -> None:
    script = """
def loads():
    serve('second', lambda name: os._exit(0))
serve('first', lambda name: hand_over(loads, serves=False) if name == 'SIGUSR2' else None)
"""
    with kept(script, again="serve('again', print)", managed=False) as keeper:
        first = keeper.master()
        assert keeper.asked(signal.SIGUSR2) == "first SIGUSR2"
        second = keeper.master()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: keeper.children() == [second], "the first is not reaped")
        os.kill(second, signal.SIGTERM)
        assert keeper.says() == "second SIGTERM"
        assert "starting the service again" in keeper.says()
        keeper.master()


def test_a_keeper_whose_words_nobody_reads_ends() -> None:
    """The master fills the keeper's stderr, and ends before its child, which the keeper kills."""
    script = """
os.set_blocking(2, False)
if os.fork():
    for size in (4096, 1):
        try:
            while True:
                os.write(2, b"\\n" * size)
        except BlockingIOError:
            pass
    os.set_blocking(2, True)
    os._exit(0)
signal.pause()
"""
    with kept(script, last_s=0.5) as keeper:
        assert keeper.process.wait(60) == 1


def test_pids_of_no_descendant_are_no_masters() -> None:
    script = """
os.write(keeper, b"1\\n%d\\n999999999\\n" % os.getppid())
serve('first', lambda name: os._exit(3) if name == 'SIGTERM' else None)
"""
    with kept(script) as keeper:
        keeper.master()
        assert keeper.asked(signal.SIGHUP) == "first SIGHUP"
        assert keeper.asked(signal.SIGTERM) == "first SIGTERM"
        assert keeper.process.wait() == 3


def _children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_zombie(pids: list[int]) -> bool:
    return bool(pids) and all(
        "State:\tZ" in Path(f"/proc/{pid}/status").read_text() for pid in pids
    )


@pytest.mark.parametrize("where", ["-D", "--daem", "environment", "file"])
def test_a_service_that_is_kept_stays_in_the_foreground(where: str, tmp_path) -> None:
    file = tmp_path / "other.py"
    file.write_text("daemon = True")
    words = {"environment": [], "file": ["-c", str(file)]}.get(where, [where])
    environ = {
        **os.environ,
        "SHMSERVE_RUN_DIR": str(tmp_path),
        "SHMSERVE_MODEL_REPOSITORY": str(tmp_path / "none"),
        "GUNICORN_CMD_ARGS": "--daemon" if where == "environment" else "",
    }
    command = [sys.executable, "-m", "shmserve", "serve", "--", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "shmserve: daemon: `shmserve serve` stays in the foreground" in done.stderr
