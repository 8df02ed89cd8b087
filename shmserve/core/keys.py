"""Keys that callers present: what a file of them says. Pure: bytes and the time are arguments.

The file is TOML, a table for each key:

    [alice]
    sha256 = "…64 hexadecimal digits…"
    scopes = ["use", "change"]
    expires = 2030-01-01T00:00:00Z      # optional

A key is 256 random bits, so one round of SHA-256 hides it: nobody can try them all, which is what
slow hashes make dear, and a key is looked at with each request. It is looked up by its digest
in a dict. What the time of that tells is about digests, which a caller cannot choose bit by
bit, and from which no key can be found.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Annotated, get_args

import msgspec
from msgspec import Meta, Struct

from shmserve.core.access import Action
from shmserve.errors import ConfigError

HEADER = "shmserve-key"  # header field and metadata key; `Authorization: Bearer` is the other way
KEY_BYTES = 32
MAX_KEYS = 1024  # of a file
PREFIX = "shmk_"  # so that those who look for leaked secrets find them
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SCOPES = get_args(Action)


class Key(Struct, frozen=True):
    """One key. `expires`: seconds of the epoch from which it is none any more."""

    name: str
    scopes: tuple[Action, ...]
    expires: float


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]
    scopes: Annotated[tuple[Action, ...], Meta(min_length=1)]
    expires: Annotated[datetime, Meta(tz=True)] | None = None


def digest(key: str) -> bytes:
    """What stands for a key in the file."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def parse(data: bytes) -> dict[bytes, Key]:
    """The keys of a file, by their digests.

    Raises:
        ConfigError: what is wrong with it, without any hash; or there are more than `MAX_KEYS`.
    """
    try:
        document = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as ex:
        kind = "UTF-8" if isinstance(ex, UnicodeDecodeError) else "TOML"
        raise ConfigError(f"keys_file: not {kind}") from None
    if len(document) > MAX_KEYS:
        raise ConfigError(f"keys_file: more than {MAX_KEYS} keys")
    keys: dict[bytes, Key] = {}
    for name, table in document.items():
        check_name(name)
        try:
            entry = msgspec.convert(table, _Entry)
        except msgspec.ValidationError as ex:
            raise ConfigError(f"keys_file: key '{name}': {ex}") from None
        hashed = bytes.fromhex(entry.sha256)
        if hashed in keys:
            raise ConfigError(f"keys_file: keys '{keys[hashed].name}' and '{name}' are the same")
        expires = entry.expires.timestamp() if entry.expires else float("inf")
        keys[hashed] = Key(name, entry.scopes, expires)
    return keys


def check_name(name: str) -> None:
    """Raises ConfigError: it is no name of a key."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"keys_file: '{ascii(name[:64])[1:-1]}' is no name: 1 to 64 letters, digits, - and _"
        )


def parse_scopes(texts: Iterable[str]) -> tuple[Action, ...]:
    """Scopes as people write them: ``send-models`` is ``send models``.

    Raises:
        ConfigError: there is no such scope.
    """
    names = [text.strip().replace("-", " ") for text in texts]
    for name in names:
        if name not in _SCOPES:
            raise ConfigError(f"there is no scope '{name}', but {', '.join(_SCOPES)}")
    return tuple(scope for scope in _SCOPES if scope in names)


def entry_text(name: str, key: str, scopes: Iterable[Action], expires: datetime | None) -> str:
    """A key as the file has it."""
    quoted = ", ".join(f'"{scope}"' for scope in scopes)
    lines = [f"[{name}]", f'sha256 = "{digest(key).hex()}"', f"scopes = [{quoted}]"]
    if expires is not None:
        lines.append(f"expires = {expires.isoformat(timespec='seconds')}")
    return "\n".join(lines) + "\n"


def presented(field: Callable[[str], str | None]) -> tuple[str, str] | None:
    """The field a key came in, and the key; `field`: gives header fields or metadata by name.

    `Authorization` may be for somebody on the way, so our own field is looked at first.
    """
    own = field(HEADER)
    if own is not None:
        return HEADER, own.strip()
    scheme, _, token = (field("authorization") or "").partition(" ")
    return ("authorization", token.strip()) if scheme.lower() == "bearer" else None


def holder(keys: Mapping[bytes, Key], key: str, now: float) -> Key | None:
    """Whose key it is; None: nobody's, or not any more."""
    found = keys.get(digest(key))
    return found if found is not None and now < found.expires else None
