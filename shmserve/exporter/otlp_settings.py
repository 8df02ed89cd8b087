"""OTLP settings (`otlp_…`) in the form of the SDK's arguments."""

from __future__ import annotations

from collections.abc import Iterable

import shmserve
from shmserve.config import Settings


def resource_attributes(settings: Settings, epoch: str) -> dict[str, str]:
    """Return the attributes that describe this service in all exports; `epoch` is the service's
    epoch."""
    return {
        "service.name": settings.otlp_service_name,
        "service.version": shmserve.__version__,
        "service.instance.id": epoch,
        **pairs(settings.otlp_resource),
    }


def pairs(texts: Iterable[str]) -> dict[str, str]:
    """Return texts of the form `name=value` as a mapping."""
    parts = (text.partition("=") for text in texts)
    return {name.strip(): value.strip() for name, _, value in parts}
