"""Servers for the tests, and the leak probe after each of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.observe import logs
from shmserve.testing.running_server import RunningServer

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-cuda", action="store_true", help="use the machine's CUDA devices, not the fake"
    )


@pytest.fixture(autouse=True)
def _log_settings_end_with_the_test() -> Iterator[None]:
    """A link in the test's own process may have been told to change what is logged."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in root.handlers:
        handler.removeFilter(logs._chosen)


def _serve(server: RunningServer) -> Iterator[RunningServer]:
    with server:
        yield server
    assert server.leaks() == []


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """A server with the shipped workers, shared by tests that do not hurt it."""
    yield from _serve(RunningServer())


@pytest.fixture(scope="session")
def conformance_server() -> Iterator[RunningServer]:
    """A server with the models of the recorded cases, which are of a host without GPUs."""
    repository = HERE / "conformance" / "models"
    settings = {"model_control": "explicit", "load_models": "*", "http_workers": 2}
    yield from _serve(RunningServer(repository, {"CUDA_VISIBLE_DEVICES": ""}, **settings))


@pytest.fixture
def own_server() -> Iterator[RunningServer]:
    """A server of the test's own, to be treated badly; must leave nothing all the same."""
    yield from _serve(RunningServer(HERE / "models", grpc_processes=0))
