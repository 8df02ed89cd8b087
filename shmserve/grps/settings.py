"""Settings of GRPS, whose names begin with ``grps_``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from shmserve.config import ExtensionSettings, Settings

ONLINE = "grps_online"  # name of the online flag in the registry


class GrpsSettings(ExtensionSettings, frozen=True):
    """GRPS"""

    FLAGS: ClassVar[tuple[str, ...]] = ("online",)

    online: Annotated[
        bool, "state of GRPS readiness at the start, until a client sets online or offline"
    ] = False
    default_model: Annotated[
        str,
        "model, as name-version, for GRPS requests that name no model; empty: the only model,"
        " or the only model with GRPS parameters",
    ] = ""


def of(settings: Settings) -> GrpsSettings:
    """Return the GRPS settings."""
    return settings.extension("grps", GrpsSettings)
