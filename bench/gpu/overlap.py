"""Two callers of one instance: the next request's input is copied while the current request
computes."""

import contextlib
import time

import cupy
import numpy as np

from bench.gpu.caller import Caller
from bench.gpu.timing import FAKE, NO_TIMING, ratio
from bench.turns import closed_loops


def measure(server, nbytes, seconds, rounds, copy_s):
    """`copy_s`: how long a copy of so many bytes to the GPU takes."""
    pass_s = _pass(nbytes)
    passes = 1 if FAKE else max(1, round(copy_s / pass_s))
    with contextlib.ExitStack() as stack:
        callers = [Caller(stack, server) for _ in range(2)]
        calls = []
        for number, caller in enumerate(callers):
            caller.shared_array(f"overlap-{number}", nbytes)[:] = number
            calls.append(_call(caller, f"overlap-{number}", nbytes, passes))
            calls[-1]()
        rates = {1: [], 2: []}
        for number in range(rounds):
            for count in (1, 2) if number % 2 else (2, 1):
                rates[count].append(_throughput(calls[:count], seconds))
        (copied,) = {caller.receipt["copied_bytes"]["device"] for caller in callers}
    shown = {str(count): _rounded(values) for count, values in rates.items()}
    return {
        "bytes": nbytes,
        "passes": passes,
        "copy_ms": NO_TIMING if FAKE else round(copy_s * 1e3, 3),
        "compute_ms": NO_TIMING if FAKE else round(passes * pass_s * 1e3, 3),
        "device_bytes_a_request": copied,
        "requests_per_s_by_callers": shown,
        "two_to_one": ratio(rates[2], rates[1]),
        "problems": [],
    }


def _rounded(rates):
    return NO_TIMING if FAKE else [round(rate, 1) for rate in rates]


def _pass(nbytes):
    """Return the seconds of one addition over `nbytes` bytes on the GPU."""
    source = cupy.zeros(nbytes // 4, np.float32)
    target = cupy.empty_like(source)
    cupy.add(source, np.float32(1), out=target)
    cupy.cuda.runtime.deviceSynchronize()
    begin = time.perf_counter()
    for _ in range(50):
        cupy.add(source, np.float32(1), out=target)
    cupy.cuda.runtime.deviceSynchronize()
    return (time.perf_counter() - begin) / 50


def _call(caller, region, nbytes, passes):
    return lambda: caller.seconds("work", region, None, nbytes, passes=passes)


def _throughput(calls, seconds):
    """Return requests per second; each caller sends the next request after each answer."""
    begin = time.perf_counter()
    return len(closed_loops(calls, seconds)) / (time.perf_counter() - begin)
