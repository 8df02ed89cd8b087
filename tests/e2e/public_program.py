"""Calls of tritonclient programs that were written for another server, with all of its clients.

Arguments: the HTTP and the gRPC address. Runs in a separate process. Prints one line per check.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
import tritonclient.utils.shared_memory as shm
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

LEFT, RIGHT = np.arange(16, dtype=np.int32), np.ones(16, np.int32)
# A client that wants another batch size, and leaves the rest to the model
OVERRIDE = '{"max_batch_size":"16"}'


async def value_of(result: Any) -> Any:
    """Return the result of a client's method, which may be a coroutine."""
    return await result if inspect.isawaitable(result) else result


def told(answer: Any, name: str) -> Any:
    """Return a field of an answer: a dict from HTTP clients, a message from gRPC clients."""
    return answer[name] if isinstance(answer, dict) else getattr(answer, name)


async def refused(result: Any) -> InferenceServerException:
    try:
        await value_of(result() if callable(result) else result)
    except InferenceServerException as ex:
        return ex
    raise AssertionError("it was not refused")


async def metadata(client: Any) -> None:
    assert await value_of(client.is_server_live())
    assert await value_of(client.is_server_ready())
    assert await value_of(client.is_model_ready("simple"))
    assert told(await value_of(client.get_server_metadata()), "name") == "triton"
    assert told(await value_of(client.get_model_metadata("simple")), "name") == "simple"
    error = await refused(lambda: client.get_model_metadata("wrong_model_name"))
    assert "Request for unknown model" in error.message(), error


def bytes_of(array: np.ndarray) -> np.ndarray:
    return np.array([str(number).encode() for number in array], np.object_)


async def regions(client: Any, module: Any, model: str) -> None:
    """Four regions: both inputs, both outputs."""
    strings = model == "simple_string"
    arrays = {"INPUT0": LEFT, "INPUT1": RIGHT, "OUTPUT0": LEFT + RIGHT, "OUTPUT1": LEFT - RIGHT}
    if strings:
        arrays = {name: bytes_of(array) for name, array in arrays.items()}
    parts: dict[str, Any] = {
        name: serialize_byte_tensor(array) if strings else array for name, array in arrays.items()
    }
    sizes = {name: len(part.item()) if strings else part.nbytes for name, part in parts.items()}
    await value_of(client.unregister_system_shared_memory())
    await value_of(client.unregister_cuda_shared_memory())
    handles = {}
    try:
        for name, size in sizes.items():
            key = f"/shmserve_public_{name}"
            handles[name] = shm.create_shared_memory_region(name, key, size)
            await value_of(client.register_system_shared_memory(name, key, size))
        for name in ("INPUT0", "INPUT1"):
            shm.set_shared_memory_region(handles[name], [parts[name]])
        await through_regions(client, module, model, sizes)
        for name in ("OUTPUT0", "OUTPUT1"):
            dtype = np.object_ if strings else np.int32
            got = shm.get_contents_as_numpy(handles[name], dtype, [1, 16])
            assert got[0].tolist() == arrays[name].tolist(), (model, name, got)
        status = await value_of(client.get_system_shared_memory_status())
        assert len(status if isinstance(status, list) else status.regions) == 4
        await value_of(client.unregister_system_shared_memory())
    finally:
        for handle in handles.values():
            shm.destroy_shared_memory_region(handle)
    assert shm.mapped_shared_memory_regions() == []


async def through_regions(client: Any, module: Any, model: str, sizes: dict[str, int]) -> None:
    datatype = "BYTES" if model == "simple_string" else "INT32"
    inputs = [module.InferInput(name, [1, 16], datatype) for name in ("INPUT0", "INPUT1")]
    outputs = [module.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
    for tensor in inputs + outputs:
        tensor.set_shared_memory(tensor.name(), sizes[tensor.name()])
    result = await value_of(client.infer(model, inputs, outputs=outputs))
    for name in ("OUTPUT0", "OUTPUT1"):
        assert list(told(result.get_output(name), "shape")) == [1, 16]
        assert told(result.get_output(name), "datatype") == datatype


async def plainly(client: Any, module: Any) -> None:
    """Send objects as tensors in the request; strings with NULs, in binary and as JSON."""
    values = np.array([[b"he\0llo", b"\0\1\2\3", "ü".encode()] * 5], np.object_)
    for binary in (True, False):
        given = module.InferInput("INPUT0", list(values.shape), "BYTES")
        wanted = module.InferRequestedOutput("OUTPUT0")
        if "http" in module.__name__:
            given.set_data_from_numpy(values, binary_data=binary)
            wanted = module.InferRequestedOutput("OUTPUT0", binary_data=binary)
        else:
            given.set_data_from_numpy(values)
        result = await value_of(client.infer("simple_identity", [given], outputs=[wanted]))
        got = result.as_numpy("OUTPUT0").flatten().tolist()
        assert [item.encode() if isinstance(item, str) else item for item in got] == values[
            0
        ].tolist()


async def control(client: Any) -> None:
    index = await value_of(client.get_model_repository_index())
    assert len(index if isinstance(index, list) else index.models) == 4
    await value_of(client.load_model("simple"))
    error = await refused(lambda: client.load_model("simple", config='"parameters": {}'))
    assert "failed to load" in error.message(), error
    await value_of(client.load_model("simple", config=OVERRIDE))
    assert await batch_size(client) == 16
    await value_of(client.unload_model("simple"))
    assert not await value_of(client.is_model_ready("simple"))
    await value_of(client.load_model("simple"))
    assert await batch_size(client) == 8
    error = await refused(lambda: client.load_model("wrong_model_name"))
    assert "failed to load" in error.message(), error


async def batch_size(client: Any) -> int:
    config = await value_of(client.get_model_config("simple"))
    return int(
        config["max_batch_size"] if isinstance(config, dict) else config.config.max_batch_size
    )


async def drive(module: Any, address: str) -> None:
    client = module.InferenceServerClient(address)
    try:
        await metadata(client)
        for model in ("simple", "simple_string"):
            await regions(client, module, model)
        await plainly(client, module)
        await control(client)
    finally:
        await value_of(client.close())
    print(module.__name__)


def explicit_contents(address: str) -> None:
    """Check typed contents through the stubs, and two mistakes that examples make on purpose."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for model, datatype, dtype in (("simple", "INT32", "<i4"), ("simple_int8", "INT8", "i1")):
            request = service_pb2.ModelInferRequest(model_name=model)
            for name, array in (("INPUT0", LEFT), ("INPUT1", RIGHT)):
                tensor = request.inputs.add(name=name, datatype=datatype, shape=[1, 16])
                tensor.contents.int_contents.extend(array.tolist())
            raw = stub.ModelInfer(request).raw_output_contents
            assert np.frombuffer(raw[0], dtype).tolist() == (LEFT + RIGHT).tolist()
            request.model_version = "wrong_specification"
            wanted = "failed to get model version from specified version string"
            assert f"{wanted} 'wrong_specification'" in failure(stub, request)
            request.model_version = ""
            request.raw_input_contents.append(LEFT[:8].tobytes())
            wanted = "contents field must not be specified when using raw_input_contents for"
            assert f"{wanted} 'INPUT0' for model '{model}'" in failure(stub, request)
    print("contents")


def failure(stub: Any, request: Any) -> str:
    try:
        stub.ModelInfer(request)
    except grpc.RpcError as ex:
        return str(ex.details())
    return "nothing"


async def main(http_address: str, grpc_address: str) -> None:
    for module in (tritonclient.http, tritonclient.http.aio):
        await drive(module, http_address)
    for module in (tritonclient.grpc, tritonclient.grpc.aio):
        await drive(module, grpc_address)
    explicit_contents(grpc_address)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
