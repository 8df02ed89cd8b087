"""Death of an executor (kill -9) that has GPU memory: its own, and a client's memory opened."""

import contextlib
import os
import signal
import time

from bench.gpu.caller import Caller, DeviceMemory
from bench.gpu.rounds import MAY_KEEP, free_bytes
from bench.gpu.timing import FAKE, MIB, NO_TIMING

MODEL = "add_one"
NBYTES = 16 * MIB
WATCHDOG_S = 60


def measure(server, rounds):
    """`context_bytes`: device memory that the executor takes, mainly for its CUDA context."""
    results = {"bytes": NBYTES, "rounds": rounds, "problems": []}
    results |= {"back_after_ms": [], "answers_after_ms": [], "context_bytes": []}
    with contextlib.ExitStack() as stack:
        caller, memory = Caller(stack, server), DeviceMemory(stack, NBYTES)
        caller.register("kept", memory)
        stack.callback(caller.unregister, "kept")
        caller.seconds(MODEL, "kept", "kept", NBYTES)
        before = free_bytes()
        for number in range(rounds):
            _kill(server, caller, results)
            if not memory.holds(number + 2):
                results["problems"].append("a request after the executor's death added wrongly")
        results["free_bytes"] = [before, free_bytes()]
    if before - results["free_bytes"][1] > MAY_KEEP:
        results["problems"].append(f"{before - results['free_bytes'][1]} bytes of the GPU are gone")
    if FAKE:
        results |= dict.fromkeys(("back_after_ms", "answers_after_ms", "context_bytes"), NO_TIMING)
    return results


def _executor(server):
    """Return the executor's pid, or None without an executor."""
    title = f"shmserve: executor {MODEL}"
    return next((p for p, t in server.processes().items() if t.startswith(title)), None)


def _kill(server, caller, results):
    """Kill the executor; wait until the device memory is back, and until another executor
    answers."""
    pid, used = _executor(server), free_bytes()
    begin, most = time.perf_counter(), used
    os.kill(pid, signal.SIGKILL)
    back = None
    while time.perf_counter() < begin + WATCHDOG_S:
        free = free_bytes()
        if free > most:
            most, back = free, time.perf_counter() - begin
        try:
            if _executor(server) not in (None, pid):
                caller.seconds(MODEL, "kept", "kept", NBYTES)
                break
        except RuntimeError:  # requests are refused until the next executor is ready
            pass
        time.sleep(0.002)
    else:
        results["problems"].append(f"no executor answers {WATCHDOG_S} s after the death of one")
    results["answers_after_ms"].append(round((time.perf_counter() - begin) * 1e3, 1))
    results["back_after_ms"].append(None if back is None else round(back * 1e3, 1))
    results["context_bytes"].append(most - free_bytes())
