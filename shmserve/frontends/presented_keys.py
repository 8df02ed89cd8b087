"""The keys that requests come with: whose they are, counted by name."""

from __future__ import annotations

from collections.abc import Callable

from shmserve.config import Settings
from shmserve.core.keys import Key, presented
from shmserve.transport.trust.key_file import KeyFile

UNKNOWN = "(unknown)"  # a key that is nobody's, or has expired


class PresentedKeys:
    """One per process of a frontend; False if there are no keys.

    Args:
        settings: `keys_file`.
        count: called with the name of each request's key, or `UNKNOWN`.
    """

    def __init__(self, settings: Settings, count: Callable[[str], None]) -> None:
        self._file = KeyFile(settings) if settings.keys_file else None
        self._count = count

    def __bool__(self) -> bool:
        return self._file is not None

    def holder(self, field: Callable[[str], str | None]) -> tuple[str, Key | None]:
        """Whose key a request came with.

        Args:
            field: gives its header fields, or its metadata, by lower-case name.

        Returns:
            The field that the key came in, empty if none did; and the key, if it is valid.
        """
        where, key = self.find(field)
        if where:
            self._count(UNKNOWN if key is None else key.name)
        return where, key

    def find(self, field: Callable[[str], str | None]) -> tuple[str, Key | None]:
        """As `holder`, of a request that was counted."""
        if self._file is None or (found := presented(field)) is None:
            return "", None
        return found[0], self._file.holder(found[1])
