"""Export needs extra packages; without the packages the start names the extra to install."""

from importlib import metadata
from typing import Any

import pytest

from shmserve.config import Settings
from shmserve.errors import ConfigError
from shmserve.transport import extras

SPANS: dict[str, Any] = {"trace_mode": "opentelemetry"}


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (SPANS, "trace_mode: opentelemetry needs opentelemetry-sdk: pip install 'shmserve[otlp]'"),
        ({"otlp_metrics_interval_s": 10.0}, "otlp_metrics_interval_s: needs opentelemetry-sdk"),
    ],
)
def test_a_start_without_the_extra_says_what_to_install(settings, what, monkeypatch) -> None:
    extras.require(Settings(**settings))

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ConfigError) as caught:
        extras.require(Settings(**settings))
    assert caught.value.message.startswith(what)
    extras.require(Settings())
