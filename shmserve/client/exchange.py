"""One attempt at a request: where its tensors lie, its document, its result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from shmserve.client import tensors
from shmserve.client.failures import InferenceError
from shmserve.client.http import Reply
from shmserve.client.memory import Block, Memory
from shmserve.client.result import Result
from shmserve.client.tensors import Tensor

Array = np.ndarray[Any, Any]
HEADER_LENGTH = "Inference-Header-Content-Length"
_ALIGNMENT = 64  # what vector instructions like best


class Exchange:
    """Holds leases on the blocks of a request until `close`. `shared`: it uses any."""

    def __init__(
        self,
        memory: Memory | None,
        inputs: Sequence[Tensor],
        outputs: Mapping[str, int | None],
    ) -> None:
        """`outputs`: names, with the bytes that fit into shared memory; None: over HTTP."""
        self._memory = memory
        self._held: list[Block] = []
        self._windows: dict[str, tuple[Block, int]] = {}
        self._places: dict[str, tuple[Block, int]] = {}
        self._inputs = inputs
        self._outputs = outputs
        if memory is not None:
            try:
                self._place_inputs(memory)
                self._place_outputs(memory)
            except BaseException:
                self.close()
                raise
        self.shared = bool(self._places or self._windows)

    def _place_inputs(self, memory: Memory) -> None:
        """Those in shared memory stay where they are; the others are copied into one block."""
        elsewhere = []
        for tensor in self._inputs:
            found = memory.find(tensor.array) if tensor.payload is None else None
            if found is not None:
                self._places[tensor.name] = found
            elif tensor.nbytes:
                elsewhere.append(tensor)
        block = memory.acquire(sum(map(_aligned, elsewhere))) if elsewhere else None
        if block is None:
            return
        self._held.append(block)
        offset = 0
        for tensor in elsewhere:
            tensor.write(block.window(offset, tensor.nbytes))
            self._places[tensor.name] = block, offset
            offset += _aligned(tensor)

    def _place_outputs(self, memory: Memory) -> None:
        """A block each: one that the caller keeps must not keep the others."""
        for name, nbytes in self._outputs.items():
            block = memory.acquire(nbytes) if nbytes else None
            if block is not None and nbytes:
                self._held.append(block)
                self._windows[name] = block, nbytes

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
                "parameters": _window(window[0], 0, window[1])
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
            arrays[name] = array if array.flags.aligned else array.copy()
        receipt = reply.headers.get("shmserve-receipt")
        return Result(arrays, document, msgspec.json.decode(receipt) if receipt else None)

    def _elsewhere(self, output: dict[str, Any], name: str, shape: tuple[int, ...]) -> Array:
        """The bytes of an output that is not in the body: in its window, or there are none."""
        window = self._windows.get(name)
        nbytes = tensors.nbytes_of(output["datatype"], shape)
        if window is None or self._memory is None or "data" in output:
            if output.get("data"):
                raise ValueError(f"output '{name}' has data in JSON")
            return np.empty(0, np.uint8)
        if nbytes is None or nbytes > window[1]:
            raise ValueError(f"output '{name}' is larger than its memory")
        if not nbytes:
            return np.empty(0, np.uint8)
        return self._memory.array(window[0], 0, nbytes)

    # ---------------------------------------------------------------------- life

    def taint(self) -> None:
        """Nobody knows whether the server is done with these blocks."""
        if self._memory is not None:
            self._memory.taint(self._held)
            self._memory.taint(block for block, _ in self._places.values())

    def close(self) -> None:
        """End the leases of the request; results have their own."""
        held, self._held = self._held, []
        if self._memory is not None:
            for block in held:
                self._memory.release(block)


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _window(block: Block, offset: int, nbytes: int) -> dict[str, Any]:
    return {
        "shared_memory_region": block.name,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": nbytes,
    }


def error_text(reply: Reply) -> str:
    """What an error response says."""
    try:
        document = msgspec.json.decode(reply.body.data)
        return str(document["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"the server answered with status {reply.status}"


def signature(inputs: Iterable[Tensor]) -> tuple[Any, ...]:
    """What the sizes of a model's outputs usually depend on."""
    return tuple(sorted(tensor.signature for tensor in inputs))
