"""Fixtures for tests of the gRPC frontend."""

import pytest

from tests.grpc_client import Rig


@pytest.fixture
def rig():
    with Rig() as rig:
        yield rig
