"""Keys that requests come with: holders, and counts of requests by key name."""

from collections.abc import Callable

from shmserve.config import Settings
from shmserve.core.keys import Key, presented
from shmserve.transport.trust.key_file import KeyFile

UNKNOWN = "(unknown)"  # a key without a holder, or an expired key


class PresentedKeys:
    """The keys of one frontend process; false if no keys are configured. `settings`: settings with
    `keys_file`. `count`: called with the name of each request's key, or `UNKNOWN`."""

    def __init__(self, settings: Settings, count: Callable[[str], None]) -> None:
        self._file = KeyFile(settings) if settings.keys_file else None
        self._count = count

    def __bool__(self) -> bool:
        return self._file is not None

    def holder(self, field: Callable[[str], str | None]) -> tuple[str, Key | None]:
        """Count a request, and return the name of the field with its key (empty without a key)
        and the key (None if not valid). `field` returns a header field or a metadata value by
        lower-case name."""
        where, key = self.find(field)
        if where:
            self._count(UNKNOWN if key is None else key.name)
        return where, key

    def find(self, field: Callable[[str], str | None]) -> tuple[str, Key | None]:
        """Return a request's key, as `holder`, without counting the request."""
        if self._file is None or (brought := presented(field)) is None:
            return "", None
        return brought[0], self._file.holder(brought[1])
