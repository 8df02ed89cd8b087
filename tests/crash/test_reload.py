"""The reload drill in short: `python -m tests.crash.reload` is the long form."""

from pathlib import Path
from typing import Any

from tests.crash.reload import drill, grown, lost, repository
from tests.running_server import RunningServer


def test_no_request_is_lost_while_models_are_replaced(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "model_control": "explicit",
        "load_models": "echo,pair",
        "grpc_processes": 0,
    }
    with RunningServer(repository(tmp_path), **settings) as server:
        verdict, samples = drill(server, cycles=6, samples=3)
    assert lost(verdict) == []
    assert verdict.counts["right"] > 0
    assert grown(samples) == []
    assert server.leaks() == []
