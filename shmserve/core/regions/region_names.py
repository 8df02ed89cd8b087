"""Names that clients choose: of regions, and of the objects they register."""

from __future__ import annotations

from shmserve.errors import InvalidArgument

MAX_NAME = 255  # bytes of a region's name or an object's
# Our segments, in the moment in which they have a name; those of Triton's Python models
_RESERVED = ("shmserve.", "triton_python_backend_shm_region_")


def check_name(name: str) -> None:
    """Refuse names that cannot stand in a path or a log line.

    Raises:
        InvalidArgument: it tells why.
    """
    if not name:
        raise InvalidArgument("'region name' is necessary to register a shared memory region")
    if "/" in name or any(ord(c) < 32 or ord(c) == 127 for c in name):
        raise InvalidArgument("the name of a shared memory region has forbidden characters")
    if _encoded_size(name) > MAX_NAME:
        raise InvalidArgument(f"the name of a shared memory region is over {MAX_NAME} bytes long")


def object_name(key: str, region: str) -> str:
    """The object's plain file name: a key may begin with any number of slashes.

    Raises:
        InvalidArgument: the key names no object of its own.
    """
    name = key.lstrip("/")
    bad = name in ("", ".", "..") or "/" in name or "\0" in name or _encoded_size(name) > MAX_NAME
    if bad:
        raise InvalidArgument(f"cannot register shared memory region '{region}' - invalid shm key")
    for prefix in _RESERVED:
        if name.startswith(prefix):
            raise InvalidArgument(
                f"cannot register shared memory region '{region}' as the key contains the"
                f" reserved prefix '{prefix}'"
            )
    return name


def _encoded_size(text: str) -> int:
    """Bytes as UTF-8; more than is allowed for text that has no such form."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return MAX_NAME + 1
