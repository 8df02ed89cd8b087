"""Devices of the fakes of CUDA and NVML.

FAKE_CUDA_DEVICES: number of devices of the host (default 2; "none": a host without a driver).
FAKE_CUDA_MIG: devices (numbers with commas) that are divided into two MIG devices each.
"""

from __future__ import annotations

import os
from typing import NamedTuple
from uuid import UUID

NAME = "Fake GPU"
# No byte is 0, because CuPy cuts a UUID at the first zero byte.
FIRST_UUID = 0xFA4EC0DA_1111_1111_1111_111111110101


class Physical(NamedTuple):
    """A device, or a MIG device of it (`part` 1 or 2)."""

    index: int
    part: int = 0

    @property
    def uuid(self) -> UUID:
        return UUID(int=FIRST_UUID + (self.index << 8 | self.part))

    @property
    def name(self) -> str:
        return f"{'MIG' if self.part else 'GPU'}-{self.uuid}"

    @property
    def parts(self) -> list[Physical]:
        divided = str(self.index) in os.environ.get("FAKE_CUDA_MIG", "").split(",")
        return [Physical(self.index, part) for part in (1, 2)] if divided else []


def has_driver() -> bool:
    return os.environ.get("FAKE_CUDA_DEVICES") != "none"


def memory_bytes() -> int:
    """Return the bytes of a device, which is also the limit of one process."""
    return int(os.environ.get("FAKE_CUDA_MEMORY", 4 << 30))


def every() -> list[Physical]:
    """Return all devices of the host, as NVML counts them."""
    count = int(os.environ.get("FAKE_CUDA_DEVICES", "2")) if has_driver() else 0
    return [Physical(index) for index in range(count)]


def _find(token: str) -> Physical | None:
    devices = every()
    if token.isdecimal():
        return devices[int(token)] if int(token) < len(devices) else None
    devices += [part for device in devices for part in device.parts]
    found = [device for device in devices if device.name.startswith(token)]
    return found[0] if token[:4] in ("GPU-", "MIG-") and len(found) == 1 else None


def visible() -> list[Physical]:
    """Return the devices that CUDA shows a process.

    CUDA_VISIBLE_DEVICES counts up to the first invalid name or name of another kind. If a device
    is named twice, no device is visible. CUDA shows only one MIG device, and no device beside it.
    """
    chosen: list[Physical] = []
    tokens = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(d.index) for d in every()))
    kinds = {token.strip()[:4] if "-" in token else "" for token in tokens.split(",")[:1]}
    for token in (part.strip() for part in tokens.split(",")):
        found = _find(token)
        if found is None or (token[:4] if "-" in token else "") not in kinds:
            break
        if found in chosen:
            return []
        chosen.append(found)
    parts = [p for device in chosen for p in ([device] if device.part else device.parts)]
    return parts[:1] or chosen
