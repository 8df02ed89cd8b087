"""Sequences with tritonclient: interleaved, over HTTP, gRPC and gRPC streams.

Separate process: ``triton_sequence_client.py HTTP GRPC`` (each HOST:PORT); prints PASS.
"""

from __future__ import annotations

import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.http as http

VALUES = [11, 7, 5, 3, 2, 0, 1]


def tensor(module: Any, value: int) -> Any:
    made = module.InferInput("IN", [1, 1], "INT32")
    made.set_data_from_numpy(np.full((1, 1), value, np.int32))
    return made


def flags(index: int) -> dict[str, bool]:
    return {"sequence_start": index == 0, "sequence_end": index == len(VALUES) - 1}


def one_by_one(module: Any, address: str, first: int | str, second: int | str) -> None:
    """Send two sequences with alternating requests."""
    client = module.InferenceServerClient(address)
    sums = {first: 0, second: 0}
    for index, value in enumerate(VALUES):
        for sequence, sent in ((first, value), (second, -value)):
            sums[sequence] += sent
            result = client.infer(
                "names" if isinstance(sequence, str) else "tally",
                [tensor(module, sent)],
                sequence_id=sequence,
                **flags(index),
            )
            assert result.as_numpy("SUM")[0, 0] == sums[sequence], (sequence, index)
    client.close()


def streamed(address: str, first: int | str, second: int | str) -> None:
    """Send two alternating sequences on a stream, all requests before the first answer is read."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = grpc.InferenceServerClient(address)
    client.start_stream(lambda result, error: answers.put((result, error)))
    for index, value in enumerate(VALUES):
        for sequence, sent in ((first, value), (second, -value)):
            client.async_stream_infer(
                "names" if isinstance(sequence, str) else "tally",
                [tensor(grpc, sent)],
                request_id=f"{sequence}/{index}",
                sequence_id=sequence,
                **flags(index),
            )
    for index in range(len(VALUES)):
        for sequence, sign in ((first, 1), (second, -1)):
            result, error = answers.get(timeout=30)
            assert error is None, error
            assert result.get_response().id == f"{sequence}/{index}"
            assert result.as_numpy("SUM")[0, 0] == sign * sum(VALUES[: index + 1])
    client.stop_stream()
    client.close()


def iterated(address: str) -> None:
    """Send two requests that a model answers once per run, in shared runs."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = grpc.InferenceServerClient(address)
    client.start_stream(lambda result, error: answers.put((result, error)))
    runs = {"long": 20, "short": 4}
    for name, count in runs.items():
        made = grpc.InferInput("COUNT", [1, 1], "INT32")
        made.set_data_from_numpy(np.full((1, 1), count, np.int32))
        client.async_stream_infer("countdowns", [made], request_id=name)
    seen: dict[str, list[list[int]]] = {name: [] for name in runs}
    for _ in range(sum(runs.values())):
        result, error = answers.get(timeout=30)
        assert error is None, error
        seen[result.get_response().id].append(result.as_numpy("SEEN")[0].tolist())
    for name, count in runs.items():
        told = [[run, int(run == 1), int(run == 1)] for run in range(1, count + 1)]
        assert [row[:3] for row in seen[name]] == told, seen[name]
    assert any(together == 2 for *_, together in seen["short"]), seen
    assert seen["long"][-1][3] == 1, seen
    client.stop_stream()
    client.close()


if __name__ == "__main__":
    over_http, over_grpc = sys.argv[1:]
    one_by_one(http, over_http, 1001, 1002)
    one_by_one(http, over_http, "red", "blue")
    one_by_one(grpc, over_grpc, 1003, 1004)
    one_by_one(grpc, over_grpc, "green", "1003")
    streamed(over_grpc, 1005, 1006)
    streamed(over_grpc, "black", "white")
    iterated(over_grpc)
    print("PASS")
