"""Fixtures for tests of the data plane in one process: see `rig.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.rig import Rig

ONCE_A_SECOND = (
    "shmserve.dispatch.process.dispatcher._MAINTENANCE_S",
    "shmserve.dispatch.calls.attempt._TICK_S",
    "shmserve.grps.executor.project_backend._LOOK_S",
    "shmserve.executor.loop.loop.WAKE_S",
    "shmserve.frontends.grpc.call_pools._TICK_S",
)


@pytest.fixture(scope="session", autouse=True)
def _often() -> Iterator[None]:
    """Shorten periods of one second, because tests wait for these checks."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ONCE_A_SECOND:
            patch.setattr(name, 0.1)
        yield


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()
