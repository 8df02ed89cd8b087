"""Lanes beside HTTP, in one run: ``python -m bench.lanes``. Method: bench/README.md.

lane       shmserve.client, over a lane
http       shmserve.client, over HTTP on the Unix socket; tensors in shared memory all the same
bare       forty lines on a lane: one prepared message, sent and its answer received
in C       libshmserve (bench/lanes.c); also asking `identity`, which copies the tensor once
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

import shmserve.client
from bench.turns import closed_loops, in_turn, seconds
from shmserve.protocol.control import lane_messages as wire
from tests.running_server import RunningServer

MODEL = "untouched"
SIZES = (4096, 1 << 20, 64 << 20, 256 << 20)
SOURCES = [Path(__file__).with_suffix(".c"), Path(__file__).parents[1] / "client/c/shmserve.c"]
ENDS = {MODEL: ("IN", "OUT"), "identity": ("INPUT0", "OUTPUT0")}


def produced(client, nbytes):
    x = client.empty(nbytes // 4, np.float32)
    x[:] = 1
    return x


def caller(client, nbytes):
    """Return a function that makes one call with an output of known size."""
    x = produced(client, nbytes)
    client.infer(MODEL, {"IN": x})
    return lambda: client.infer(MODEL, {"IN": x})


def bare_caller(client, nbytes):
    """Return a function that sends one message and awaits the answer in memory of the client."""
    x = produced(client, nbytes)
    place, offset = client._pools.on(None).find(x)
    window = wire.LaneWindow(place.name, offset, x.nbytes)
    tensor = wire.LaneTensor("IN", "FP32", x.shape, window)
    data = wire.encode(wire.LaneRequest(1, (tensor,), (wire.LaneOutput("OUT", window),)))
    lane = client._lanes.take((MODEL, ""), time.monotonic() + 10.0)

    def call():
        lane.channel.send(data)
        answer = lane.receive(60.0)
        assert answer.status == 200, answer.error
        return x

    return call


def in_c(server, program, model, nbytes, callers, lasting):
    path = os.path.join(server.run_dir, "client.sock")
    words = [program, path, model, *ENDS[model], nbytes, callers, lasting]
    done = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    settings = {"model_control": "explicit", "load_models": "untouched,identity"}
    with (
        tempfile.TemporaryDirectory() as folder,
        RunningServer("bench/models,workers", **settings, grpc_processes=0) as server,
    ):
        program = os.path.join(folder, "lanes")
        subprocess.run(["cc", "-O2", "-pthread", "-o", program, *SOURCES], check=True)
        url = f"unix:{server.unix_path}"
        with (
            shmserve.client.connect(url) as client,
            shmserve.client.connect(url, lanes=False) as plain,
        ):
            report(server, client, plain, program, arguments)


def report(server, client, plain, program, arguments):
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    for nbytes in SIZES:
        lane, http = (caller(one, nbytes) for one in (client, plain))
        assert lane().transport == "lane"
        calls = {"lane": lane, "http": http, "bare": bare_caller(client, nbytes)}
        timed = {name: partial(seconds, call) for name, call in calls.items()}
        times = in_turn(arguments.rounds, timed, warm_up=5)
        found = {name: statistics.median(took) * 1e6 for name, took in times.items()}
        shown = "  ".join(f"{name} {took:.0f} us" for name, took in found.items())
        ratio, bare = found["lane"] / found["http"], found["lane"] / found["bare"]
        print(f"{nbytes:>10} bytes  {shown}  lane/http {ratio:.2f}  lane/bare {bare:.2f}")
        for model in ENDS:
            shown = in_c(server, program, model, nbytes, 1, arguments.seconds)
            print(f"     in C, {model}: {shown}")
    x, lasting = np.ones(4, np.float32), arguments.seconds
    for callers in (1, 8):
        rates = {
            name: len(closed_loops([partial(infer, MODEL, {"IN": x})] * callers, lasting)) / lasting
            for name, infer in (("lane", client.infer), ("http", plain.infer))
        }
        shown = "  ".join(f"{name} {value:.0f}/s" for name, value in rates.items())
        print(
            f"{callers} callers, 16 bytes  {shown}  lane/http {rates['lane'] / rates['http']:.1f}"
        )
        print(f"     in C: {in_c(server, program, MODEL, 16, callers, lasting)}")


if __name__ == "__main__":
    main()
