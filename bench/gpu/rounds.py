"""Register, infer, unregister, over and over: what the GPU's memory is before and after."""

import time

import cupy

from bench.gpu.caller import DeviceMemory, both
from bench.gpu.timing import FAKE, MIB, NO_TIMING

NBYTES = 1 * MIB
WARM_UP = 50
MAY_KEEP = 4 * MIB  # what a driver or a pool may keep for itself


def free_bytes():
    """Of the device, whoever uses the rest (on the fake: this process)."""
    return cupy.cuda.runtime.memGetInfo()[0]


def measure(server, rounds):
    told = {"bytes": NBYTES, "rounds": rounds, "problems": []}
    with both(server) as (stack, callers):
        for protocol, caller in callers.items():
            memory = DeviceMemory(stack, NBYTES)
            _rounds(caller, memory, protocol, range(WARM_UP))
            before, begin = free_bytes(), time.perf_counter()
            _rounds(caller, memory, protocol, range(WARM_UP, WARM_UP + rounds))
            seconds, after = time.perf_counter() - begin, free_bytes()
            told[protocol] = {
                "rounds_per_s": NO_TIMING if FAKE else round(rounds / seconds, 1),
                "free_bytes": [before, after],
            }
            if not memory.holds(WARM_UP + rounds):
                told["problems"].append(f"{protocol}: a round did not add")
            if before - after > MAY_KEEP:
                told["problems"].append(f"{protocol}: {before - after} bytes of the GPU are gone")
    return told


def _rounds(caller, memory, protocol, numbers):
    for number in numbers:
        name = f"{protocol}-{number}"
        caller.register(name, memory)
        caller.seconds("add_one", name, name, memory.nbytes)
        caller.unregister(name)
