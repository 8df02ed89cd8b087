"""Reading small text files of the repository with errors that show no path."""

from __future__ import annotations

import os
import stat

from shmserve.errors import ConfigError

IGNORED = ("__pycache__",)  # folders that running Python code leaves behind


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, symlinks followed; a symlink that leads nowhere is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def printable(name: str) -> str:
    """A file name as text that can be shown and encoded, whatever bytes it is made of."""
    return name if name.isprintable() else ascii(name)[1:-1]


def is_inside(path: str, folder: str) -> bool:
    """Whether a path, all symlinks followed, lies below a folder."""
    root = os.path.realpath(folder)
    return os.path.commonpath([root, os.path.realpath(path)]) == root


def read_text(path: str, limit: int, what: str) -> str:
    """The text of a regular file of at most `limit` bytes.

    Raises:
        ConfigError: it begins with `what`.
    """
    try:
        # O_NONBLOCK: opening a FIFO that lies there must not hang the coordinator
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as ex:
        raise ConfigError(f"{what} cannot be read ({ex.strerror})") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{what} is not a regular file")
    with open(descriptor, "rb") as file:
        try:
            data = file.read(limit + 1)
        except OSError as ex:
            raise ConfigError(f"{what} cannot be read ({ex.strerror})") from None
    if len(data) > limit:
        raise ConfigError(f"{what} has more than {limit} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as ex:
        raise ConfigError(f"{what} is not UTF-8 (byte {ex.start})") from None
