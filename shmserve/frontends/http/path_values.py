"""Values of path variables."""

from __future__ import annotations

from shmserve.errors import NotFound

_MAX_DIGITS = 18  # versions are positive 64-bit numbers


def checked_version(version: str) -> str:
    """Return the version in a path, in the registry's form; "" if the path has no version. Raise
    NotFound if the version is no number, so there is no such path."""
    if not version:
        return ""
    if not (version.isascii() and version.isdecimal()) or len(version) > _MAX_DIGITS:
        raise NotFound("Not Found")
    return str(int(version))
