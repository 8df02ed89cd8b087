"""Small text files of the repository, read with errors that show no path."""

import os

from shmserve import bounded_files
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
        return bounded_files.read(path, limit, what).decode()
    except UnicodeDecodeError as ex:
        raise ConfigError(f"{what} is not UTF-8 (byte {ex.start})") from None
