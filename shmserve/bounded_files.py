"""Files that an operator names, opened and read within bounds.

A path may lead to a FIFO without a writer, to a device without an end, or to a file as large as the
disk. Opening never waits, only regular files are read, and no more than a limit is read.
"""

import os
import stat
from typing import BinaryIO

from shmserve.errors import ConfigError


def opened(path: str, what: str, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a regular file, for the caller to close. Raise ConfigError with a text that begins with
    `what` if there is none. `flags`: of `os.open`; a created file is for its owner alone."""
    try:
        # O_NONBLOCK: opening a FIFO must not wait for the other end.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    except OSError as ex:
        raise ConfigError(f"{what} cannot be read ({ex.strerror})") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{what} is not a regular file")
    return open(descriptor, "rb" if flags == os.O_RDONLY else "r+b")


def content(file: BinaryIO, limit: int, what: str) -> bytes:
    """Return the content of an opened file. Raise ConfigError with a text that begins with `what`
    if the file cannot be read or has more than `limit` bytes."""
    try:
        data = file.read(limit + 1)
    except OSError as ex:
        raise ConfigError(f"{what} cannot be read ({ex.strerror})") from None
    if len(data) > limit:
        raise ConfigError(f"{what} has more than {limit} bytes")
    return data


def read(path: str, limit: int, what: str) -> bytes:
    """Return the content of a regular file. Raises as `opened` and `content`."""
    with opened(path, what) as file:
        return content(file, limit, what)
