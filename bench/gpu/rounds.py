"""Register, infer, unregister, over and over: the GPU's free memory before and after."""

import time

import cupy

from bench.gpu.caller import DeviceMemory, both
from bench.gpu.timing import FAKE, MIB, NO_TIMING

NBYTES = 1 * MIB
WARM_UP = 50
MAY_KEEP = 4 * MIB  # bytes that a driver or a pool may keep


def free_bytes():
    """Return the free bytes of the device, counting all users (on the fake: this process)."""
    return cupy.cuda.runtime.memGetInfo()[0]


def measure(server, rounds, limit_s):
    """`limit_s`: no more rounds are begun over a protocol after so many seconds."""
    results = {"bytes": NBYTES, "problems": []}
    with both(server) as (stack, callers):
        for protocol, caller in callers.items():
            memory = DeviceMemory(stack, NBYTES)
            begun = _rounds(caller, memory, protocol, WARM_UP, limit_s)
            before, begin = free_bytes(), time.perf_counter()
            done = _rounds(caller, memory, protocol, rounds, limit_s)
            seconds, after = time.perf_counter() - begin, free_bytes()
            results[protocol] = {
                "rounds": done,
                "rounds_per_s": NO_TIMING if FAKE else round(done / seconds, 1),
                "free_bytes": [before, after],
                "lost_bytes": before - after,
            }
            if not memory.holds(begun + done):
                results["problems"].append(f"{protocol}: a round did not add")
            if before - after > MAY_KEEP:
                results["problems"].append(
                    f"{protocol}: {before - after} bytes of the GPU are gone"
                )
    return results


def _rounds(caller, memory, protocol, rounds, limit_s):
    """Return the number of rounds made."""
    give_up = time.perf_counter() + limit_s
    for number in range(rounds):
        if time.perf_counter() > give_up:
            return number
        name = f"{protocol}-{number}"
        caller.register(name, memory)
        caller.seconds("add_one", name, name, memory.nbytes)
        caller.unregister(name)
    return rounds
