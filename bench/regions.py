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
import json
import statistics
from pathlib import Path

import numpy as np

from bench.caller import Caller
from bench.run import machine
from bench.turns import in_turn, seconds, spread
from tests.running_server import RunningServer

MODELS = Path(__file__).with_name("models")
KIB, MIB = 1 << 10, 1 << 20
SIZES = 4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB


def in_place(caller, model, nbytes):
    """Return the seconds of one request, for which the server must have copied nothing."""
    taken = caller.seconds(model, "in", "out", nbytes)
    assert not any(caller.receipt["copied_bytes"].values()), caller.receipt
    return taken


def table(times, base):
    base_s = statistics.median(times[base])
    for name, taken in times.items():
        middle, low, high = spread(taken)
        print(
            f"{name!s:>10} {middle * 1e6:10.0f} us ({low * 1e6:.0f} .. {high * 1e6:.0f})"
            f" {middle / base_s:6.2f}"
        )


def add_contestants(caller, arrays, nbytes):
    mapped = {name: array[: nbytes // 4] for name, array in arrays.items()}
    own = {name: np.array(array) for name, array in mapped.items()}

    def add(arrays):
        return seconds(lambda: np.add(arrays["in"], np.float32(1), out=arrays["out"]))

    return {
        "arrays": lambda: add(own),
        "mapped": lambda: add(mapped),
        "executor": lambda: in_place(caller, "add_one", nbytes),
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
        caller = Caller(stack, server)
        arrays = {name: caller.shared_array(name, max(SIZES)) for name in ("in", "out")}
        arrays["in"][:] = np.arange(len(arrays["in"]), dtype=np.float32)
        print("untouched, by bytes: p50 (tenths), ratio to 4 KiB")
        sizes = {size: lambda size=size: in_place(caller, "untouched", size) for size in SIZES}
        table(in_turn(options.flat_rounds, sizes), SIZES[0])
        print(f"FP32 + 1 of {options.add_bytes} bytes: p50 (tenths), ratio to arrays")
        adding = add_contestants(caller, arrays, options.add_bytes)
        table(in_turn(options.add_rounds, adding), "arrays")
        half = options.add_bytes // 4
        assert np.array_equal(arrays["out"][:half], arrays["in"][:half] + 1)


if __name__ == "__main__":
    main()
