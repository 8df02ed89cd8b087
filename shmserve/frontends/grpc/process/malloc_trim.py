"""The C heap of the gRPC process, where its core keeps messages while they come and go."""

from __future__ import annotations

import ctypes
import threading


def trim_until(stop: threading.Event, every_s: float) -> None:
    """Trim it every so often (inf: never) until told to stop."""
    pause = min(max(1.0, every_s), threading.TIMEOUT_MAX)
    while not stop.wait(pause):
        trim()


def trim() -> None:
    """Give the system back what is free in it: after some large messages, hundreds of MiB.

    The C library by itself does so at the heap's end only (glibc, malloc_trim(3)); others than
    glibc have no call for it.
    """
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if call is not None:
        call(0)
