"""Client program with tensors in device memory, for the fake or real CUDA.

    exporter.py ADDRESS MODEL [--grpc] [--expect RULE] [--rounds N] [--hold] ...

Exports memory, registers it through tritonclient, infers with all inputs and outputs in regions,
checks the values, unregisters, and prints one line of JSON:

    {"rounds": N, "receipt": the last shmserve-receipt, "copied_bytes": sums over all rounds,
     "free_bytes": [device memory before, after]}

With --hold it registers and infers N times (0 is allowed), prints {"regions": {name: bytes},
"receipt": ...}, and unregisters when its standard input ends, unless it is killed before.
(tritonclient's own module for CUDA memory needs cuda-python and a driver.)
"""

import argparse
import base64
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np
import tritonclient.grpc
import tritonclient.http

RECEIPT = "shmserve-receipt"
DTYPES = {"FP32": np.float32, "INT32": np.int32}
RULES: dict[str, Callable[..., list[np.ndarray[Any, Any]]]] = {
    "add_sub": lambda a, b: [a + b, a - b],
    "plus_one": lambda a: [a + a.dtype.type(1)],
    "identity": lambda *inputs: list(inputs),
}
runtime = cupy.cuda.runtime


class Region:
    """Device memory, registered under a name."""

    def __init__(self, client: Any, name: str, nbytes: int, device: int) -> None:
        """`nbytes` of the current device, which the server is told is `device`."""
        self.client, self.name, self.nbytes = client, name, nbytes
        self.address = runtime.malloc(nbytes)
        handle = base64.b64encode(bytes(runtime.ipcGetMemHandle(self.address)))
        client.register_cuda_shared_memory(name, handle, device, nbytes)

    def put(self, array: np.ndarray[Any, Any]) -> None:
        source = np.ascontiguousarray(array)
        runtime.memcpy(self.address, source.ctypes.data, self.nbytes, runtime.memcpyHostToDevice)
        runtime.deviceSynchronize()

    def get(self, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        target = np.empty_like(like)
        runtime.memcpy(target.ctypes.data, self.address, self.nbytes, runtime.memcpyDeviceToHost)
        return target

    def close(self) -> None:
        self.client.unregister_cuda_shared_memory(self.name)
        runtime.free(self.address)


class Program:
    """Requests to a model with all tensors in regions."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.protocol = tritonclient.grpc if options.grpc else tritonclient.http
        self.client = self.protocol.InferenceServerClient(options.address)
        self.receipts: list[dict[str, Any]] = []
        (_listen_grpc if options.grpc else _listen_http)(self.client, self.receipts)
        told = self.client.get_model_metadata(
            options.model, **({"as_json": True} if options.grpc else {})
        )
        self.inputs, self.outputs = told["inputs"], told["outputs"]

    def values(self, seed: int) -> list[np.ndarray[Any, Any]]:
        """Return inputs. Variable dimensions have length --elements."""
        made = []
        for number, tensor in enumerate(self.inputs):
            shape = [int(dim) for dim in tensor["shape"]]
            shape = [self.options.elements if dim < 0 else dim for dim in shape]
            count = np.arange(np.prod(shape)) % 1000 + 7 * number + seed
            made.append(count.astype(DTYPES[tensor["datatype"]]).reshape(shape))
        return made

    @contextlib.contextmanager
    def registered(self, inputs: list[np.ndarray[Any, Any]]) -> Iterator[dict[str, Region]]:
        """A region for each tensor; the outputs of every rule are as large as an input."""
        sizes = {
            tensor["name"]: array.nbytes for tensor, array in zip(self.inputs, inputs, strict=True)
        }
        sizes |= {tensor["name"]: inputs[0].nbytes for tensor in self.outputs}
        prefix, device = self.options.prefix, self.options.device
        with contextlib.ExitStack() as stack:
            regions = {}
            for name, nbytes in sizes.items():
                regions[name] = Region(self.client, prefix + name, nbytes, device)
                stack.callback(regions[name].close)
            yield regions

    def infer(self, inputs: list[np.ndarray[Any, Any]], regions: dict[str, Region]) -> None:
        given, wanted = [], []
        for tensor, array in zip(self.inputs, inputs, strict=True):
            region = regions[tensor["name"]]
            region.put(array)
            given.append(
                self.protocol.InferInput(tensor["name"], list(array.shape), tensor["datatype"])
            )
            given[-1].set_shared_memory(region.name, region.nbytes)
        expected = RULES[self.options.expect](*inputs)
        for tensor, array in zip(self.outputs, expected, strict=True):
            region = regions[tensor["name"]]
            region.put(np.full_like(array, -1))
            wanted.append(self.protocol.InferRequestedOutput(tensor["name"]))
            wanted[-1].set_shared_memory(region.name, region.nbytes)
        self.client.infer(self.options.model, given, outputs=wanted, headers={RECEIPT: "1"})
        for tensor, array in zip(self.outputs, expected, strict=True):
            np.testing.assert_array_equal(regions[tensor["name"]].get(array), array)

    def run(self) -> dict[str, Any]:
        """Rounds of registering, inferring and unregistering."""
        free = [runtime.memGetInfo()[0]]
        for seed in range(self.options.rounds):
            inputs = self.values(seed)
            with self.registered(inputs) as regions:
                self.infer(inputs, regions)
        free.append(runtime.memGetInfo()[0])
        copied: Counter[str] = Counter()
        for receipt in self.receipts:
            copied.update(receipt["copied_bytes"])
        return {
            "rounds": self.options.rounds,
            "receipt": self.receipts[-1],
            "copied_bytes": copied,
            "free_bytes": free,
        }

    def hold(self) -> None:
        inputs = self.values(0)
        with self.registered(inputs) as regions:
            for _ in range(self.options.rounds):
                self.infer(inputs, regions)
            sizes = {region.name: region.nbytes for region in regions.values()}
            receipt = self.receipts[-1] if self.receipts else None
            print(json.dumps({"regions": sizes, "receipt": receipt}), flush=True)
            sys.stdin.read()


def _listen_http(client: Any, receipts: list[dict[str, Any]]) -> None:
    post = client._client_stub.post

    def heard(*args: Any, **named: Any) -> Any:
        answer = post(*args, **named)
        if answer.get(RECEIPT):
            receipts.append(json.loads(answer.get(RECEIPT)))
        return answer

    client._client_stub.post = heard


def _listen_grpc(client: Any, receipts: list[dict[str, Any]]) -> None:
    infer = client._client_stub.ModelInfer

    def heard(**named: Any) -> Any:
        answer, call = infer.with_call(**named)
        receipts.append(json.loads(dict(call.trailing_metadata())[RECEIPT]))
        return answer

    client._client_stub.ModelInfer = heard


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address", help="host:port")
    parser.add_argument("model")
    parser.add_argument("--grpc", action="store_true")
    parser.add_argument("--expect", choices=RULES, default="add_sub")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--elements", type=int, default=1024)
    parser.add_argument("--prefix", default="", help="of the regions' names")
    options = parser.parse_args()
    runtime.setDevice(options.device)
    program = Program(options)
    if options.hold:
        program.hold()
    else:
        print(json.dumps(program.run()))


main()
