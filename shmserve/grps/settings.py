"""Settings of GRPS, whose names begin with ``grps_``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from shmserve.config import ExtensionSettings, Settings

ONLINE = "grps_online"  # name of the online flag in the registry


class GrpsSettings(ExtensionSettings, frozen=True):
    """GRPS"""

    FLAGS: ClassVar[tuple[str, ...]] = ("online",)

    online: Annotated[bool, "GRPS readiness before a client says online or offline"] = False
    default_model: Annotated[
        str,
        "the model (name-version) of GRPS requests that name none; empty: the only model, or the "
        "only one with GRPS parameters",
    ] = ""


def of(settings: Settings) -> GrpsSettings:
    """Return the GRPS settings."""
    return settings.extension("grps", GrpsSettings)
