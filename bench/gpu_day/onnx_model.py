"""A server with the shipped model `digits` on the GPU, beside the same on the CPU.

Prints one JSON object: `number` and `problems`, or `not_run` with the reason.
"""

import contextlib
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.caller import Caller
from tests.running_server import RunningServer

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = 200


def main() -> None:
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        print(json.dumps({"not_run": "onnxruntime-gpu is missing"}))
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, kind in (("digits", "KIND_CPU"), ("digits_gpu", "KIND_GPU")):
            _copy(folder / name, name, kind)
        server = stack.enter_context(RunningServer(folder, http_workers=1))
        caller = Caller(stack, server)
        on_cpu, _ = _ask(caller, "digits")
        on_gpu, times = _ask(caller, "digits_gpu")
    near = np.allclose(on_cpu, on_gpu, rtol=1e-3, atol=1e-5)
    problems = [] if near else [f"the CPU says {on_cpu}, the GPU {on_gpu}"]
    told = f"{REQUESTS} requests, median {statistics.median(times) * 1e3:.2f} ms"
    print(json.dumps({"number": told, "problems": problems}))


def _copy(target: Path, name: str, kind: str) -> None:
    shutil.copytree(ROOT / "workers/digits", target, ignore=shutil.ignore_patterns("training"))
    config = target / "config.pbtxt"
    text = config.read_text().replace('name: "digits"', f'name: "{name}"', 1)
    config.write_text(text.replace("KIND_CPU", kind))


def _ask(caller: Caller, model: str) -> tuple[list[float], list[float]]:
    image = [float(k % 17) for k in range(64)]
    tensor = {"name": "image", "datatype": "FP32", "shape": [8, 8], "data": image}
    times = []
    for _ in range(REQUESTS):
        begin = time.perf_counter()
        body = caller.post(f"/v2/models/{model}/infer", {"inputs": [tensor]})
        times.append(time.perf_counter() - begin)
    outputs: dict[str, Any] = {out["name"]: out for out in json.loads(body)["outputs"]}
    return outputs["probabilities"]["data"], times


if __name__ == "__main__":
    main()
