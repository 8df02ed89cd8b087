"""Settings that begin with ``grps_``."""

from __future__ import annotations

from typing import ClassVar

from shmserve.config import ExtensionSettings, Settings

ONLINE = "grps_online"  # the flag, as the registry has it


class GrpsSettings(ExtensionSettings, frozen=True):
    """`online`: whether GRPS's load balancers should send requests here before anybody says so;
    `default_model`: of requests that name none, as name-version; "": the only one there is."""

    FLAGS: ClassVar[tuple[str, ...]] = ("online",)

    online: bool = False
    default_model: str = ""


def of(settings: Settings) -> GrpsSettings:
    """GRPS's own of all settings."""
    return settings.extension("grps", GrpsSettings)
