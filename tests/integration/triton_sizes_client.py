"""Large tensors with an unmodified tritonclient over gRPC: blocking, aio and in a stream.

Separate process: ``triton_sizes_client.py HOST:PORT``; any failure is a traceback.
"""

from __future__ import annotations

import asyncio
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as aio

MODEL = "echo"
SIZES = (1 << 20, 16 << 20)


def inputs(array: np.ndarray) -> list[Any]:
    tensor = triton.InferInput("IN", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return [tensor]


def check(result: Any, array: np.ndarray) -> None:
    assert np.array_equal(result.as_numpy("OUT"), array)


def blocking(url: str, arrays: list[np.ndarray]) -> None:
    with triton.InferenceServerClient(url) as client:
        for array in arrays:
            for compression in (None, "gzip") if array.nbytes == SIZES[0] else (None,):
                given = client.infer(MODEL, inputs(array), compression_algorithm=compression)
                check(given, array)


async def awaited(url: str, arrays: list[np.ndarray]) -> None:
    async with aio.InferenceServerClient(url) as client:
        results = await asyncio.gather(*(client.infer(MODEL, inputs(a)) for a in arrays))
    for result, array in zip(results, arrays, strict=True):
        check(result, array)


def streamed(url: str, arrays: list[np.ndarray]) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for array in arrays:
            client.async_stream_infer(MODEL, inputs(array))
        for array in arrays:
            result, error = answers.get(timeout=60)
            assert error is None, error
            check(result, array)
        client.stop_stream()


def main() -> None:
    url = sys.argv[1]
    arrays = [np.random.default_rng(size).random(size // 4, dtype=np.float32) for size in SIZES]
    blocking(url, arrays)
    asyncio.run(awaited(url, arrays))
    streamed(url, arrays)


if __name__ == "__main__":
    main()
