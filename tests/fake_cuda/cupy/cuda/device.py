"""Devices of the fake."""

from __future__ import annotations

import threading

from cupy import _queues
from cupy.cuda import runtime

_entered = threading.local()


class Device:
    def __init__(self, device: int | Device | None = None) -> None:
        self.id = runtime.getDevice() if device is None else int(device)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Device:
        _entered.__dict__.setdefault("devices", []).append(runtime.getDevice())
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        runtime.setDevice(_entered.devices.pop())

    def use(self) -> None:
        runtime.setDevice(self.id)

    def synchronize(self) -> None:
        _queues.wait_device(self.id)

    @property
    def compute_capability(self) -> str:
        told = runtime.getDeviceProperties(self.id)
        return f"{told['major']}{told['minor']}"
