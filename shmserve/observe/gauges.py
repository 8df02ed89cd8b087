"""Numbers known only to the outermost layer of a process, made available for publication."""

from collections.abc import Callable

_sources: list[Callable[[], int]] = []


def provide_connections(source: Callable[[], int]) -> None:
    """Set the function that returns the number of clients connected to this process."""
    _sources[:] = [source]


def connections() -> int:
    """Return the number of connected clients, or 0 without a provider."""
    return sum(source() for source in _sources)
