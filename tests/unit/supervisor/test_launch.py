"""What the master looks at before anything is launched."""

from __future__ import annotations

import os
import socket

import pytest

from shmserve.config import Settings
from shmserve.errors import ConfigError
from shmserve.supervisor import launch


@pytest.mark.parametrize("setting", ["http_bind", "metrics_bind"])
def test_the_setting_of_a_taken_address_is_named(setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host, port = taken.getsockname()
        addresses = {setting: (f"{host}:{port}",)}
        settings = Settings(grpc_processes=0, **addresses)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{setting}: cannot listen on"):
            launch.claim(settings, [(host, port)])


def test_metrics_have_no_address_beside_sockets_of_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    """gunicorn binds nothing then."""
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "1")
    launch.claim(Settings(grpc_processes=0), ())
    settings = Settings(grpc_processes=0, metrics_bind=("127.0.0.1:8002",))
    with pytest.raises(ConfigError, match="metrics_bind: cannot be together"):
        launch.claim(settings, ())
