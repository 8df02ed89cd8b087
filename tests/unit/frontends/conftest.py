"""Fixtures for tests of the frontends."""

import pytest

from tests.unit.http_client import Client


@pytest.fixture
def client():
    """Client of the application over the fake dispatcher."""
    return Client()
