"""Children's ends: a pid may already belong to another process."""

import os
import subprocess
import sys

from shmserve.supervisor.processes.children import Child


def test_the_group_of_a_number_that_is_anothers_is_left_alone(monkeypatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    adopted = Child("m/1/0", process.pid, os.pidfd_open(process.pid), None, 0.0)
    # the process that inherited the child has reaped the child, so the pid may be given again
    process.wait(30)
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, _: killed.append(pid))
    monkeypatch.setattr(os.path, "exists", lambda _: True)
    assert adopted.reap() is None
    assert killed == []


def test_what_a_child_has_forked_is_killed_with_it(monkeypatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    child = Child.of("m/1/0", process, 0.0)
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, _: killed.append(pid))
    assert child.reap() == 0
    assert killed == [process.pid]
