"""Key file: hashed keys, read by every frontend, and again when the file has changed."""

import logging
import os
import stat
import threading
import time

from shmserve import bounded_files
from shmserve.config import Settings
from shmserve.core import keys
from shmserve.core.keys import Key
from shmserve.errors import ConfigError
from shmserve.transport.trust.file_changes import FileChanges

_log = logging.getLogger("shmserve.keys")


def read(settings: Settings) -> dict[bytes, Key]:
    """Return the keys of the setting `keys_file`, by digest; none if the setting is empty. Raise
    ConfigError with the reason if the file cannot be used."""
    if not settings.keys_file:
        if settings.keys_required_from not in ("nobody", "remote"):  # "remote" is the default
            raise ConfigError("keys_required_from: there are no keys without keys_file")
        return {}
    what = f"keys_file: {settings.keys_file}"
    with bounded_files.opened(settings.keys_file, what) as file:
        if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
            raise ConfigError(f"{what}: every user of this host may write to it")
        return keys.parse(bounded_files.content(file, keys.MAX_BYTES, what), what)


class KeyFile:
    """Keys that are valid now. A look-up checks the file for changes, once a second at most. A file
    that has become unusable changes nothing, but is reported in the log. Thread-safe. `settings`:
    only `keys_file` is used."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._keys: dict[bytes, Key] = {}
        self._changes = FileChanges(settings.keys_file)
        self._failure = ""  # of the last reading; logged once
        self._read()

    def holder(self, presented: str) -> Key | None:
        """Return the key that a caller has presented; None if it is unknown or has expired."""
        if self._changes.found():
            self._read()
        return keys.holder(self._keys, presented, time.time())

    def _read(self) -> None:
        with self._lock:  # the last reading wins
            try:
                self._keys = read(self._settings)
                _log.info("keys_file: %d keys", len(self._keys))
                self._failure = ""
            except ConfigError as ex:
                # Read again: the fault may pass, and until then withdrawn keys stay valid.
                self._changes.forget()
                if ex.message != self._failure:
                    self._failure = ex.message
                    _log.error("%s; the old keys stay valid: %d", ex.message, len(self._keys))
