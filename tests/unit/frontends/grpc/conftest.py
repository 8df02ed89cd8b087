"""The tests of this folder that serve rpcs do so on both engines."""

from __future__ import annotations

import pytest

from tests import grpc_client


@pytest.fixture(scope="module", autouse=True, params=["grpcio", "http2"])
def engine(request: pytest.FixtureRequest) -> str:
    """The engine of every `Rig` (`grpc_server`)."""
    grpc_client.Rig.engine = request.param
    return grpc_client.Rig.engine
