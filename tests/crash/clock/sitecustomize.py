"""Make the wall clock jump; only on the path of servers of crash tests.

CHAOS_CLOCK names a file of eight bytes, a double: seconds that every process adds to the system's
time, from the moment they are written.
"""

import mmap
import os
import struct
import time

if path := os.environ.get("CHAOS_CLOCK"):
    with open(path, "rb") as file:
        _shift = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    _time, _time_ns = time.time, time.time_ns

    def _shifted() -> float:
        seconds: float = struct.unpack_from("<d", _shift)[0]
        return seconds

    time.time = lambda: _time() + _shifted()
    time.time_ns = lambda: _time_ns() + int(_shifted() * 1e9)
