"""`shmserve reload` beside another reload."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shmserve.cli.serving import reload

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
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(base)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


def test_a_second_reload_is_for_the_generation_that_the_first_one_has_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SHMSERVE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("SHMSERVE_RELOAD", "handover")
    os.mkdir(tmp_path / "g1")
    with started(FIRST, tmp_path) as first, started(SECOND, tmp_path) as second:
        assert first.stdin is not None
        assert second.stdin is not None
        ends = threading.Timer(0.3, first.stdin.close)
        ends.start()
        try:
            assert reload.main(argparse.Namespace()) == 0
        finally:
            ends.join()
            second.stdin.close()
    assert capsys.readouterr().out == "generation g2 serves, the old generation ends\n"
