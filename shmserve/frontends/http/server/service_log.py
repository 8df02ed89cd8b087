"""Logger of gunicorn, with lines in the form of all other log lines."""

from typing import Any

from gunicorn.glogging import Logger

from shmserve.observe import logs


class ServiceLog(Logger):  # type: ignore[misc]
    """Logger of a gunicorn process. gunicorn makes new handlers at each reload."""

    def setup(self, cfg: Any) -> None:
        """Set up gunicorn's handlers, then give them the form of this process's log."""
        super().setup(cfg)
        logs.adopt()
