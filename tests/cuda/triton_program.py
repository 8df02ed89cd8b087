"""Calls with tritonclient for CUDA regions: ``triton_program.py FUNCTION http|grpc ADDRESS ...``.

Any failure is a traceback.
"""

import base64
import importlib
import sys
from typing import Any

import numpy as np
from google.protobuf import json_format
from tritonclient.utils import InferenceServerException


def refusal(call: Any, *arguments: Any) -> str:
    """Return the error text of a call that must fail."""
    try:
        call(*arguments)
    except InferenceServerException as ex:
        return str(ex)
    raise AssertionError("it was not refused")


def listed(status: Any) -> dict[str, tuple[int, int]]:
    """Return name to (device_id, byte_size), for either protocol."""
    if not isinstance(status, list):
        document = json_format.MessageToDict(status, preserving_proto_field_name=True)
        status = document.get("regions", {}).values()
    return {r["name"]: (int(r.get("device_id", 0)), int(r["byte_size"])) for r in status}


def handles(protocol: str, address: str, model: str) -> None:
    """Memory of tritonclient's own module for CUDA, which needs cuda-python and a driver."""
    cudashm = importlib.import_module("tritonclient.utils.cuda_shared_memory")
    library = importlib.import_module(f"tritonclient.{protocol}")
    client = library.InferenceServerClient(address)
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()

    values = np.arange(16, dtype=np.float32)
    size = values.nbytes
    output = cudashm.create_shared_memory_region("output_data", size, 0)
    given = cudashm.create_shared_memory_region("input_data", size, 0)
    cudashm.set_shared_memory_region(given, [values])
    for name, region in (("output_data", output), ("input_data", given)):
        client.register_cuda_shared_memory(name, cudashm.get_raw_handle(region), 0, size)
    assert len(listed(client.get_cuda_shared_memory_status())) == 2

    inputs = [library.InferInput("IN", [16], "FP32")]
    inputs[-1].set_shared_memory("input_data", size)
    outputs = [library.InferRequestedOutput("OUT")]
    outputs[-1].set_shared_memory("output_data", size)
    results = client.infer(model_name=model, inputs=inputs, outputs=outputs)

    told = results.get_output("OUT")
    assert told is not None
    shape = told["shape"] if isinstance(told, dict) else list(told.shape)
    found = cudashm.get_contents_as_numpy(output, np.float32, shape)
    np.testing.assert_array_equal(found, values + 1)

    client.unregister_cuda_shared_memory()
    assert listed(client.get_cuda_shared_memory_status()) == {}
    cudashm.destroy_shared_memory_region(given)
    cudashm.destroy_shared_memory_region(output)
    assert cudashm.allocated_shared_memory_regions() == []


def regions(protocol: str, address: str, handle: str, key: str) -> None:
    """Calls with a handle that another process made.

    `handle`: base64, of memory with 4096 bytes on device 0; `key`: of an object with 64 bytes.
    """
    nowhere = base64.b64encode(b"\7" * 64).decode()
    with importlib.import_module(f"tritonclient.{protocol}").InferenceServerClient(address) as c:
        assert "cuda_shared_memory" in str(c.get_server_metadata())
        c.unregister_system_shared_memory()
        c.unregister_cuda_shared_memory()
        assert listed(c.get_cuda_shared_memory_status()) == {}
        register = c.register_cuda_shared_memory
        register("a", handle, 0, 64)
        register("b", handle, 0, 4096)
        assert listed(c.get_cuda_shared_memory_status()) == {"a": (0, 64), "b": (0, 4096)}
        assert listed(c.get_cuda_shared_memory_status("b")) == {"b": (0, 4096)}
        for told, arguments in (
            ("already in manager", ("a", handle, 0, 64)),
            ("device_id 99, but the number of devices is", ("x", handle, 99, 64)),
            ("device_id", ("x", handle, -1, 64)),
            ("byte_size 0", ("x", handle, 0, 0)),
            (f"byte_size {1 << 39}, but the allocation has", ("x", handle, 0, 1 << 39)),
            (f"may have {1 << 40} bytes", ("x", handle, 0, 1 << 62)),
            ("raw_handle", ("x", handle[:-4], 0, 64)),
            ("is the process that exported it alive", ("x", nowhere, 0, 64)),
        ):
            text = refusal(register, *arguments)
            assert told in text, text
        text = refusal(c.get_system_shared_memory_status, "a")
        assert "registered as CUDA shared memory, not system shared memory" in text, text
        assert "Unable to find" in refusal(c.get_cuda_shared_memory_status, "x")
        assert "already in manager" in refusal(c.register_system_shared_memory, "a", key, 64)
        c.unregister_system_shared_memory("a")
        c.unregister_system_shared_memory()
        c.unregister_cuda_shared_memory("nosuch")
        c.unregister_cuda_shared_memory("a")
        assert listed(c.get_cuda_shared_memory_status()) == {"b": (0, 4096)}
        c.unregister_cuda_shared_memory()
        assert listed(c.get_cuda_shared_memory_status()) == {}


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
