"""Logs of the background processes: stderr, one line an event, who speaks in every line."""

from __future__ import annotations

import logging


def setup(who: str, level: str) -> None:
    """Log to stderr. `who`: the process's role, and instance if it has one."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {who.replace('%', '%%')} %(name)s: %(message)s",
    )
