"""CUDA devices by number: which ones a service sees, and what an executor of one must do.

A device is named "cuda:K". K counts the devices that CUDA_VISIBLE_DEVICES leaves visible to the
service, in its order, whatever a process of the service sees of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple

from msgspec import Struct

VARIABLE = "CUDA_VISIBLE_DEVICES"

_INDEX = re.compile(r"\s*\+?([0-9]{1,9})")  # as strtoul reads it: what follows does not matter
_WHOLE, _PART = "GPU-", "MIG-"


class Gpu(Struct, frozen=True):
    """One that is physically there.

    `uuid`: "GPU-…", empty where nobody could be asked. `mig`: its MIG mode is on, and `parts` are
    the names of its MIG devices ("MIG-…").
    """

    uuid: str = ""
    mig: bool = False
    parts: tuple[str, ...] = ()


class Choice(NamedTuple):
    """`ordinal`: the device among those the process sees. `visible`: what the process must set
    CUDA_VISIBLE_DEVICES to before it touches CUDA; None: leave it as it is."""

    ordinal: int
    visible: str | None


def device_name(ordinal: int) -> str:
    return f"cuda:{ordinal}"


def ordinal_of(device: str) -> int | None:
    """K of "cuda:K"; None: it is the CPU."""
    kind, _, number = device.partition(":")
    return int(number) if kind == "cuda" else None


def visible(setting: str | None, present: Sequence[Gpu]) -> tuple[str, ...]:
    """One token for each visible device, in CUDA's order.

    A token is what CUDA_VISIBLE_DEVICES calls the device: its index among `present`, or a name.
    As for CUDA, whose list ends with the first entry that is invalid or of another kind than
    the first, and is empty if a device is named twice. Whole devices with MIG mode on are seen
    as one part, the first of all; of parts that are listed by name each is a device here (see
    `choose`).

    Args:
        setting: the value of CUDA_VISIBLE_DEVICES; None: it is not set.
        present: the devices in the driver's order.
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
    """What an executor of "cuda:K" must do before anything else.

    CUDA shows a process one MIG device only: where the service has a list of them, the process
    must see its own alone. Asked again once that is done it says the same.

    Raises:
        ValueError: it is no CUDA device.
    """
    ordinal = ordinal_of(device)
    if ordinal is None:
        raise ValueError(f"'{device}' is not a CUDA device")
    entries = _entries(environ.get(VARIABLE, ""))
    if entries and entries[0].startswith(_PART):
        return Choice(0, entries[ordinal] if ordinal < len(entries) else entries[0])
    return Choice(ordinal, None)


def take(device: str, environ: MutableMapping[str, str]) -> int | None:
    """Make `device` this process's own, before anything touches CUDA; its ordinal in here.

    None, and nothing is changed: it is the CPU.
    """
    if ordinal_of(device) is None:
        return None
    ordinal, narrowed = choose(device, environ)
    if narrowed is not None:
        environ[VARIABLE] = narrowed
    return ordinal


def _entries(setting: str) -> list[str]:
    """The entries up to the first that cannot be meant; whether they exist is not known here."""
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
    """The entries up to the first that is not there; none if a device is there twice.

    Names can be compared only where the driver could be asked; CUDA itself will tell otherwise.
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
    """The index of a whole device; -1: there is no such, or it could be several."""
    if not token.startswith(_WHOLE):
        return int(token) if int(token) < len(present) else -1
    matches = [index for index, gpu in enumerate(present) if gpu.uuid.startswith(token)]
    return matches[0] if len(matches) == 1 else -1


def _has_part(name: str, present: Sequence[Gpu]) -> bool:
    """Whether a MIG device is there, also by the older name MIG-GPU-<uuid>/<part>/<part>."""
    parent = name.removeprefix(_PART).partition("/")[0]
    return any(name in gpu.parts or (gpu.mig and gpu.uuid == parent) for gpu in present)
