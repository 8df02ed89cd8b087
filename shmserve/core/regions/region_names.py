"""Region names: names chosen by clients, for regions and for registered objects."""

from __future__ import annotations

from shmserve.errors import InvalidArgument

MAX_NAME = 255  # bytes of a region's or an object's name
# The server's own segments, which have a name for a moment; segments of Triton's Python models
_RESERVED = ("shmserve.", "triton_python_backend_shm_region_")


def check_name(name: str) -> None:
    """Check that a name can stand in a path and in a log line."""
    if not name:
        raise InvalidArgument("'region name' is necessary to register a shared memory region")
    if "/" in name or any(ord(c) < 32 or ord(c) == 127 for c in name):
        raise InvalidArgument("the name of a shared memory region has forbidden characters")
    if _encoded_size(name) > MAX_NAME:
        raise InvalidArgument(f"the name of a shared memory region is over {MAX_NAME} bytes long")


def object_name(key: str, region: str) -> str:
    """Return the object's plain file name. A key may begin with any number of slashes. Raise
    InvalidArgument if the key is no valid file name, or has a reserved prefix."""
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
    """Return the size as UTF-8, in bytes; more than `MAX_NAME` if the text cannot be encoded."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return MAX_NAME + 1
