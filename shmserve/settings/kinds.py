"""Kinds of settings, in words too, and conversion of values with units.

A field is `name: Annotated[kind, "what the setting does"] = default`. docs/settings.md and
`shmserve settings NAME` show this text, which is Markdown with links relative to docs/.
"""

import re
from typing import Annotated, Any, Literal, get_args, get_origin

from msgspec import Meta, inspect

_SIZES = {
    "b": 1,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
SIZE = "a size in bytes or with a unit (64k, 512MiB, 1GB)"
_TIMES = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86400}
_WITH_UNIT = re.compile(r"([0-9]+)(\.[0-9]+)? *([A-Za-z]+)")

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
SecondsOrNone = Annotated[float, Meta(ge=0)]  # 0 switches a feature off
Share = Annotated[float, Meta(gt=0, le=1)]


def described(words: str, pattern: str) -> Meta:
    """Return the form of a text: a regular expression for the program, words for people."""
    return Meta(pattern=pattern, description=words)


Origin = Annotated[
    str,
    described("an origin SCHEME://HOST or SCHEME://HOST:PORT", "^[a-z][a-z0-9+.-]*://[^/ ]+$"),
]
HostRule = Annotated[
    str,
    described(
        "a rule cpu-cores=N, cpu-cores=N-M or numa-node=N",
        r"^(cpu-cores=[0-9]{1,4}(-[0-9]{1,4})?|numa-node=[0-9]{1,3})$",
    ),
]
ResourceAmount = Annotated[
    str,
    described(
        "an amount NAME:COUNT or NAME:COUNT:DEVICE, with a number or cpu for DEVICE",
        "^[^:]+:[1-9][0-9]{0,8}(:(cpu|[0-9]{1,4}))?$",
    ),
]
Url = Annotated[
    str,
    described(
        "an address http://HOST:PORT/PATH or https://HOST:PORT/PATH without user, password and"
        " query; PORT and PATH may be left out",
        r"^https?://[^/@?#\s]+(/[^@?#\s]*)?$",
    ),
]
Pair = Annotated[str, described("a pair NAME=VALUE", "^[^=]+=.*$")]
HeaderPair = Annotated[  # RFC 9110
    str,
    described("a header field NAME=VALUE in ASCII", r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+=[\x20-\x7e]*$"),
]
# Secrets of stores belong in the environment.
RepositoryPath = Annotated[
    str,
    described(
        "a folder, a NAME=FOLDER, or a store's address (s3://, gs://, az://, hf://, http:// or"
        " https://) without user, password and query",
        r"^(?!([^/]*=)?[A-Za-z][A-Za-z0-9+.-]*://)|^(s3|gs|az|hf|https?)://[^/@?#\s]+(/[^?#\s]*)?$",
    ),
]
TcpAddress = Annotated[
    str,
    described(
        "a TCP address HOST:PORT, with an IPv6 HOST in brackets",
        r"^(\[[0-9A-Fa-f:.]+\]|[^][:/]+):[1-9][0-9]{0,4}$",
    ),
]
FileMode = Annotated[
    str, described("a mode of three or four octal digits, such as 0660", "^[0-7]{3,4}$")
]
Names = Annotated[tuple[str, ...], Meta(min_length=1)]
# the server's user and root; any user of the host; all callers
From = Literal["owner", "local", "anyone"]
# each value includes the callers of the value before
KeysFrom = Literal["nobody", "remote", "local", "anyone"]
_TEXT = "a text"
KIB = 1 << 10
MIB = 1 << 20


def is_size(name: str) -> bool:
    """Return True if a setting is a number of bytes, as its name says."""
    return name.endswith(("_bytes", "_bytes_per_s"))


def is_time(name: str) -> bool:
    """Return True if a setting is a number of seconds, as its name says."""
    return name.endswith("_s") and not name.endswith("_per_s")


def without_unit(name: str, text: str) -> str | int | float:
    """Return the number for a text with a unit, or any other text unchanged."""
    match = _WITH_UNIT.fullmatch(text.strip())
    units = _SIZES if is_size(name) else _TIMES if is_time(name) else {}
    factor = units.get(match[3].lower()) if match else None
    if match is None or factor is None:
        return text
    if is_time(name):
        return float(match[1] + (match[2] or "")) * factor
    number = int(match[1]) * factor
    fraction = float(match[2] or 0) * factor
    return number + int(fraction) if fraction.is_integer() else text


def size(text: str) -> int | None:
    """Return the bytes of a size as settings take sizes, or None for any other text."""
    number = without_unit("_bytes", text)
    return int(number) if isinstance(number, int) or re.fullmatch("[0-9]{1,18}", text) else None


def bare(kind: Any) -> Any:
    """Return a type without bounds."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def is_list(kind: Any) -> bool:
    return get_origin(bare(kind)) is tuple


def is_table(kind: Any) -> bool:
    return get_origin(bare(kind)) is dict


def describe(name: str, kind: Any) -> str:
    """Return the values that a setting takes, in words."""
    words = _words(inspect.type_info(kind))
    if is_size(name):
        return words.replace("a whole number", SIZE)
    if is_time(name):
        return words.replace("a number", "seconds or a time with a unit (500ms, 2min, 1h)")
    return words


def description(kind: Any) -> str:
    """Return the text beside a field, or "" without a text."""
    return next((text for text in getattr(kind, "__metadata__", ()) if isinstance(text, str)), "")


def _words(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata(extra_json_schema={"description": str(words)}):
            return words
        case inspect.Metadata(type=bare_type):
            return _words(bare_type)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number" + _bounds(info)
        case inspect.FloatType():
            return "a number" + _bounds(info)
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(map(str, values))
        case inspect.StrType(pattern=None):
            return _TEXT
        case inspect.StrType(pattern=pattern):
            return f"a text that matches `{pattern}`"
        case inspect.VarTupleType(item_type=item, min_length=least):
            number = "one or more " if least else ""
            words = _words(item)
            return f"a list of {number}" + ("texts" if words == _TEXT else f"items, each {words}")
        case inspect.UnionType(types=choices):
            return " or ".join(map(_words, choices))
        case inspect.DictType(value_type=value):
            form = "a table (in a variable name=item,item;other=item)"
            return f"{form} that gives each name {_words(value)}"
    return "a value"


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    parts = [
        f"{word} {_number(bound)}"
        for word, bound in (
            ("at least", info.ge),
            ("more than", info.gt),
            ("at most", info.le),
            ("less than", info.lt),
        )
        if bound is not None
    ]
    return ", " + " and ".join(parts) if parts else ""


def _number(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def size_text(value: int) -> str:
    """Return a number of bytes with the largest unit that needs no fraction."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % _SIZES[unit.lower()] == 0:
            return f"{value // _SIZES[unit.lower()]}{unit}"
    return str(value)


def shown(name: str, value: Any, separator: str = ",") -> str:
    """Return a value as text for an environment variable, sizes with a unit."""
    return size_text(value) if is_size(name) else text(value, separator)


def text(value: Any, separator: str = ",") -> str:
    """Return a value as text for an environment variable."""
    if isinstance(value, dict):
        return ";".join(f"{name}={text(items)}" for name, items in value.items())
    if isinstance(value, tuple):
        return separator.join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
