"""Client with tensors in GPU memory, in shared memory, or in the requests."""

import base64
import contextlib
import http.client
import json
import mmap
import os
import time
from pathlib import Path

import cupy
import grpc
import numpy as np

from bench.load.rpc import OPTIONS
from shmserve._generated import grpc_service_pb2 as pb

RECEIPT = "shmserve-receipt"
RPC = "/inference.GRPCInferenceService/"
TIMEOUT_S = 300
runtime = cupy.cuda.runtime


class DeviceMemory:
    """An allocation that other processes can open."""

    def __init__(self, stack, nbytes):
        self.nbytes = nbytes
        self._pointer = runtime.malloc(nbytes)
        stack.callback(runtime.free, self._pointer)
        self.handle = bytes(runtime.ipcGetMemHandle(self._pointer))
        memory = cupy.cuda.UnownedMemory(self._pointer, nbytes, self)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        self.array = cupy.ndarray((nbytes // 4,), np.float32, pointer)
        self.fill(0)

    def fill(self, value):
        self.array.fill(value)
        runtime.deviceSynchronize()

    def holds(self, value):
        """Return whether every element equals `value`."""
        return float(self.array.min()) == float(self.array.max()) == value


class Caller:
    """Client with one HTTP connection."""

    def __init__(self, stack, server):
        self._connection = http.client.HTTPConnection(
            server.http_host, server.http_port, timeout=TIMEOUT_S
        )
        stack.callback(self._connection.close)
        self._stack = stack
        self.receipt = {}

    def post(self, path, document=None, headers=None):
        """Return the body of a 200; `document`: object to send as JSON, or a body in bytes."""
        body = document if isinstance(document, bytes) else json.dumps(document or {})
        self._connection.request("POST", path, body, {RECEIPT: "1", **(headers or {})})
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {data[:500].decode(errors='replace')}")
        self.receipt = json.loads(answer.getheader(RECEIPT) or "{}")
        return data

    def register(self, name, memory):
        """Register device memory until `unregister` is called."""
        handle = {"b64": base64.b64encode(memory.handle).decode()}
        document = {"raw_handle": handle, "device_id": 0, "byte_size": memory.nbytes}
        self.post(f"/v2/cudasharedmemory/region/{name}/register", document)

    def unregister(self, name):
        self.post(f"/v2/cudasharedmemory/region/{name}/unregister")

    def shared_array(self, name, nbytes):
        """Return an FP32 array that is a system region until the caller ends."""
        path = Path(f"/dev/shm/bench-gpu-{os.getpid()}-{name}")
        with path.open("xb+") as file:
            self._stack.callback(path.unlink)
            os.posix_fallocate(file.fileno(), 0, nbytes)
            mapping = mmap.mmap(file.fileno(), nbytes)
        base = f"/v2/systemsharedmemory/region/{name}"
        self.post(f"{base}/register", {"key": path.name, "byte_size": nbytes})
        self._stack.callback(self.post, f"{base}/unregister")
        return np.frombuffer(mapping, np.float32)

    def seconds(self, model, source, target, nbytes, **parameters):
        """Return the seconds of a request with tensors in regions; `target` None: the output comes
        in the answer."""
        place = {"shared_memory_byte_size": nbytes}
        tensor = {"name": "IN", "datatype": "FP32", "shape": [nbytes // 4]}
        document = {
            "inputs": [{**tensor, "parameters": {"shared_memory_region": source, **place}}],
            "parameters": parameters,
        }
        if target is not None:
            region = {"shared_memory_region": target, **place}
            document["outputs"] = [{"name": "OUT", "parameters": region}]
        begin = time.perf_counter()
        self.post(f"/v2/models/{model}/infer", document)
        return time.perf_counter() - begin

    def seconds_binary(self, model, array):
        """Return the seconds of a request with tensors in the bodies; check that 1 was added."""
        tensor = {"name": "IN", "datatype": "FP32", "shape": [len(array)]}
        tensor["parameters"] = {"binary_data_size": array.nbytes}
        head = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
        text = json.dumps(head).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        body = text + array.tobytes()
        begin = time.perf_counter()
        answer = self.post(f"/v2/models/{model}/infer", body, headers)
        elapsed = time.perf_counter() - begin
        check(np.frombuffer(answer[-array.nbytes :], np.float32), array)
        return elapsed


class GrpcCaller:
    """Client with one channel. Requests are encoded, and answers decoded, outside of the measured
    time."""

    def __init__(self, stack, server):
        self._channel = grpc.insecure_channel(server.grpc_address, OPTIONS)
        stack.callback(self._channel.close)
        self.receipt = {}

    def call(self, name, message):
        """The answer's bytes and the seconds."""
        encoded = message.SerializeToString()
        method = self._channel.unary_unary(RPC + name)
        begin = time.perf_counter()
        answer, done = method.with_call(encoded, metadata=((RECEIPT, "1"),), timeout=TIMEOUT_S)
        elapsed = time.perf_counter() - begin
        self.receipt = json.loads(dict(done.trailing_metadata()).get(RECEIPT, "{}"))
        return answer, elapsed

    def register(self, name, memory):
        """Register memory, as `Caller.register` does."""
        message = pb.CudaSharedMemoryRegisterRequest(
            name=name, raw_handle=memory.handle, device_id=0, byte_size=memory.nbytes
        )
        self.call("CudaSharedMemoryRegister", message)

    def unregister(self, name):
        self.call("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest(name=name))

    def seconds(self, model, source, target, nbytes):
        """Return the seconds of one request, as `Caller.seconds` does."""
        message = pb.ModelInferRequest(model_name=model)
        tensor = message.inputs.add(name="IN", datatype="FP32", shape=[nbytes // 4])
        for entry, region in ((tensor, source), (message.outputs.add(name="OUT"), target)):
            entry.parameters["shared_memory_region"].string_param = region
            entry.parameters["shared_memory_byte_size"].int64_param = nbytes
        return self.call("ModelInfer", message)[1]

    def seconds_binary(self, model, array):
        """Return the seconds of one request with the tensors in the messages."""
        message = pb.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()])
        message.inputs.add(name="IN", datatype="FP32", shape=[len(array)])
        answer, elapsed = self.call("ModelInfer", message)
        (raw,) = pb.ModelInferResponse.FromString(answer).raw_output_contents
        check(np.frombuffer(raw, np.float32), array)
        return elapsed


def check(result, array):
    if not np.array_equal(result, array + 1):
        raise RuntimeError("a wrong answer")


@contextlib.contextmanager
def both(server):
    """Yield a caller over HTTP and a caller over gRPC."""
    with contextlib.ExitStack() as stack:
        yield stack, {"http": Caller(stack, server), "grpc": GrpcCaller(stack, server)}
