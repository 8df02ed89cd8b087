"""The C heap of the gRPC process, where its core keeps messages while they come and go."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Give the system back what is free in it: after some large messages, hundreds of MiB.

    The C library by itself does so at the heap's end only (glibc, malloc_trim(3)); others than
    glibc have no call for it.
    """
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if call is not None:
        call(0)
