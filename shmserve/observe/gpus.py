"""Which GPUs the server sees, found out without any CUDA call."""

from __future__ import annotations

import os
import re

_NODE = re.compile(r"nvidia\d+")


def visible_devices() -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES names of the devices there are, or all of them, in order."""
    there = sorted(filter(_NODE.fullmatch, os.listdir("/dev")), key=lambda name: int(name[6:]))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(str(index) for index in range(len(there)))
    return tuple(token for token in chosen.split(",") if token.strip())[: len(there)]
