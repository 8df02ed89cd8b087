"""Fixtures for tests with a real server, which the test module starts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmserve import config
from shmserve.dispatch.process.dispatcher import Dispatcher
from shmserve.testing.running_server import RunningServer, wait_until


@pytest.fixture
def frontend(server: RunningServer) -> Iterator[Dispatcher]:
    """Dispatcher in this process. Afterwards no process may hold slots."""
    server.wait_ready()
    made = Dispatcher(config.load(server.environ))
    made.start()
    wait_until(lambda: made.snapshot().ready, "the models are not ready")
    yield made
    memory = made.memory
    wait_until(lambda: memory.stats().slots == memory.stats().free, "slots are held")
    wait_until(lambda: not memory.forwarded, "outputs of executors are held")
    wait_until(lambda: not server.show("slots"), "slots of executors are held")
    made.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor
