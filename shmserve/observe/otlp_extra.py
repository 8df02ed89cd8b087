"""Check for the packages of the extra `otlp`, which exporting needs."""

from __future__ import annotations

from importlib import metadata

from shmserve.config import Settings
from shmserve.errors import ConfigError

_PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")


def require(settings: Settings) -> None:
    """Check that the packages of the extra are installed, if a setting needs exporting.

    Raises:
        ConfigError: a package is missing; the text names the setting and the package.
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
