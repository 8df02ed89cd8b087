"""The short form of `make rounds`."""

from __future__ import annotations

from tests.crash.rounds import drill


def test_register_infer_unregister_over_http_and_grpc_at_once() -> None:
    wrong, _, problems = drill(120)
    assert wrong == 0
    assert problems == []
