"""Fixtures for tests of the frontends."""

from __future__ import annotations

import pytest

from tests.unit.http_client import Client


@pytest.fixture
def client() -> Client:
    """Client of the application over the fake dispatcher."""
    return Client()
