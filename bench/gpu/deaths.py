"""A client that is killed -9 while its memory is registered and open in an executor.

As a program (``python -m bench.gpu.deaths PORT BYTES``) it is that client.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from bench.gpu.caller import Caller, DeviceMemory
from bench.gpu.rounds import MAY_KEEP, free_bytes
from bench.gpu.timing import FAKE, MIB, NO_TIMING
from shmserve.cli.operating import show

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 60


def measure(server, nbytes, rounds):
    results = {"bytes": nbytes, "rounds": rounds, "back_after_ms": [], "problems": []}
    with contextlib.ExitStack() as stack:
        caller = Caller(stack, server)
        memory = DeviceMemory(stack, 1 * MIB)
        caller.register("other", memory)
        stack.callback(caller.unregister, "other")
        _die(server, nbytes, results)  # what the first one leaves behind is there for good
        results["back_after_ms"].clear()
        before = free_bytes()
        with _busy(caller, memory, results):
            for _ in range(rounds):
                _die(server, nbytes, results, before)
        results["free_bytes"] = [before, free_bytes()]
    if FAKE:
        results["back_after_ms"] = NO_TIMING
    return results


def _die(server, nbytes, results, before=None):
    """Start a client, kill it, wait until the server has let go of its memory."""
    command = [sys.executable, "-m", "bench.gpu.deaths", str(server.http_port), str(nbytes)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as process:
        if process.stdout.readline() != b"registered\n":
            raise RuntimeError("the client that is to be killed did not start")
        process.kill()
        process.wait()
    begin = time.perf_counter()
    while _registered(server) or (before is not None and before - free_bytes() > MAY_KEEP):
        if time.perf_counter() > begin + WATCHDOG_S:
            results["problems"].append(f"memory of a dead client is held after {WATCHDOG_S} s")
            return
        time.sleep(0.005)
    results["back_after_ms"].append(round((time.perf_counter() - begin) * 1e3, 1))


def _registered(server):
    return any(row["region"] == "mortal" for row in show.ask(server.run_dir, "regions"))


@contextlib.contextmanager
def _busy(caller, memory, results):
    """Somebody else's requests meanwhile; each must be answered."""
    stop = threading.Event()
    count = 0
    memory.fill(0)

    def loop():
        nonlocal count
        try:
            while not stop.is_set():
                caller.seconds("add_one", "other", "other", memory.nbytes)
                count += 1
        except Exception as ex:
            results["problems"].append(f"another client: {ex}")

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    results["requests_of_another_client"] = count
    if not memory.holds(count):
        results["problems"].append("another client got wrong numbers")


def client(port, nbytes):
    with contextlib.ExitStack() as stack:
        server = SimpleNamespace(http_host="127.0.0.1", http_port=port)
        caller = Caller(stack, server)
        caller.register("mortal", DeviceMemory(stack, nbytes))
        caller.seconds("add_one", "mortal", "mortal", nbytes)
        print("registered", flush=True)
        sys.stdin.read()
        os._exit(1)  # it was to be killed


if __name__ == "__main__":
    client(*map(int, sys.argv[1:]))
