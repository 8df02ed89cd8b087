"""Small text files of the repository, read with errors that show no path."""

import os
import stat

from shmserve.errors import ConfigError

IGNORED = ("__pycache__",)  # folders that Python creates when running a model's code


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return True for a folder or a symlink to a folder, False for a dangling symlink."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def printable(name: str) -> str:
    """Return a file name as printable text, whatever its bytes are."""
    return name if name.isprintable() else ascii(name)[1:-1]


def is_inside(path: str, folder: str) -> bool:
    """Return True if a path lies below a folder, with all symlinks followed."""
    root = os.path.realpath(folder)
    return os.path.commonpath([root, os.path.realpath(path)]) == root


def read_text(path: str, limit: int, what: str) -> str:
    """Return the text of a regular file of at most `limit` bytes. Raise ConfigError if the file is
    unreadable, too large or not UTF-8; the text begins with `what`."""
    try:
        # O_NONBLOCK: opening a FIFO must not block the coordinator.
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
