"""gunicorn's logger, whose lines look as all others."""

from __future__ import annotations

from typing import Any

from gunicorn.glogging import Logger

from shmserve.observe import logs


class ServiceLog(Logger):  # type: ignore[misc]
    """Handlers are made anew at each reload."""

    def setup(self, cfg: Any) -> None:
        """As gunicorn's, and then as this process was set up."""
        super().setup(cfg)
        logs.adopt()
