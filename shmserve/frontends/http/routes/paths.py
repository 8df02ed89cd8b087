"""What stands in paths."""

from __future__ import annotations

from shmserve.errors import NotFound

NOT_FOUND = "Not Found"
_MAX_DIGITS = 18  # versions are positive 64-bit numbers


def checked_version(version: str) -> str:
    """The version of a path, as the registry writes it.

    Raises:
        NotFound: it is no number, so that the path is none of ours.
    """
    if not (version.isascii() and version.isdecimal()) or len(version) > _MAX_DIGITS:
        raise NotFound(NOT_FOUND)
    return str(int(version))
