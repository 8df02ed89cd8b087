"""Header fields and metadata that decide who may do what: each is read by its name as it was sent.

Who is in front of the server, or behind it, may take ``my-key`` and ``my_key`` for one name, and
look at the other of the two: where both come, none of them decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shmserve.errors import InvalidArgument

_SHOWN = 100


def refuse_alike(name: str, names: Iterable[str]) -> None:
    """Refuse fields of which one is called `name`, but for - and _, and another so as well.

    Raises:
        InvalidArgument: naming both.
    """
    plain = name.replace("_", "-")
    alike = sorted({each for each in names if each.replace("_", "-") == plain})
    if len(alike) > 1:
        shown = " and ".join(f"'{each[:_SHOWN]}'" for each in alike[:2])
        raise InvalidArgument(f"headers {shown} differ in - and _ alone: one of them decides")


class DecidingFields:
    """What of a call's metadata is text, by lower-case name."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = fields

    def get(self, name: str, /) -> str | None:
        """The value of a field that decides.

        Raises:
            InvalidArgument: as `refuse_alike`.
        """
        refuse_alike(name, self._fields)
        return self._fields.get(name)
