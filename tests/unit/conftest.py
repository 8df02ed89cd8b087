"""Fixtures for tests of the data plane in one process: see `rig.py`."""

from contextlib import ExitStack, closing

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
def _often():
    """Shorten periods of one second, because tests wait for these checks."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ONCE_A_SECOND:
            patch.setattr(name, 0.1)
        yield


@pytest.fixture
def rig_with(tmp_path):
    """Maker of rigs with settings, which the end of the test closes."""
    with ExitStack() as rigs:
        yield lambda **settings: rigs.enter_context(closing(Rig(tmp_path, **settings)))


@pytest.fixture
def rig(rig_with):
    return rig_with()
