"""`pb_utils.Logger`: Triton's names for log levels; goes to the log of the executor."""

from __future__ import annotations

import logging
from enum import IntEnum

_log = logging.getLogger("shmserve.model")


class Level(IntEnum):
    """How loud; VERBOSE is what the server's own log calls debug."""

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
    """Every method takes text; anything else is a TypeError, as in Triton."""

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
