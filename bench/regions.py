"""Client shared memory from region to region, in one run: ``python -m bench.regions --help``.

Two questions, one server (`bench/models`), one caller over HTTP on a kept connection:

    flat   does the cost of a request depend on its size? `untouched` opens the memory of input
           and output, and touches neither; p50 by size, and as a ratio to 4 KiB
    add    does a model in an executor compute as fast as in the caller's own process?
           `add_one` of 64 MiB FP32 against `numpy.add` in this process: `arrays` on ordinary
           arrays, `mapped` on the very objects that the executor works on

Sizes and contestants take turns, every second round backwards. The bench checks each answer's
receipt: the server must have copied nothing. Figures are medians; only ratios within one run mean
anything.
"""

import argparse
import contextlib
import http.client
import json
import mmap
import os
import statistics
import time
from pathlib import Path

import numpy as np

from bench.run import machine
from shmserve.testing.running_server import RunningServer

MODELS = Path(__file__).with_name("models")
KIB, MIB = 1 << 10, 1 << 20
SIZES = 4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB


class Caller:
    """Client with one connection and two regions, `in` and `out`."""

    def __init__(self, stack, server, nbytes):
        self._connection = http.client.HTTPConnection(server.http_host, server.http_port)
        stack.callback(self._connection.close)
        self.arrays = {name: self._region(stack, name, nbytes) for name in ("in", "out")}

    def _region(self, stack, name, nbytes):
        path = Path(f"/dev/shm/bench-regions-{os.getpid()}-{name}")
        with path.open("xb+") as file:
            stack.callback(path.unlink)
            os.posix_fallocate(file.fileno(), 0, nbytes)
            mapping = mmap.mmap(file.fileno(), nbytes)
        body = {"key": path.name, "byte_size": nbytes}
        self._post(f"/v2/systemsharedmemory/region/{name}/register", json.dumps(body))
        return np.frombuffer(mapping, np.float32)

    def _post(self, path, body):
        self._connection.request("POST", path, body, {"shmserve-receipt": "1"})
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(text.decode())
        return answer.getheader("shmserve-receipt")

    def seconds(self, model, nbytes):
        """Return the seconds of one request."""
        count = nbytes // 4
        place = {"shared_memory_byte_size": nbytes}
        source = {"name": "IN", "datatype": "FP32", "shape": [count]}
        source["parameters"] = {"shared_memory_region": "in", **place}
        target = {"name": "OUT", "parameters": {"shared_memory_region": "out", **place}}
        body = json.dumps({"inputs": [source], "outputs": [target]})
        begin = time.perf_counter()
        receipt = self._post(f"/v2/models/{model}/infer", body)
        elapsed = time.perf_counter() - begin
        assert not any(json.loads(receipt)["copied_bytes"].values()), receipt
        return elapsed


def in_turn(rounds, contestants):
    """Return seconds by name, after two uncounted calls of each contestant."""
    for call in contestants.values():
        call(), call()
    times = {name: [] for name in contestants}
    for number in range(rounds):
        order = list(contestants.items())
        for name, call in order if number % 2 else reversed(order):
            times[name].append(call())
    return times


def table(times, base):
    base_s = statistics.median(times[base])
    for name, seconds in times.items():
        low, *_, high = statistics.quantiles(seconds, n=10)
        middle = statistics.median(seconds)
        print(
            f"{name!s:>10} {middle * 1e6:10.0f} us ({low * 1e6:.0f} .. {high * 1e6:.0f})"
            f" {middle / base_s:6.2f}"
        )


def add_contestants(caller, nbytes):
    mapped = {name: array[: nbytes // 4] for name, array in caller.arrays.items()}
    own = {name: np.array(array) for name, array in mapped.items()}

    def add(arrays):
        begin = time.perf_counter()
        np.add(arrays["in"], np.float32(1), out=arrays["out"])
        return time.perf_counter() - begin

    return {
        "arrays": lambda: add(own),
        "mapped": lambda: add(mapped),
        "executor": lambda: caller.seconds("add_one", nbytes),
    }


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.regions", description=__doc__)
    parser.add_argument("--flat-rounds", type=int, default=1000)
    parser.add_argument("--add-rounds", type=int, default=40)
    parser.add_argument("--add-bytes", type=int, default=64 * MIB)
    options = parser.parse_args()
    print(json.dumps(machine()))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RunningServer(MODELS))
        caller = Caller(stack, server, max(SIZES))
        caller.arrays["in"][:] = np.arange(len(caller.arrays["in"]), dtype=np.float32)
        print("untouched, by bytes: p50 (tenths), ratio to 4 KiB")
        sizes = {size: lambda size=size: caller.seconds("untouched", size) for size in SIZES}
        table(in_turn(options.flat_rounds, sizes), SIZES[0])
        print(f"FP32 + 1 of {options.add_bytes} bytes: p50 (tenths), ratio to arrays")
        table(in_turn(options.add_rounds, add_contestants(caller, options.add_bytes)), "arrays")
        half = options.add_bytes // 4
        assert np.array_equal(caller.arrays["out"][:half], caller.arrays["in"][:half] + 1)


if __name__ == "__main__":
    main()
