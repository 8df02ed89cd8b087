"""Trimming of the gRPC process's C heap, which holds messages while they are received and sent."""

import ctypes
import threading


def trim_until(stop: threading.Event, every_s: float) -> None:
    """Trim the heap every `every_s` seconds (inf: never) until `stop` is set."""
    pause = min(max(1.0, every_s), threading.TIMEOUT_MAX)
    while not stop.wait(pause):
        trim()


def trim() -> None:
    """Give free memory of the heap back to the system: after some large messages, hundreds of MiB.
    The C library by itself gives back memory only at the heap's end (glibc, malloc_trim(3)). Other
    C libraries have no such function."""
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if call is not None:
        call(0)
