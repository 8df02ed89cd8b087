"""Logger of gunicorn, with lines in the form of all other log lines."""

from typing import Any

from gunicorn.glogging import Logger

from shmserve import config
from shmserve.observe import logs
from shmserve.transport.trust import tls


class ServiceLog(Logger):  # type: ignore[misc]
    """Logger of a gunicorn process. gunicorn makes new handlers at each reload."""

    def setup(self, cfg: Any) -> None:
        """Set up gunicorn's handlers, then give them the form of this process's log."""
        super().setup(cfg)
        logs.adopt()

    def info(self, msg: str, *args: Any, **options: Any) -> None:
        """Log a line of gunicorn's, which does not know of the listeners' TLS."""
        if msg.startswith("Listening at: "):
            settings = config.load()
            listeners = args[0].split(",")
            args = (",".join(tls.with_scheme(settings, one) for one in listeners), *args[1:])
        super().info(msg, *args, **options)
