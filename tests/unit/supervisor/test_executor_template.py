"""A template that does not answer."""

import os
import sys

from shmserve.supervisor.processes import executor_template
from shmserve.supervisor.processes.executor_template import ExecutorTemplate
from shmserve.transport.channel import close_all
from shmserve.transport.processes import has_ended, raise_fd_limit

READY = """
import socket, sys, time
sock = socket.socket(fileno=int(sys.argv[-1]))
sock.send(b"ready" if sys.argv[1] == "ready" else b"no")
time.sleep(60)
"""


def started(what: str) -> ExecutorTemplate:
    return ExecutorTemplate([sys.executable, "-c", READY, what], 0)


def test_one_that_is_killed_with_a_request_unread_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(executor_template, "_ANSWER_S", 0.1)
    template = started("ready")
    child = template.start(0.0)
    while template.is_coming(1.0):
        has_ended(child.pidfd, 0.01)
    assert template.fork("p", b"") is None
    assert not template.is_coming(1.0)
    assert has_ended(child.pidfd, 30.0)
    assert not template.is_coming(1.0), "what it has left is no answer"
    assert template._received(1.0) == b""
    assert template.ended(child, 1.0)
    template.close()


def test_a_template_works_beside_thousands_of_descriptors():
    """A supervisor keeps a descriptor for each region of clients."""
    raise_fd_limit()
    null = os.open(os.devnull, os.O_RDONLY)
    regions = [null, *(os.dup(null) for _ in range(1100))]
    template = started("ready")
    child = template.start(0.0)
    while template.is_coming(1.0):
        has_ended(child.pidfd, 0.01)
    assert not has_ended(child.pidfd)
    child.kill()
    assert has_ended(child.pidfd, 30.0)
    assert template.ended(child, 1.0)
    template.close()
    close_all(regions)


def test_one_that_is_never_ready_is_replaced_later_and_later():
    template, now, pauses = started("never"), 0.0, []
    for _ in range(3):
        begun = now
        while (child := template.start(now)) is None:
            now += 0.25
        pauses.append(now - begun)
        assert template.is_coming(now + 29.0)
        now += 30.0
        assert not template.is_coming(now)
        assert has_ended(child.pidfd, 30.0)
        assert template.ended(child, now)
    template.close()
    assert pauses == [0.0, 0.0, 0.5]
