"""Requests to send, and the load generator as a subprocess."""

import json
import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
PROGRAM = HERE.parent / "build" / "loadgen"
SLACK_S = 180


def build():
    subprocess.run(["make", "-s", "-C", str(HERE)], check=True)


def write_request(directory, model, nbytes):
    """Write a binary inference request as tritonclient sends it; return the paths of request and
    tensor."""
    request, tensor = directory / f"{model}-{nbytes}.http", directory / f"{model}-{nbytes}.raw"
    if request.exists():
        return request, tensor
    entry = {
        "name": "INPUT0",
        "shape": [nbytes // 4],
        "datatype": "FP32",
        "parameters": {"binary_data_size": nbytes},
    }
    document = {"inputs": [entry], "parameters": {"binary_data_output": True}}
    text = json.dumps(document, separators=(",", ":")).encode()
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\n"
        "User-Agent: shmserve-bench\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\n"
        "Host: 127.0.0.1\r\n"
        f"Content-Length: {len(text) + nbytes}\r\n\r\n"
    )
    # Finite numbers, so that no model can change bits of NaNs.
    data = bytes(b & 0x3F for b in os.urandom(min(nbytes, 1 << 16)))
    data = (data * (nbytes // len(data) + 1))[:nbytes]
    tensor.write_bytes(data if model == "identity" else b"")
    request.write_bytes(head.encode() + text + data)
    return request, tensor


def fire(address, request, tensor, connections, warmup, duration, count=0):
    """Run the load generator once; return the report, or the reason why no report exists."""
    command = [str(PROGRAM), *address, "--request", str(request), "--expect-tail", str(tensor)]
    command += ["--connections", str(connections), "--warmup", str(warmup)]
    command += ["--duration", str(duration), "--count", str(count)]
    limit = warmup + duration + SLACK_S
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"requests": 0, "errors": 1, "first_error": f"no end within {limit:.0f} s"}
    if done.returncode:
        return {"requests": 0, "errors": 1, "first_error": done.stderr.strip()[-300:]}
    return json.loads(done.stdout)
