"""Header fields and metadata that decide what a caller may do, read by exact name.

A proxy in front of the server, or a model behind the server, may treat ``my-key`` and ``my_key``
as one name and read the other field. So if a request has both, neither decides: the request is
refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shmserve.errors import InvalidArgument

_SHOWN = 100


def refuse_alike(name: str, names: Iterable[str]) -> None:
    """Refuse names that differ only in - and _, if `name` is such a name.

    Raises:
        InvalidArgument: two such names were found; the message gives both.
    """
    plain = name.replace("_", "-")
    alike = sorted({each for each in names if each.replace("_", "-") == plain})
    if len(alike) > 1:
        shown = " and ".join(f"'{each[:_SHOWN]}'" for each in alike[:2])
        raise InvalidArgument(f"headers {shown} differ only in - and _: send one of them")


class DecidingFields:
    """Text metadata of a call, by lower-case name."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = fields

    def get(self, name: str, /) -> str | None:
        """Return the value of a field, None if the field is missing.

        Raises:
            InvalidArgument: as `refuse_alike`.
        """
        refuse_alike(name, self._fields)
        return self._fields.get(name)
