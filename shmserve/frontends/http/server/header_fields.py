"""Header fields of a request by their original names, in lower case.

A WSGI environment has one key for all names that differ only in ``-`` and ``_``. gunicorn drops
fields with a `_` in the name, so that no field can pass for another. The worker class of this
server keeps the dropped fields apart, under a key of its own. Under other worker classes such
fields do not arrive.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from shmserve.frontends.deciding_fields import refuse_alike

UNDERSCORED = "shmserve.underscored"  # key in the environ, if there are such fields: name -> value
_PREFIX = "HTTP_"
_NONE: dict[str, str] = {}


def by_name(fields: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return fields by name. Values of a repeated field are joined by commas, as in WSGI."""
    joined: dict[str, str] = {}
    for name, value in fields:
        joined[name] = f"{joined[name]},{value}" if name in joined else value
    return joined


def underscored(environ: dict[str, Any]) -> dict[str, str]:
    """Return the fields with a `_` in their names."""
    apart: dict[str, str] = environ.get(UNDERSCORED, _NONE)
    return apart


def header_fields(environ: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield all fields except Content-Type and Content-Length."""
    for key, value in environ.items():
        if key.startswith(_PREFIX):
            yield key[len(_PREFIX) :].replace("_", "-").lower(), value
    yield from underscored(environ).items()


class HeaderFields:
    """The fields of a request that decide about rights."""

    def __init__(self, environ: dict[str, Any]) -> None:
        self._environ = environ

    def get(self, name: str, /) -> str | None:
        """Return the value of a deciding field by lower-case name; None if the field is absent.
        Raise InvalidArgument if the request has another field whose name differs only in - and
        _."""
        apart = underscored(self._environ)
        plain = name.replace("_", "-")
        value: str | None = self._environ.get(_PREFIX + plain.upper().replace("-", "_"))
        if apart:
            refuse_alike(name, apart if value is None else (*apart, plain))
        return value if name == plain else apart.get(name)
