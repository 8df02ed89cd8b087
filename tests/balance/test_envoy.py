"""Envoy accepts its configuration. The drill shows that HAProxy accepts the other
configuration."""

from __future__ import annotations

import subprocess

import pytest

from tests.running_server import ROOT


@pytest.mark.needs("envoy")
def test_envoy_takes_its_configuration() -> None:
    command = ["envoy", "--mode", "validate", "-c", str(ROOT / "deploy/envoy/envoy.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
