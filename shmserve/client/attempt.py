"""One attempt at a request: where its tensors lie, its document, its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shmserve.client import device_arrays as gpu
from shmserve.client import tensors
from shmserve.client.errors import InferenceError
from shmserve.client.http_transport import Reply
from shmserve.client.memory.block_pool import Block, Memory
from shmserve.client.result import Result
from shmserve.client.tensors import Tensor

Array = np.ndarray[Any, Any]
MemoryOf = Callable[[int | None], Memory | None]
HEADER_LENGTH = "Inference-Header-Content-Length"
_ALIGNMENT = 256  # what GPUs and vector instructions like best


class _Window(NamedTuple):
    """Where an output is to go."""

    memory: Memory
    block: Block
    nbytes: int


class Exchange:
    """Holds leases on the blocks of a request until `close`.

    Attributes:
        shared: the server is told of any of our memory.
        on_gpu: of a GPU's.
    """

    def __init__(
        self,
        memory_of: MemoryOf,
        inputs: Sequence[Tensor],
        outputs: Mapping[str, int | None],
        device: int | None,
    ) -> None:
        """Everything that goes into memory is there when this returns.

        Args:
            memory_of: that of a GPU or, None, of the host; None: it is not to be used.
            outputs: names, with the bytes that fit into memory; None: over HTTP.
            device: the GPU whose memory results shall be in; None: the host's.
        """
        self._memory_of = memory_of
        self._device = device
        self._held: list[tuple[Memory, Block]] = []
        self._windows: dict[str, _Window] = {}
        self._places: dict[str, tuple[Block, int]] = {}
        self._inputs = inputs
        self._outputs = outputs
        self._gpus = {tensor.device for tensor in inputs if tensor.device is not None}
        self.on_gpu = False
        try:
            copies = self._place_inputs()
            self._place_outputs()
            self._fill(copies)
        except BaseException:
            self.close()
            raise
        self.shared = bool(self._places or self._windows)

    def _place_inputs(self) -> list[tuple[Tensor, Any]]:
        """Those in memory that the server knows stay where they are; for the others there is
        one block each on the host and on each GPU. Which are to be copied, and where to."""
        elsewhere: dict[int | None, list[Tensor]] = {}
        for tensor in self._inputs:
            memory = self._memory_of(tensor.device) if tensor.payload is None else None
            found = memory.find(tensor.array) if memory is not None else None
            if found is not None:
                self._places[tensor.name] = found
                self.on_gpu |= tensor.device is not None
            elif tensor.nbytes:
                elsewhere.setdefault(tensor.device, []).append(tensor)
        on_host = elsewhere.pop(None, [])
        copies = []
        for device, some in elsewhere.items():
            windows = self._reserved(device, some)
            copies += windows
            on_host += [] if windows else some
        return copies + self._reserved(None, on_host)

    def _reserved(self, device: int | None, tensors: list[Tensor]) -> list[tuple[Tensor, Any]]:
        """Windows for all of these in one block; none at all if there is no room."""
        memory = self._memory_of(device) if tensors else None
        block = memory.acquire(sum(map(_aligned, tensors))) if memory is not None else None
        if memory is None or block is None:
            return []
        self._held.append((memory, block))
        self.on_gpu |= device is not None
        windows, offset = [], 0
        for tensor in tensors:
            self._places[tensor.name] = block, offset
            windows.append((tensor, block.window(offset, tensor.nbytes)[0]))
            offset += _aligned(tensor)
        return windows

    def _place_outputs(self) -> None:
        """A block each: one that the caller keeps must not keep the others."""
        for name, nbytes in self._outputs.items():
            for device in dict.fromkeys((self._device, None)):
                memory = self._memory_of(device) if nbytes else None
                block = memory.acquire(nbytes) if memory is not None and nbytes else None
                if memory is None or block is None or not nbytes:
                    continue
                self._held.append((memory, block))
                self._windows[name] = _Window(memory, block, nbytes)
                if device is not None:
                    self.on_gpu = True
                    self._gpus.add(device)
                break

    def _fill(self, copies: list[tuple[Tensor, Any]]) -> None:
        """Copy. What was begun on a GPU ends first: the arrays may only be about to be made,
        and an earlier user's kernels may still be at work on our blocks."""
        self._await_gpus()
        for tensor, window in copies:
            tensor.write(window)
        if any(not isinstance(window, np.ndarray) for _, window in copies):
            self._await_gpus()

    def _await_gpus(self) -> None:
        for device in self._gpus:
            gpu.synchronize(device)

    # ------------------------------------------------------------------- request

    def request(
        self, parameters: Mapping[str, Any] | None, request_id: str
    ) -> tuple[dict[str, str], list[bytes | memoryview]]:
        """Headers and body."""
        body: list[bytes | memoryview] = []
        described = []
        for tensor in self._inputs:
            place = self._places.get(tensor.name)
            if place is None:
                where: dict[str, Any] = {"binary_data_size": tensor.nbytes}
                body.append(tensor.data())
            else:
                where = _window(*place, tensor.nbytes)
            described.append(
                {
                    "name": tensor.name,
                    "datatype": tensor.datatype,
                    "shape": tensor.shape,
                    "parameters": where,
                }
            )
        wanted = [
            {
                "name": name,
                "parameters": _window(window.block, 0, window.nbytes)
                if (window := self._windows.get(name))
                else {"binary_data": True},
            }
            for name in self._outputs
        ]
        document: dict[str, Any] = {"inputs": described, "outputs": wanted}
        if request_id:
            document["id"] = request_id
        if parameters:
            document["parameters"] = dict(parameters)
        head = msgspec.json.encode(document)
        return {HEADER_LENGTH: str(len(head))} if body else {}, [head, *body]

    # -------------------------------------------------------------------- result

    def result(self, reply: Reply, model: str) -> Result:
        """The arrays of a response, each where it lies.

        Raises:
            InferenceError: the response makes no sense.
        """
        try:
            return self._result(reply, model)
        except (ValueError, KeyError, TypeError, msgspec.DecodeError) as ex:
            raise InferenceError(0, f"the server's response is malformed: {ex}") from ex

    def _result(self, reply: Reply, model: str) -> Result:
        length = int(reply.headers.get(HEADER_LENGTH.lower(), len(reply.body)))
        document = msgspec.json.decode(reply.body[:length].data)
        arrays = {}
        position = length
        for output in document["outputs"]:
            name, shape = output["name"], tuple(output["shape"])
            size = (output.get("parameters") or {}).get("binary_data_size")
            if size is not None:
                data = reply.body[position : position + size]
                position += size
            else:
                data = self._elsewhere(output, name, shape)
            array = tensors.from_bytes(data, output["datatype"], shape, name, model)
            arrays[name] = self._arrived(array)
        receipt = reply.headers.get("shmserve-receipt")
        return Result(arrays, document, msgspec.json.decode(receipt) if receipt else None)

    def _arrived(self, array: Any) -> Any:
        """On the device that was asked for; numpy's arrays aligned."""
        if not isinstance(array, np.ndarray):
            return array
        array = array if array.flags.aligned else array.copy()
        if self._device is None or array.dtype.hasobject:
            return array
        return gpu.to_device(array, self._device)

    def _elsewhere(self, output: dict[str, Any], name: str, shape: tuple[int, ...]) -> Any:
        """The bytes of an output that is not in the body: in its window, or there are none."""
        window = self._windows.get(name)
        nbytes = tensors.nbytes_of(output["datatype"], shape)
        if window is None or "data" in output:
            if output.get("data"):
                raise ValueError(f"output '{name}' has data in JSON")
            return np.empty(0, np.uint8)
        if nbytes is None or nbytes > window.nbytes:
            raise ValueError(f"output '{name}' is larger than its memory")
        if not nbytes:
            return np.empty(0, np.uint8)
        return window.memory.array(window.block, 0, nbytes)

    # ---------------------------------------------------------------------- life

    def is_blamed(self, reason: str) -> bool:
        """Whether a request was refused for the memory we named in it."""
        return (self.shared and "shared memory" in reason) or (self.on_gpu and "CUDA" in reason)

    def taint(self) -> None:
        """Nobody knows whether the server is done with these blocks."""
        for block in [block for _, block in self._held] + [b for b, _ in self._places.values()]:
            block.tainted = True

    def close(self) -> None:
        """End the leases of the request; results have their own."""
        held, self._held = self._held, []
        for memory, block in held:
            memory.release(block)


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _window(block: Block, offset: int, nbytes: int) -> dict[str, Any]:
    return {
        "shared_memory_region": block.name,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": nbytes,
    }


def signature(inputs: Iterable[Tensor]) -> tuple[Any, ...]:
    """What the sizes of a model's outputs usually depend on."""
    return tuple(sorted(tensor.signature for tensor in inputs))
