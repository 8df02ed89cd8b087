"""Adding 1 on the GPU, by place and size of the tensor."""

import shutil

import numpy as np

from bench.gpu.caller import DeviceMemory, both
from bench.gpu.timing import MIB, ratio, size_name, summary
from bench.turns import in_turn

SPARE = 16 * MIB  # bytes of /dev/shm left for other users
NOTHING = {"in": 0, "batch": 0, "out": 0, "device": 0}


def measure(server, sizes, rounds):
    problems, rows = [], {}
    free = shutil.disk_usage("/dev/shm").free - SPARE
    left_out = [f"{size_name(n)}: /dev/shm has no room" for n in sizes if n > free]
    sizes = [size for size in sizes if size <= free]
    with both(server) as (stack, callers):
        http = callers["http"]
        memory = DeviceMemory(stack, max(sizes))
        http.register("cuda", memory)
        stack.callback(http.unregister, "cuda")
        shared = http.shared_array("system", max(sizes))
        for nbytes in sizes:
            count = max(5, rounds * min(sizes) // nbytes)
            memory.fill(0)
            shared[:] = 0
            try:
                rows[size_name(nbytes)] = _by_place(*callers.values(), nbytes, count, problems)
            except Exception as ex:
                problems.append(f"{size_name(nbytes)}: {ex}")
                continue
            begun = memory.array[: nbytes // 4]
            if not float(begun.min()) == float(begun.max()) == count + 2:
                problems.append(f"{size_name(nbytes)}: the CUDA region has wrong numbers")
            if not (shared[: nbytes // 4] == count + 2).all():
                problems.append(f"{size_name(nbytes)}: the system region has wrong numbers")
    return {"rows": rows, "left_out": left_out, "problems": problems}


def _by_place(http, grpc, nbytes, count, problems):
    receipts = {}
    array = np.arange(nbytes // 4, dtype=np.float32)

    def ask(name, caller, call):
        def once():
            elapsed = call()
            receipts[name] = caller.receipt["copied_bytes"]
            if name == "CUDA region" and receipts[name] != NOTHING:
                problems.append(f"{size_name(nbytes)}, region to region: {receipts[name]}")
            return elapsed

        return once

    def within(region):
        return lambda: http.seconds("add_one", region, region, nbytes)

    calls = {
        "CUDA region": ask("CUDA region", http, within("cuda")),
        "system region": ask("system region", http, within("system")),
        "ModelInfer": ask("ModelInfer", grpc, lambda: grpc.seconds_binary("add_one", array)),
        "binary HTTP": ask("binary HTTP", http, lambda: http.seconds_binary("add_one", array)),
    }
    times = in_turn(count, calls)
    return {
        name: {
            "ms": summary(seconds),
            "to_cuda_region": ratio(seconds, times["CUDA region"]),
            "copied_bytes": receipts[name],
            "rounds": count,
        }
        for name, seconds in times.items()
    }
