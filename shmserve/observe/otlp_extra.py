"""Whether what exporting takes is installed."""

from __future__ import annotations

from importlib import metadata

from shmserve.config import Settings
from shmserve.errors import ConfigError

_PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")


def require(settings: Settings) -> None:
    """See that the packages of the extra are there, if a setting needs them.

    Raises:
        ConfigError: they are not; says which setting, and what to install.
    """
    if not settings.exports:
        return
    spans = settings.trace_mode == "opentelemetry"
    name = "trace_mode: opentelemetry" if spans else "otlp_metrics_interval_s:"
    for package in _PACKAGES:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            raise ConfigError(f"{name} needs {package}: pip install 'shmserve[otlp]'") from None
