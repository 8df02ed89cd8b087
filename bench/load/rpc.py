"""A closed-loop gRPC client: ``python -m bench.load.rpc ADDRESS METHOD BYTES CALLERS SECONDS``.

A thread and a channel for each caller. Requests are encoded once and answers are not decoded, so
the server alone is measured. Prints one JSON object.
"""

import json
import sys
import time
from functools import partial

import grpc
import numpy as np

from bench.turns import closed_loops
from shmserve._generated import grpc_service_pb2 as pb

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # otherwise all callers would share one connection
]
RECEIPT = (("shmserve-receipt", "1"),)


def encoded(nbytes):
    """A request of `nbytes` bytes for `identity`."""
    tensor = np.random.default_rng(1).random(nbytes // 4, dtype=np.float32).tobytes()
    request = pb.ModelInferRequest(model_name="identity", raw_input_contents=[tensor])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[nbytes // 4])
    return request.SerializeToString(), tensor


def checked(call, request, tensor):
    """Check the answer, where the method has an answer, and return the receipt."""
    answer, done = call.with_call(request, metadata=RECEIPT, timeout=120)
    if answer:
        parsed = pb.ModelInferResponse.FromString(answer)
        assert list(parsed.raw_output_contents) == [tensor], "a wrong answer"
    trailing = dict(done.trailing_metadata())
    return json.loads(trailing.get("shmserve-receipt", "null"))


def main(address, method, nbytes, callers, seconds):
    request, tensor = encoded(int(nbytes))
    channels = [grpc.insecure_channel(address, OPTIONS) for _ in range(int(callers))]
    calls = [channel.unary_unary(method) for channel in channels]
    receipts = [checked(call, request, tensor) for call in calls for _ in range(3)]
    loops = [partial(call, request, timeout=120) for call in calls]
    begin = time.perf_counter()
    latencies = np.array(closed_loops(loops, float(seconds)))
    wall = time.perf_counter() - begin
    for channel in channels:
        channel.close()
    report = {
        "requests": len(latencies),
        "answers": len(latencies) + len(receipts),
        "per_s": len(latencies) / wall,
        "p50_us": float(np.median(latencies) * 1e6),
        "p99_us": float(np.quantile(latencies, 0.99) * 1e6),
        "copied": receipts[-1] and receipts[-1]["copied_bytes"],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
