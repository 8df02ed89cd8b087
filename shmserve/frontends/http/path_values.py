"""What stands in paths."""

from __future__ import annotations

from shmserve.errors import NotFound

_MAX_DIGITS = 18  # versions are positive 64-bit numbers


def checked_version(version: str) -> str:
    """The version of a path, as the registry writes it; "": the path has none.

    Raises:
        NotFound: it is no number, so that the path is none of ours.
    """
    if not version:
        return ""
    if not (version.isascii() and version.isdecimal()) or len(version) > _MAX_DIGITS:
        raise NotFound("Not Found")
    return str(int(version))
