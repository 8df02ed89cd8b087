"""Client with tensors in GPU memory, in shared memory, or in the requests."""

import base64
import contextlib
import json
import time

import cupy
import grpc
import numpy as np

import bench.caller
from bench.caller import RECEIPT, TIMEOUT_S
from bench.load.rpc import OPTIONS
from shmserve._generated import grpc_service_pb2 as pb
from tests.running_server import binary_request

RPC = "/inference.GRPCInferenceService/"
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


class Caller(bench.caller.Caller):
    """Client with one HTTP connection and device memory."""

    def register(self, name, memory):
        """Register device memory until `unregister` is called."""
        handle = {"b64": base64.b64encode(memory.handle).decode()}
        document = {"raw_handle": handle, "device_id": 0, "byte_size": memory.nbytes}
        self.post(f"/v2/cudasharedmemory/region/{name}/register", document)

    def unregister(self, name):
        self.post(f"/v2/cudasharedmemory/region/{name}/unregister")

    def seconds_binary(self, model, array):
        """Return the seconds of a request with tensors in the bodies; check that 1 was added."""
        body, headers = binary_request(array)
        answer = self.post(f"/v2/models/{model}/infer", body, {RECEIPT: "1", **headers})
        check(np.frombuffer(answer[-array.nbytes :], np.float32), array)
        return self.took_s


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
