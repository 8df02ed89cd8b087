"""Cached look-ups in callers' regions: when a cached result is used again."""

import os
from typing import Any

import pytest

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.core.registry import Snapshot
from shmserve.frontends.oip.shared_memory import SharedMemory
from tests.fake_dispatch import FakeDispatcher

OWN = os.geteuid()
OTHER = Caller(OWN + 1)
REMOTE = Caller()


def as_of(caller: Caller, epoch: str = "a", generation: int = 1, **settings: Any) -> object:
    dispatcher = FakeDispatcher([])
    dispatcher.snapshot = lambda: Snapshot(epoch, generation)  # type: ignore[method-assign]
    return SharedMemory(dispatcher, Settings(**settings)).as_of(caller)  # type: ignore[arg-type]


def test_it_is_the_same_for_the_same_user_until_something_is_published() -> None:
    assert as_of(Caller(OWN, pid=1)) == as_of(Caller(OWN, pid=2, started=3))
    assert as_of(Caller(OWN)) != as_of(Caller(OWN), generation=2)
    assert as_of(Caller(OWN)) != as_of(Caller(OWN), epoch="b")


def test_users_have_regions_of_their_own() -> None:
    assert as_of(Caller(OWN)) != as_of(OTHER)
    assert as_of(REMOTE) not in (as_of(Caller(OWN)), as_of(OTHER))


@pytest.mark.parametrize(
    ("caller", "settings"),
    [
        (OTHER, {"client_shm_isolation": "shared"}),
        (Caller(scopes=("register",)), {}),
        (REMOTE, {"client_shm_allow_remote": True}),
    ],
)
def test_who_has_the_same_regions_as_the_servers_user(caller, settings) -> None:
    assert as_of(caller, **settings) == as_of(Caller(OWN), **settings)
