"""Model logger (`pb_utils.Logger`): Triton's log levels, written to the executor's log."""

from __future__ import annotations

import logging
from enum import IntEnum

_log = logging.getLogger("shmserve.model")


class Level(IntEnum):
    """Log level. VERBOSE is `debug` in the server's log."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_LEVELS = {
    Level.INFO: logging.INFO,
    Level.WARNING: logging.WARNING,
    Level.ERROR: logging.ERROR,
    Level.VERBOSE: logging.DEBUG,
}
LogLevel = Level


class Logger:
    """Logger for models. Every method takes text, and raises TypeError for anything else, as in
    Triton."""

    LogLevel = Level
    INFO = Level.INFO
    WARNING = Level.WARNING
    ERROR = Level.ERROR
    VERBOSE = Level.VERBOSE

    @staticmethod
    def log(message: str | bytes, level: Level = Level.INFO) -> None:
        if not isinstance(level, Level):
            raise TypeError(f"level must be a LogLevel, got {type(level).__name__}")
        if isinstance(message, bytes):
            message = message.decode(errors="replace")
        if not isinstance(message, str):
            raise TypeError(f"a log message must be text, got {type(message).__name__}")
        _log.log(_LEVELS[level], "%s", message)

    @staticmethod
    def log_info(message: str | bytes) -> None:
        Logger.log(message, Level.INFO)

    @staticmethod
    def log_warn(message: str | bytes) -> None:
        Logger.log(message, Level.WARNING)

    @staticmethod
    def log_error(message: str | bytes) -> None:
        Logger.log(message, Level.ERROR)

    @staticmethod
    def log_verbose(message: str | bytes) -> None:
        Logger.log(message, Level.VERBOSE)
