"""CUDA device names: devices visible to the service, and CUDA_VISIBLE_DEVICES of an executor.

A device is named "cuda:K". K counts the devices left visible to the service by
CUDA_VISIBLE_DEVICES, in that order, for every process of the service.
"""

import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple

from msgspec import Struct

VARIABLE = "CUDA_VISIBLE_DEVICES"

_INDEX = re.compile(r"\s*\+?([0-9]{1,9})")  # like strtoul, which ignores any text after the number
_WHOLE, _PART = "GPU-", "MIG-"


class Gpu(Struct, frozen=True):
    """Physical GPU. `uuid`: "GPU-…", empty if the driver could not be asked. `mig`: True if MIG
    mode is on; `parts`: names of the MIG devices ("MIG-…")."""

    uuid: str = ""
    mig: bool = False
    parts: tuple[str, ...] = ()


class Choice(NamedTuple):
    """Device choice of a process. `ordinal`: number of the device among those visible to the
    process. `visible`: value of CUDA_VISIBLE_DEVICES to set before any use of CUDA; None: leave
    unchanged."""

    ordinal: int
    visible: str | None


def device_name(ordinal: int) -> str:
    return f"cuda:{ordinal}"


def ordinal_of(device: str) -> int | None:
    """Return K of "cuda:K", or None for the CPU."""
    kind, _, number = device.partition(":")
    return int(number) if kind == "cuda" else None


def visible(setting: str | None, present: Sequence[Gpu]) -> tuple[str, ...]:
    """Return one token for each visible device, in CUDA's order.

    A token is the name of the device in CUDA_VISIBLE_DEVICES: an index in `present`, or a name.
    The rules are CUDA's: the list ends before the first entry that is invalid or of another kind
    than the first, and is empty if a device is named twice. Whole devices with MIG mode on count
    as a single part, the first of all. If parts are listed by name, each part is a device (see
    `choose`).

    `setting`: value of CUDA_VISIBLE_DEVICES; None: not set. `present`: devices in the driver's
    order.
    """
    if setting is None:
        tokens = [str(index) for index in range(len(present))]
    else:
        tokens = _valid(_entries(setting), present)
    if tokens and tokens[0].startswith(_PART):
        return tuple(tokens)
    if not any(gpu.uuid for gpu in present):
        return tuple(tokens[: len(present)])
    chosen = [present[_whole(token, present)] for token in tokens]
    parts = [part for gpu in chosen for part in gpu.parts]
    if parts:
        return (parts[0],)
    return tuple(token for token, gpu in zip(tokens, chosen, strict=True) if not gpu.mig)


def choose(device: str, environ: Mapping[str, str]) -> Choice:
    """Return the device choice for an executor of "cuda:K", to apply before anything else.

    CUDA shows a process only one MIG device. If the service has a list of MIG devices, each
    process must see only its own device. After the choice is applied, a second call returns an
    equal choice.

    Raise ValueError if `device` is no CUDA device.
    """
    ordinal = ordinal_of(device)
    if ordinal is None:
        raise ValueError(f"'{device}' is not a CUDA device")
    entries = _entries(environ.get(VARIABLE, ""))
    if entries and entries[0].startswith(_PART):
        return Choice(0, entries[ordinal] if ordinal < len(entries) else entries[0])
    return Choice(ordinal, None)


def take(device: str, environ: MutableMapping[str, str]) -> int | None:
    """Make `device` visible to this process, before any use of CUDA. Return its ordinal here.

    Return None and change nothing for the CPU.
    """
    if ordinal_of(device) is None:
        return None
    ordinal, narrowed = choose(device, environ)
    if narrowed is not None:
        environ[VARIABLE] = narrowed
    return ordinal


def _entries(setting: str) -> list[str]:
    """Return the entries before the first malformed one or one of another kind; empty if an entry
    repeats. Does not check that the devices exist."""
    entries: list[str] = []
    kinds: set[str] = set()
    for text in setting.split(","):
        index = _INDEX.match(text)
        entry = str(int(index[1])) if index else text.strip()
        kind = "index" if index else entry[:4]
        kinds.add(kind)
        if kind not in ("index", _WHOLE, _PART) or len(kinds) > 1:
            break
        if entry in entries:
            return []
        entries.append(entry)
    return entries


def _valid(entries: Sequence[str], present: Sequence[Gpu]) -> list[str]:
    """Return the entries before the first missing device; empty if a device repeats.

    Names can be compared only if the driver could be asked. Otherwise CUDA itself reports missing
    devices.
    """
    valid: list[str] = []
    seen: set[int] = set()
    named = any(gpu.uuid for gpu in present)
    for entry in entries:
        if entry.startswith(_PART):
            if not present or (named and not _has_part(entry, present)):
                break
        elif named or not entry.startswith(_WHOLE):
            index = _whole(entry, present)
            if index < 0:
                break
            if index in seen:
                return []
            seen.add(index)
        valid.append(entry)
    return valid


def _whole(token: str, present: Sequence[Gpu]) -> int:
    """Return the index of a whole device, or -1 if no device or several devices match."""
    if not token.startswith(_WHOLE):
        return int(token) if int(token) < len(present) else -1
    matches = [index for index, gpu in enumerate(present) if gpu.uuid.startswith(token)]
    return matches[0] if len(matches) == 1 else -1


def _has_part(name: str, present: Sequence[Gpu]) -> bool:
    """Return True if a MIG device is present, also by the older name
    MIG-GPU-<uuid>/<part>/<part>."""
    parent = name.removeprefix(_PART).partition("/")[0]
    return any(name in gpu.parts or (gpu.mig and gpu.uuid == parent) for gpu in present)
