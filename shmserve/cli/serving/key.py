"""Command ``shmserve key new``: makes a key for a caller and prints the key once. The file of keys
stores only the hash."""

import argparse
import fcntl
import os
import secrets
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from shmserve import bounded_files, config
from shmserve.config import Settings
from shmserve.core import keys
from shmserve.errors import ConfigError


def main(arguments: argparse.Namespace) -> int:
    scopes = arguments.scopes.split(",")
    return new(config.load(), arguments.file, arguments.name, scopes, arguments.days)


def new(
    settings: Settings, path: str | None, name: str, scopes: Sequence[str], days: int | None
) -> int:
    """Make a key and print it. Servers that read the file accept the key within a second.

    Args:
        settings: settings; `keys_file` is the default path.
        path: path of the file of keys; None: `keys_file`. A missing file is made.
        name: name of the key's holder.
        scopes: scopes of the key.
        days: days until expiry; None: never.

    Raises:
        ConfigError: the file is not usable or already has a key of this name, or a scope does not
            exist.
    """
    path = path or settings.keys_file
    if not path:
        raise ConfigError("no file for the key: give --file, or set keys_file")
    if days is not None and not 0 < days <= 36500:
        raise ConfigError("--days: must be between 1 and 36500")
    keys.check_name(name)
    allowed = keys.parse_scopes(scopes)
    expires = None if days is None else datetime.now(UTC) + timedelta(days=days)
    key = keys.PREFIX + secrets.token_urlsafe(keys.KEY_BYTES)
    try:
        _append(path, name, keys.entry_text(name, key, allowed, expires))
    except OSError as ex:
        raise ConfigError(f"the file of keys cannot be written: {ex.strerror}") from None
    print(f"key {name} may: {', '.join(allowed)}. It is shown only now:", file=sys.stderr)
    print(key)
    return 0


def _append(path: str, name: str, entry: str) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    what = f"the file of keys, {path},"
    with bounded_files.opened(path, what, flags) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two commands may add keys at once
        content = bounded_files.content(file, keys.MAX_BYTES, what)
        if name in {key.name for key in keys.parse(content, what).values()}:
            raise ConfigError(f"{what} has a key '{name}' already")
        if content:
            entry = f"\n{entry}" if content.endswith(b"\n") else f"\n\n{entry}"
        keys.parse(content + entry.encode(), what)
        file.write(entry.encode())
