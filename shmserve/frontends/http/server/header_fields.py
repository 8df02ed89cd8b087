"""Header fields of a request by their names as they were sent, in lower case.

A WSGI environment has one key for names that differ in ``-`` and ``_`` alone. gunicorn gives it no
field whose name has a `_`, so that none can be taken for another; our worker class keeps those
apart, under a key of ours. Under other worker classes they do not arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shmserve.frontends.deciding_fields import refuse_alike

UNDERSCORED = "shmserve.underscored"  # in the environ, where there are any: name -> value
_PREFIX = "HTTP_"
_NONE: dict[str, str] = {}


def by_name(fields: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Fields by name; what was sent more than once is joined, as in a WSGI environment."""
    joined: dict[str, str] = {}
    for name, value in fields:
        joined[name] = f"{joined[name]},{value}" if name in joined else value
    return joined


def underscored(environ: dict[str, Any]) -> dict[str, str]:
    """The fields with a `_` in their names."""
    apart: dict[str, str] = environ.get(UNDERSCORED, _NONE)
    return apart


def header_fields(environ: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """All fields but Content-Type and Content-Length."""
    for key, value in environ.items():
        if key.startswith(_PREFIX):
            yield key[len(_PREFIX) :].replace("_", "-").lower(), value
    yield from underscored(environ).items()


class HeaderFields:
    """Of a request, those that decide who may do what."""

    def __init__(self, environ: dict[str, Any]) -> None:
        self._environ = environ

    def get(self, name: str, /) -> str | None:
        """The value of a field that decides, by its lower-case name.

        Raises:
            InvalidArgument: another one's name differs from it in - and _ alone.
        """
        apart = underscored(self._environ)
        plain = name.replace("_", "-")
        value: str | None = self._environ.get(_PREFIX + plain.upper().replace("-", "_"))
        if apart:
            refuse_alike(name, apart if value is None else (*apart, plain))
        return value if name == plain else apart.get(name)
