"""Keys: secrets presented by callers, and the keys file. Pure: bytes and time are arguments.

The file is TOML, with a table for each key:

    [alice]
    sha256 = "…64 hexadecimal digits…"
    scopes = ["use", "change"]
    expires = 2030-01-01T00:00:00Z      # optional

A key is 256 random bits, too many to try, so one round of SHA-256 hides the key. A slow hash would
make tries costly, which is not needed, and would cost time in each request. Keys are looked up by
digest in a dict. Timing of the look-up reveals only digests, which a caller cannot choose bit by
bit and cannot turn into a key.
"""

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Annotated, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from shmserve.core.access import Action
from shmserve.core.caller import Caller
from shmserve.errors import ConfigError

# header field and metadata key; the alternative is `Authorization: Bearer`
HEADER = "shmserve-key"
KEY_BYTES = 32
MAX_KEYS = 1024  # in one file
MAX_BYTES = MAX_KEYS * 4096  # of one file
PREFIX = "shmk_"  # lets scanners for leaked secrets find keys
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SCOPES = get_args(Action)


class Key(Struct, frozen=True):
    """Key of one holder. `expires`: end of validity, in seconds of the epoch."""

    name: str
    scopes: tuple[Action, ...]
    expires: float


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]
    scopes: Annotated[tuple[Action, ...], Meta(min_length=1)]
    expires: Annotated[datetime, Meta(tz=True)] | None = None


def digest(key: str) -> bytes:
    """Return the SHA-256 digest that stands for a key in the file."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def parse(data: bytes, what: str = "keys_file") -> dict[bytes, Key]:
    """Return the keys of a file by digest. Raise ConfigError if the file is invalid, or has more
    than `MAX_KEYS` keys. The message begins with `what` and contains no digest."""
    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as ex:  # ValueError: also a number of too many digits
        is_text = not isinstance(ex, UnicodeDecodeError)
        raise ConfigError(f"{what}: {f'not TOML: {ex}' if is_text else 'not UTF-8'}") from None
    if len(document) > MAX_KEYS:
        raise ConfigError(f"{what}: more than {MAX_KEYS} keys")
    keys: dict[bytes, Key] = {}
    for name, table in document.items():
        check_name(name, what)
        try:
            entry = msgspec.convert(table, _Entry)
        except msgspec.ValidationError as ex:
            raise ConfigError(f"{what}: key '{name}': {ascii(str(ex))[1:-1]}") from None
        hashed = bytes.fromhex(entry.sha256)
        if hashed in keys:
            raise ConfigError(f"{what}: keys '{keys[hashed].name}' and '{name}' are the same")
        expires = entry.expires.timestamp() if entry.expires else float("inf")
        keys[hashed] = Key(name, entry.scopes, expires)
    return keys


def check_name(name: str, what: str = "keys_file") -> None:
    """Check the name of a key. Raise ConfigError with a text that begins with `what`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what}: '{ascii(name[:64])[1:-1]}' is no name: 1 to 64 letters, digits, - and _"
        )


def parse_scopes(texts: Iterable[str]) -> tuple[Action, ...]:
    """Return scopes from users' spelling: ``send-models`` is ``send models``."""
    names = [text.strip().replace("-", " ") for text in texts]
    for name in names:
        if name not in _SCOPES:
            raise ConfigError(f"there is no scope '{name}', but {', '.join(_SCOPES)}")
    return tuple(scope for scope in _SCOPES if scope in names)


def entry_text(name: str, key: str, scopes: Iterable[Action], expires: datetime | None) -> str:
    """Return the text of a key's table in the file."""
    quoted = ", ".join(f'"{scope}"' for scope in scopes)
    lines = [f"[{name}]", f'sha256 = "{digest(key).hex()}"', f"scopes = [{quoted}]"]
    if expires is not None:
        lines.append(f"expires = {expires.isoformat(timespec='seconds')}")
    return "\n".join(lines) + "\n"


def presented(field: Callable[[str], str | None]) -> tuple[str, str] | None:
    """Return (field name, key) of a request, or None if no key was sent. `field`: function that
    returns a header field or metadata by name.

    The service's own field goes first, because `Authorization` may be meant for a proxy.
    """
    own = field(HEADER)
    if own is not None:
        return HEADER, own.strip()
    scheme, _, token = (field("authorization") or "").partition(" ")
    return ("authorization", token.strip()) if scheme.lower() == "bearer" else None


def with_key(caller: Caller, key: Key | None) -> Caller:
    """Return the caller of a request with a key. `key`: None if the key is unknown or expired."""
    if key is None:
        return replace(caller, key_refused=True)
    return replace(caller, scopes=key.scopes, key=key.name)


def holder(keys: Mapping[bytes, Key], key: str, now: float) -> Key | None:
    """Return the valid entry for a key, or None if the key is unknown or expired."""
    entry = keys.get(digest(key))
    return entry if entry is not None and now < entry.expires else None
