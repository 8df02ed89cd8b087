"""Outputs forwarded to further executors when no descriptor is left to pass."""

from __future__ import annotations

import os
from typing import Any

import pytest

from shmserve.dispatch.calls.attempt import Cancellation
from shmserve.dispatch.pool.forwarded_outputs import ForwardingMemory
from shmserve.errors import Unavailable
from shmserve.protocol.control.data_messages import Descriptor
from tests.unit.rig import Unlimited


class Segment:
    """An executor's segment as mapped by a frontend."""

    size = 4096

    def __init__(self) -> None:
        self.fd = os.memfd_create("segment")
        self.view = memoryview(bytes(self.size))


def test_segments_are_offered_all_or_not_at_all(monkeypatch) -> None:
    memory = ForwardingMemory(Unlimited(), lambda: "cafe0123", lambda: 1 << 20)
    segments: list[Any] = [Segment(), Segment()]
    at = Descriptor(0, 0, 0, 0, 16)
    outputs = [memory.pass_on(segment, at, lambda: None) for segment in segments]
    made: list[int] = []
    dup = os.dup

    def scarce(fd: int) -> int:
        if made:
            raise OSError(24, "Too many open files")
        made.append(dup(fd))
        return made[0]

    monkeypatch.setattr(os, "dup", scarce)
    known: set[int] = set()
    with pytest.raises(Unavailable, match="too many open files"):
        memory.offers([output.segment for output in outputs], known)
    assert known == set()  # so they are offered with the next request
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])
    monkeypatch.setattr(os, "dup", dup)
    offers, fds = memory.offers([output.segment for output in outputs], known)
    assert len(offers) == len(fds) == len(known) == 2
    for fd in [*fds, *(segment.fd for segment in segments)]:
        os.close(fd)
    memory.close()


def test_a_call_that_cannot_be_cancelled_for_want_of_descriptors_is_refused(monkeypatch) -> None:
    def none_left(*_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "eventfd", none_left)
    with pytest.raises(Unavailable, match="too many open files"):
        Cancellation()
