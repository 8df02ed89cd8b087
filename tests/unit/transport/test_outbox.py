"""Messages that wait to be sent to the coordinator."""

from __future__ import annotations

import os

import pytest

from shmserve.protocol.control.link_messages import GiveBack, LoadFailed
from shmserve.protocol.control.region_messages import StoredRegions
from shmserve.transport import outbox as outboxes
from shmserve.transport.outbox import Outbox
from tests.unit.transport.test_pending_requests import nobody_else_has


def test_messages_stay_until_they_are_sent() -> None:
    outbox = Outbox()
    outbox.append(LoadFailed("a", ""))
    outbox.append(LoadFailed("b", ""))
    entry = outbox.first()
    assert entry == (LoadFailed("a", ""), [])
    assert outbox.first() is entry
    outbox.sent(entry)
    outbox.sent(entry)
    assert outbox.first() == (LoadFailed("b", ""), [])


def test_descriptors_are_copied_and_closed_once_sent() -> None:
    outbox = Outbox()
    read, write = os.pipe()
    outbox.append(StoredRegions((1,)), [write])
    entry = outbox.first()
    assert entry is not None
    assert write not in entry[1]
    outbox.sent(entry)
    assert not outbox
    assert nobody_else_has(read, write)


def test_what_is_for_one_coordinator_only_goes_with_it() -> None:
    outbox = Outbox()
    read, write = os.pipe()
    outbox.append(GiveBack(1))
    outbox.append(LoadFailed("a", ""), [write])
    outbox.append(LoadFailed("b", ""))
    outbox.disconnected()
    assert outbox.first() == (LoadFailed("b", ""), [])
    assert nobody_else_has(read, write)


def test_what_is_beyond_the_limit_is_lost_with_its_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outboxes, "_LIMIT", 2)
    outbox = Outbox()
    read, write = os.pipe()
    outbox.append(LoadFailed("a", ""))  # perhaps just being sent
    outbox.append(StoredRegions((1,)), [write])
    outbox.append(LoadFailed("b", ""))
    entry = outbox.first()
    assert entry == (LoadFailed("a", ""), [])
    outbox.sent(entry)
    assert outbox.first() == (LoadFailed("b", ""), [])
    assert nobody_else_has(read, write)
