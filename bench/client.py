"""`shmserve.client` beside `tritonclient`, in one run: ``python -m bench.client``.

One timed call is the call of a program that has an FP32 array and wants the model's answer as an
array: `identity` of this server, echoing 16 MiB (``--bytes``), closed loop, one caller.

    produced   shmserve.client, with an array of `client.empty`, without any copy
    given      shmserve.client, with an ordinary array, which the client copies to shared memory
    http       shmserve.client without shared memory: binary HTTP over the Unix socket
    triton     tritonclient.http, binary tensors over TCP, `set_data_from_numpy` to `as_numpy`
    triton-grpc tritonclient.grpc, raw tensors
    triton-shm tritonclient.http with two system regions made and registered beforehand,
               `set_shared_memory_region` to `get_contents_as_numpy` (a view)
    memcpy     copying the array once in this process, the floor

(`identity` itself copies its input to its output once; only the floor lacks this copy.)

All clients run in this process against one server. A round calls each client in turn, so that a
change of the machine's mood hits all clients; every second round goes backwards. Before measuring,
each client makes three calls, and all bytes of the answers are compared; while measuring, only the
first and last element. The report has medians over all calls, the fastest and the slowest tenth,
and the ratio of medians to `triton`. Only ratios within one run mean anything.
"""

import argparse
import contextlib
import importlib
import os
import statistics
import tempfile
import time

import numpy as np

import shmserve.client
from shmserve.testing.running_server import RunningServer


def tritonclient_caller(stack, address, x, protocol="http"):
    """Return a function that makes one round trip with tritonclient."""
    triton = importlib.import_module(f"tritonclient.{protocol}")
    client = triton.InferenceServerClient(address)
    stack.callback(client.close)

    def call():
        tensor = triton.InferInput("INPUT0", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)  # binary over HTTP, too
        output = triton.InferRequestedOutput("OUTPUT0")
        return client.infer("identity", [tensor], outputs=[output]).as_numpy("OUTPUT0")

    return call


def tritonclient_shm_caller(stack, address, x):
    """Return a function that makes one round trip through tritonclient's own shared memory."""
    import tritonclient.http as triton
    import tritonclient.utils.shared_memory as shm

    client = triton.InferenceServerClient(address)
    stack.callback(client.close)
    handles = []
    for name in ("bench-in", "bench-out"):
        key = f"/{name}-{os.getpid()}"
        handles.append(shm.create_shared_memory_region(name, key, x.nbytes))
        stack.callback(shm.destroy_shared_memory_region, handles[-1])
        client.register_system_shared_memory(name, key, x.nbytes)
        stack.callback(client.unregister_system_shared_memory, name)
    tensor = triton.InferInput("INPUT0", list(x.shape), "FP32")
    tensor.set_shared_memory("bench-in", x.nbytes)
    output = triton.InferRequestedOutput("OUTPUT0")
    output.set_shared_memory("bench-out", x.nbytes)

    def call():
        shm.set_shared_memory_region(handles[0], [x])
        client.infer("identity", [tensor], outputs=[output])
        return shm.get_contents_as_numpy(handles[1], np.float32, list(x.shape))

    return call


def callers(stack, server, x):
    """Return the contestants by name."""
    url = f"unix:{server.unix_path}"
    shared = stack.enter_context(shmserve.client.connect(url))
    plain = stack.enter_context(shmserve.client.connect(url, control=""))
    assert shared.shared_memory
    produced = shared.empty(x.shape, x.dtype)
    produced[:] = x
    target = np.empty_like(x)
    address = f"{server.http_host}:{server.http_port}"

    def memcpy():
        np.copyto(target, x)
        return target

    return {
        "produced": lambda: shared.infer("identity", {"INPUT0": produced})["OUTPUT0"],
        "given": lambda: shared.infer("identity", {"INPUT0": x})["OUTPUT0"],
        "http": lambda: plain.infer("identity", {"INPUT0": x})["OUTPUT0"],
        "triton": tritonclient_caller(stack, address, x),
        "triton-grpc": tritonclient_caller(stack, server.grpc_address, x, "grpc"),
        "triton-shm": tritonclient_shm_caller(stack, address, x),
        "memcpy": memcpy,
    }


def measure(contestants, x, rounds):
    """Return the seconds of every call, by name."""
    for call in contestants.values():
        for _ in range(3):
            assert np.array_equal(call(), x)
    times = {name: [] for name in contestants}
    for number in range(rounds):
        order = list(contestants.items())
        for name, call in order if number % 2 else reversed(order):
            begin = time.perf_counter()
            y = call()
            times[name].append(time.perf_counter() - begin)
            assert y[0] == x[0]
            assert y[-1] == x[-1]
            del y
    return times


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.client", description=__doc__)
    parser.add_argument("--bytes", type=int, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    x = np.arange(options.bytes // 4, dtype=np.float32)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(RunningServer(environ={"TMPDIR": directory}))
        times = measure(callers(stack, server, x), x, options.rounds)
    base = statistics.median(times["triton"])
    print(f"{options.bytes} bytes, {options.rounds} rounds, {os.cpu_count()} CPUs,", end=" ")
    print(f"load {os.getloadavg()[0]:.1f}")
    print("            median ms   10 %   90 %   of triton")
    for name, seconds in times.items():
        low, *_, high = statistics.quantiles(seconds, n=10)
        middle = statistics.median(seconds)
        print(
            f"{name:11}  {middle * 1e3:9.2f} {low * 1e3:6.2f} {high * 1e3:6.2f}"
            f"   {middle / base:9.2f}"
        )


if __name__ == "__main__":
    main()
