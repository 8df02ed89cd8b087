"""Which devices the fakes of CUDA and of NVML speak of.

FAKE_CUDA_DEVICES says how many the host has (default 2; "none": a host without a driver).
Each of them is also two MIG devices, by name only.
"""

from __future__ import annotations

import os
from typing import NamedTuple
from uuid import UUID

NAME = "Fake GPU"


class Physical(NamedTuple):
    """One device, or one MIG device of it."""

    index: int
    uuid: UUID


def _named(index: int, mig: int = 0) -> Physical:
    return Physical(index, UUID(int=0xFA4EC0DA << 96 | index << 8 | mig))


def parts(device: Physical) -> list[Physical]:
    """Its MIG devices."""
    return [_named(device.index, mig) for mig in (1, 2)]


def is_part(device: Physical) -> bool:
    return device.uuid.int & 0xFF != 0


def has_driver() -> bool:
    return os.environ.get("FAKE_CUDA_DEVICES") != "none"


def memory_bytes() -> int:
    """What a device has, and what one process can allocate of it."""
    return int(os.environ.get("FAKE_CUDA_MEMORY", 4 << 30))


def every() -> list[Physical]:
    """All devices of the host, as NVML counts them."""
    if not has_driver():
        return []
    return [_named(index) for index in range(int(os.environ.get("FAKE_CUDA_DEVICES", "2")))]


def _find(token: str) -> Physical | None:
    devices = every()
    if token.isdecimal():
        return devices[int(token)] if int(token) < len(devices) else None
    kind, _, rest = token.partition("-")
    if kind == "MIG":
        devices = [part for device in devices for part in parts(device)]
    found = [device for device in devices if rest and str(device.uuid).startswith(rest.lower())]
    return found[0] if kind in ("GPU", "MIG") and len(found) == 1 else None


def visible() -> list[Physical]:
    """What CUDA shows a process: CUDA_VISIBLE_DEVICES up to the first name that is none.

    Of MIG devices it shows one, and nothing beside it; a device named twice hides all.
    """
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        return every()
    chosen: list[Physical] = []
    for token in (part.strip() for part in told.split(",")):
        found = _find(token)
        if found is None or (chosen and token.startswith("MIG-")):
            break
        if found in chosen:
            return []
        chosen.append(found)
        if token.startswith("MIG-"):
            break
    return chosen
