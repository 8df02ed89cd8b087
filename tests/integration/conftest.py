"""Fixtures for tests with a real server, which the test module starts."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmserve import config
from shmserve.dispatch.process.dispatcher import Dispatcher
from tests import faulty_store
from tests.running_server import RunningServer, wait_until


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


@pytest.fixture(scope="session")
def moto() -> Iterator[faulty_store.Moto]:
    """S3 store with a bucket `models`."""
    made = faulty_store.Moto()
    made.make_bucket("models")
    yield made
    made.stop()


@pytest.fixture(scope="session")
def proxy(moto: faulty_store.Moto) -> Iterator[faulty_store.Faulty]:
    made = faulty_store.Faulty(moto.port)
    yield made
    made.stop()


@pytest.fixture
def store(proxy: faulty_store.Faulty) -> faulty_store.Faulty:
    """The store's proxy, without faults."""
    proxy.reset()
    return proxy


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor
