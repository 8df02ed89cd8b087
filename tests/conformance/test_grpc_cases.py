"""Recorded gRPC calls get the answers of the `grpcio` library, or others with a recorded reason."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.grpc_cases import load, play, server
from tests.grpc_client import Rig

CASES = load()


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    """Server for all cases that neither need settings nor end the server."""
    with server() as rig:
        yield rig


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(case: dict[str, Any], shared: Rig) -> None:
    expected = case.get("answer", case["grpcio"])
    if "settings" in case or ["drain"] in case.get("send", []):
        with server(**case.get("settings", {})) as rig:
            assert play(case, rig) == expected
    else:
        assert play(case, shared) == expected


def test_each_difference_has_its_reason() -> None:
    differing = [case for case in CASES if case.get("answer", case["grpcio"]) != case["grpcio"]]
    assert all(case["why"] for case in differing)
    assert [case["name"] for case in CASES if "why" in case] == [c["name"] for c in differing]
