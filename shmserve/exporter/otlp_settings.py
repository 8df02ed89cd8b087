"""OTLP settings (`otlp_…`) in the form of the SDK's arguments."""

from __future__ import annotations

import shmserve
from shmserve.config import Settings


def endpoint(settings: Settings, signal: str) -> str:
    """Return the URL for a signal, `traces` or `metrics`."""
    return f"{settings.otlp_endpoint.rstrip('/')}/v1/{signal}"


def headers(settings: Settings) -> dict[str, str]:
    return dict(_pair(text) for text in settings.otlp_headers)


def resource_attributes(settings: Settings, epoch: str) -> dict[str, str]:
    """Return the attributes that describe this service in all exports; `epoch` is the service's
    epoch."""
    return {
        "service.name": settings.otlp_service_name,
        "service.version": shmserve.__version__,
        "service.instance.id": epoch,
        **dict(_pair(text) for text in settings.otlp_resource),
    }


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.strip(), value.strip()
