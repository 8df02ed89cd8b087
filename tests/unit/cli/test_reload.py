"""`shmserve reload` beside another reload."""

import argparse
import os
import subprocess
import sys
import threading
from pathlib import Path
from subprocess import PIPE

import pytest

from shmserve.cli.serving import reload
from shmserve.transport import rundir

FIRST = """
import sys
from shmserve.transport import rundir
base = sys.argv[1]
locks = [rundir.lock(base, role) for role in ("master", "handover")]
assert all(lock.acquire() for lock in locks)
print("there", flush=True)
sys.stdin.read()
rundir.serve(base, "g1")
"""
SECOND = """
import os, signal, sys
from shmserve.transport import rundir
base = sys.argv[1]
signal.signal(signal.SIGUSR2, lambda *_: rundir.hand_over(base, "g2 serves"))
assert rundir.lock(os.path.join(base, "g1"), "master").acquire()
print("there", flush=True)
sys.stdin.read()
"""


def started(script: str, base: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, str(base)]
    process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)
    assert process.stdout.readline() == "there\n"
    return process


def test_a_second_reload_is_for_the_generation_that_the_first_one_has_begun(
    monkeypatch, capsys, tmp_path
) -> None:
    monkeypatch.setenv("SHMSERVE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("SHMSERVE_RELOAD", "handover")
    os.mkdir(tmp_path / "g1")
    with started(FIRST, tmp_path) as first, started(SECOND, tmp_path) as second:
        ends = threading.Timer(0.3, first.stdin.close)
        ends.start()
        try:
            assert reload.main(argparse.Namespace()) == 0
        finally:
            ends.join()
            second.stdin.close()
    assert capsys.readouterr().out == "generation g2 serves, the old generation ends\n"


RUNNING = """
import signal, sys
from shmserve.transport import rundir
base = sys.argv[1]
signal.signal(signal.SIGHUP, lambda *_: rundir.hand_over(base, "workers"))
signal.signal(signal.SIGUSR2, lambda *_: rundir.hand_over(base, "g1 serves"))
assert rundir.lock(base, "master").acquire()
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("running", ["workers", "handover"])
def test_the_running_service_decides_what_is_replaced(monkeypatch, capsys, tmp_path, running):
    other = {"workers": "handover", "handover": "workers"}[running]
    monkeypatch.setenv("SHMSERVE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("SHMSERVE_RELOAD", other)
    with started(RUNNING, tmp_path) as master:
        rundir.write_reload(str(tmp_path), rundir.ReloadTerms(running, 60.0, 10.0))
        try:
            assert reload.main(argparse.Namespace()) == 0
        finally:
            master.stdin.close()
    words = {"workers": "the HTTP workers of pid", "handover": "generation g1 serves"}
    assert capsys.readouterr().out.startswith(words[running])
