"""Typical program with tritonclient over gRPC, which knows only the address.

Separate process, because its stubs and ours register the same names. Prints one line per check.
"""

from __future__ import annotations

import asyncio
import queue
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as aio
import tritonclient.utils.shared_memory as shm
from client_program import check, problems

COMPRESSIONS = (None, "gzip", "deflate")


def wire_inputs(inputs: dict[str, np.ndarray], datatypes: dict[str, str]) -> list[Any]:
    made = []
    for name, array in inputs.items():
        tensor = grpc.InferInput(name, list(array.shape), datatypes[name])
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def run_sync(url: str) -> None:
    with grpc.InferenceServerClient(url) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert "system_shared_memory" in client.get_server_metadata().extensions
        assert client.get_server_metadata(as_json=True)["name"] == "shmserve"
        for model, (inputs, datatypes) in problems().items():
            assert client.is_model_ready(model)
            assert client.is_model_ready(model, "1")
            assert not client.is_model_ready(model, "7")
            metadata = client.get_model_metadata(model)
            assert client.get_model_config(model, "1").config.name == model
            assert client.get_model_config(model, as_json=True)["config"]["name"] == model
            wanted = [grpc.InferRequestedOutput(output.name) for output in metadata.outputs]
            for compression in COMPRESSIONS:
                result = client.infer(
                    model,
                    wire_inputs(inputs, datatypes),
                    outputs=wanted,
                    request_id="r1",
                    compression_algorithm=compression,
                    sequence_id=5,
                    sequence_start=True,
                    priority=1,
                    timeout=10_000_000,
                    parameters={"mine": "x"},
                )
                assert result.get_response().id == "r1"
                check(model, inputs, result.as_numpy)
            check(model, inputs, client.infer(model, wire_inputs(inputs, datatypes)).as_numpy)
            answers: queue.Queue[Any] = queue.Queue()
            for _ in range(5):
                client.async_infer(
                    model,
                    wire_inputs(inputs, datatypes),
                    lambda result, error, put=answers.put: put((result, error)),
                )
            for _ in range(5):
                result, error = answers.get(timeout=60)
                assert error is None
                check(model, inputs, result.as_numpy)
            print("sync", model)
        control(client)
        refusals(client)
        regions(client)


def control(client: Any) -> None:
    """Check calls without inference, which change nothing."""
    names = {model.name for model in client.get_model_repository_index().models}
    assert names >= set(problems())
    stats = client.get_inference_statistics("identity").model_stats
    assert stats[0].inference_stats.success.count > 0
    assert "trace_level" in client.get_trace_settings().settings
    assert client.get_log_settings(as_json=True)["settings"]["log_error"]["bool_param"] is True
    assert refused(lambda: client.load_model("identity")) == "StatusCode.UNAVAILABLE"


def refusals(client: Any) -> None:
    inputs, datatypes = problems()["identity"]
    given = wire_inputs(inputs, datatypes)
    assert refused(lambda: client.infer("nosuch", given)) == "StatusCode.NOT_FOUND"
    assert refused(lambda: client.infer("add_sub", given)) == "StatusCode.INVALID_ARGUMENT"
    large = wire_inputs({"INPUT0": np.zeros(4 << 20, np.float32)}, datatypes)
    late = refused(lambda: client.infer("identity", large, client_timeout=0.001))
    assert late == "StatusCode.DEADLINE_EXCEEDED", late
    cancelled: queue.Queue[Any] = queue.Queue()
    call = client.async_infer("identity", given, lambda result, error: cancelled.put(error))
    call.cancel()
    cancelled.get(timeout=60)  # either way


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except grpc.InferenceServerException as ex:
        return str(ex.status())
    return "nothing"


def regions(client: Any) -> None:
    """Check system shared memory, and the CUDA calls that every example makes first."""
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    values = np.arange(1000, dtype=np.float32)
    handle = shm.create_shared_memory_region("both", "/shmserve_e2e_grpc", 2 * values.nbytes)
    try:
        shm.set_shared_memory_region(handle, [values])
        client.register_system_shared_memory("both", "/shmserve_e2e_grpc", 2 * values.nbytes)
        assert "both" in client.get_system_shared_memory_status().regions
        tensor = grpc.InferInput("INPUT0", [1000], "FP32")
        tensor.set_shared_memory("both", values.nbytes)
        output = grpc.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("both", values.nbytes, offset=values.nbytes)
        result = client.infer("identity", [tensor], outputs=[output])
        assert result.get_output("OUTPUT0").shape == [1000]
        got = shm.get_contents_as_numpy(handle, np.float32, [1000], offset=values.nbytes)
        np.testing.assert_array_equal(got, values)
        client.unregister_system_shared_memory("both")
        assert not client.get_system_shared_memory_status().regions
    finally:
        shm.destroy_shared_memory_region(handle)
    print("regions ok")


def run_stream(url: str) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for model, (inputs, datatypes) in problems().items():
            for number in range(3):
                given = wire_inputs(inputs, datatypes)
                client.async_stream_infer(model, given, request_id=str(number))
            for number in range(3):
                result, error = answers.get(timeout=60)
                assert error is None, error
                assert result.get_response().id == str(number)
                assert result.get_response().parameters["triton_final_response"].bool_param
                check(model, inputs, result.as_numpy)
            print("stream", model)
        client.async_stream_infer("nosuch", given)
        result, error = answers.get(timeout=60)
        assert result is None
        assert "nosuch" in error.message()
        client.async_stream_infer(model, given)  # the stream goes on
        assert answers.get(timeout=60)[1] is None
        repeat(client, answers)
        client.stop_stream()


def repeated(values: list[int], delay_ms: int = 0) -> list[Any]:
    """Return inputs of the worker that answers once for each value."""
    count = len(values)
    inputs = {
        "IN": np.array(values, np.int32),
        "DELAY": np.full(count, delay_ms, np.uint32),
        "WAIT": np.zeros(1, np.uint32),
    }
    return wire_inputs(inputs, {"IN": "INT32", "DELAY": "UINT32", "WAIT": "UINT32"})


def repeat(client: Any, answers: queue.Queue[Any]) -> None:
    """Check many answers to one request, concurrent requests, and streams with and without an end
    marker."""
    client.async_stream_infer(
        "repeat_int32", repeated([4, 2, 0, 1], 20), request_id="a", enable_empty_final_response=True
    )
    client.async_stream_infer("repeat_int32", repeated([7], 0), request_id="b")
    got: dict[str, list[Any]] = {"a": [], "b": []}
    while len(got["a"]) < 5 or not got["b"]:
        result, error = answers.get(timeout=60)
        assert error is None, error
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        value = result.as_numpy("OUT")
        got[response.id].append((None if value is None else int(value[0]), final))
    assert got == {
        "a": [(4, False), (2, False), (0, False), (1, False), (None, True)],
        "b": [(7, False)],
    }
    print("stream repeat_int32")


async def run_aio(url: str) -> None:
    async with aio.InferenceServerClient(url) as client:
        assert await client.is_server_ready()
        for model, (inputs, datatypes) in problems().items():
            assert (await client.get_model_config(model)).config.name == model
            for compression in COMPRESSIONS:
                result = await client.infer(
                    model, wire_inputs(inputs, datatypes), compression_algorithm=compression
                )
                check(model, inputs, result.as_numpy)

            async def requests(
                model: str = model, inputs: Any = inputs, datatypes: Any = datatypes
            ) -> AsyncIterator[dict[str, Any]]:
                for _ in range(3):
                    yield {"model_name": model, "inputs": wire_inputs(inputs, datatypes)}

            count = 0
            async for result, error in client.stream_infer(requests()):
                assert error is None, error
                check(model, inputs, result.as_numpy)
                count += 1
            assert count == 3
            print("aio", model)
        await repeat_aio(client)


async def repeat_aio(client: Any) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "repeat_int32", "inputs": repeated([5, 6, 7])}

    stream = client.stream_infer(requests())
    got = [int(result.as_numpy("OUT")[0]) async for result, error in stream]
    assert got == [5, 6, 7]

    async def endless() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "repeat_int32", "inputs": repeated(list(range(1000)), 10)}

    stream = client.stream_infer(endless())
    async for _, error in stream:
        assert error is None
        break
    stream.cancel()
    print("aio repeat_int32")


if __name__ == "__main__":
    run_sync(sys.argv[1])
    run_stream(sys.argv[1])
    asyncio.run(run_aio(sys.argv[1]))
