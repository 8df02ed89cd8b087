"""Attempt at a request: the places of its tensors, and its encoding for HTTP or a lane."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from shmserve.client.memory import device_arrays
from shmserve.client.memory.block_pool import Block, BlockPool
from shmserve.client.result_reader import HEADER_LENGTH, TensorPlace
from shmserve.client.tensors import ClientTensor
from shmserve.protocol.control.lane_messages import (
    INLINE_BYTES,
    INLINE_TOTAL,
    LaneOutput,
    LaneRequest,
    LaneTensor,
)

PoolOf = Callable[[int | None], BlockPool | None]
Copy = tuple[ClientTensor, Any]  # a tensor, and the window that receives its bytes
_ALIGNMENT = 256  # bytes; suits GPUs and vector instructions
_numbers = itertools.count(1)  # numbers of lane requests, unique in this process


class RequestAttempt:
    """Attempt that holds leases on the blocks of a request until `close`. `windows`: place and size
    in bytes of each output that has a window. `shared`: True if the request names any of the
    client's memory. `on_gpu`: True if the request names memory of a GPU."""

    def __init__(
        self,
        pool_of: PoolOf,
        inputs: Sequence[ClientTensor],
        outputs: Mapping[str, int | None],
        device: int | None,
        inline: bool = False,
    ) -> None:
        """Reserve blocks and copy inputs there; the copies are complete on return.

        Args:
            pool_of: function that returns the pool of a GPU or, for None, of the host. A pool of
                None must not be used.
            outputs: window size in bytes by output name; None: the output comes in the response.
            device: ordinal of the GPU whose memory receives results; None: the host.
            inline: send small inputs inside the request, unless already in shared memory.
        """
        self._inline = INLINE_BYTES if inline else 0
        self._pool_of = pool_of
        self._device = device
        self._held: list[tuple[BlockPool, Block]] = []
        self._places: dict[str, TensorPlace] = {}  # of inputs
        self.windows: dict[str, tuple[TensorPlace, int]] = {}  # of outputs, with sizes in bytes
        self._inputs = inputs
        self._outputs = outputs
        self._gpus = {tensor.device for tensor in inputs if tensor.device is not None}
        self.on_gpu = False
        try:
            copies = self._place_inputs()
            if any(outputs.values()):
                self._place_outputs()
            if copies or self._gpus:
                self._fill(copies)
        except BaseException:
            self.close()
            raise
        self.shared = bool(self._places or self.windows)

    def _place_inputs(self) -> list[Copy]:
        """Find or reserve a place for each input, and return the copies to make. Inputs already in
        shared memory stay in place. All other inputs of a device share one new block. Inputs of
        a GPU without room go to the host's block."""
        elsewhere: dict[int | None, list[ClientTensor]] = {}
        for tensor in self._inputs:
            # an array with memory of its own lies in no pool
            may_lie_there = tensor.device is not None or tensor.array.base is not None
            sought = may_lie_there and tensor.payload is None
            pool = self._pool_of(tensor.device) if sought else None
            location = pool.find(tensor.array) if pool is not None else None
            if pool is not None and location is not None:
                self._places[tensor.name] = TensorPlace(pool, *location)
                self.on_gpu |= tensor.device is not None
            elif tensor.nbytes and (tensor.device is not None or tensor.nbytes >= self._inline):
                elsewhere.setdefault(tensor.device, []).append(tensor)
        if not elsewhere:
            return []
        on_host = elsewhere.pop(None, [])
        copies = []
        for device, tensors_there in elsewhere.items():
            windows = self._reserve(device, tensors_there)
            copies += windows
            on_host += [] if windows else tensors_there
        return copies + self._reserve(None, on_host)

    def _reserve(self, device: int | None, tensors: list[ClientTensor]) -> list[Copy]:
        """Reserve windows for all tensors in one block. Return no windows without room."""
        pool = self._pool_of(device) if tensors else None
        block = pool.acquire(sum(map(_aligned, tensors))) if pool is not None else None
        if pool is None or block is None:
            return []
        self._held.append((pool, block))
        self.on_gpu |= device is not None
        windows, offset = [], 0
        for tensor in tensors:
            self._places[tensor.name] = TensorPlace(pool, block, offset)
            windows.append((tensor, block.window(offset, tensor.nbytes)[0]))
            offset += _aligned(tensor)
        return windows

    def _place_outputs(self) -> None:
        """Reserve a block for each output: a kept output holds no block of other outputs."""
        devices = (None,) if self._device is None else (self._device, None)
        for name, nbytes in self._outputs.items():
            for device in devices if nbytes else ():
                pool = self._pool_of(device)
                block = pool.acquire(nbytes) if pool is not None and nbytes else None
                if pool is None or block is None or not nbytes:
                    continue
                self._held.append((pool, block))
                self.windows[name] = TensorPlace(pool, block, 0), nbytes
                if device is not None:
                    self.on_gpu = True
                    self._gpus.add(device)
                break

    def _fill(self, copies: list[Copy]) -> None:
        """Copy inputs to their windows. Earlier work on the GPUs ends first: kernels may still be
        producing the inputs, or using the blocks for a previous request."""
        self._await_gpus()
        for tensor, window in copies:
            tensor.write(window)
        if any(not isinstance(window, np.ndarray) for _, window in copies):
            self._await_gpus()

    def _await_gpus(self) -> None:
        for device in self._gpus:
            device_arrays.synchronize(device)

    def outside(self) -> str | None:
        """Return the name of the first input of `INLINE_BYTES` or more outside shared memory, or
        None."""
        for tensor in self._inputs:
            if tensor.name not in self._places and tensor.nbytes >= INLINE_BYTES:
                return tensor.name
        return None

    # ------------------------------------------------------------------- request

    def request(
        self, parameters: Mapping[str, Any] | None, request_id: str
    ) -> tuple[dict[str, str], list[bytes | memoryview]]:
        body: list[bytes | memoryview] = []
        described = []
        for tensor in self._inputs:
            place = self._places.get(tensor.name)
            if place is None:
                where: dict[str, Any] = {"binary_data_size": tensor.nbytes}
                body.append(tensor.data())
            else:
                where = place.window(tensor.nbytes)
            described.append(
                {
                    "name": tensor.name,
                    "datatype": tensor.datatype,
                    "shape": tensor.shape,
                    "parameters": where,
                }
            )
        outputs = [
            {"name": name, "parameters": place.window(nbytes) if place else {"binary_data": True}}
            for name in self._outputs
            for place, nbytes in [self.windows.get(name, (None, 0))]
        ]
        document: dict[str, Any] = {"inputs": described, "outputs": outputs}
        if request_id:
            document["id"] = request_id
        if parameters:
            document["parameters"] = dict(parameters)
        head = msgspec.json.encode(document)
        return {HEADER_LENGTH: str(len(head))} if body else {}, [head, *body]

    def lane_request(
        self, parameters: Mapping[str, Any] | None, request_id: str, stream: bool = False
    ) -> LaneRequest | None:
        """Return the request for a lane. Return None if a tensor is too large for the lane's
        messages and has no place in shared memory.

        A `stream` gets credit for as many answers as fit into the lane's socket, so a slow reader
        does not block the executor.
        """
        inputs = []
        for tensor in self._inputs:
            place = self._places.get(tensor.name)
            if place is None and tensor.nbytes >= INLINE_BYTES:
                return None
            at = tensor.tobytes() if place is None else place.on_lane(tensor.nbytes)
            inputs.append(LaneTensor(tensor.name, tensor.datatype, tensor.shape, at))
        outputs = _in_message(tuple(self._outputs))
        if any(self._outputs.values()):
            windows = {n: place.on_lane(nbytes) for n, (place, nbytes) in self.windows.items()}
            if any(nbytes and name not in windows for name, nbytes in self._outputs.items()):
                return None
            outputs = tuple([LaneOutput(name, windows.get(name)) for name in self._outputs])
        credit = 0
        if stream:
            most = INLINE_TOTAL // (INLINE_BYTES * max(1, len(outputs)))
            credit = 1 if self.windows else max(1, most)
        return LaneRequest(
            next(_numbers),
            tuple(inputs),
            outputs,
            request_id,
            dict(parameters) if parameters else {},
            credit=credit,
        )

    # ---------------------------------------------------------------------- life

    def is_blamed(self, reason: str) -> bool:
        """Return True if `reason` says that the server refused memory named in the request."""
        return (self.shared and "shared memory" in reason) or (self.on_gpu and "CUDA" in reason)

    def taint(self) -> None:
        """Mark all blocks of the request as perhaps still in use by the server."""
        for pool, block in self._held:
            pool.taint([block])
        for place in self._places.values():
            place.pool.taint([place.block])

    def close(self) -> None:
        """End the request's leases; arrays of results have leases of their own."""
        leases, self._held = self._held, []
        for pool, block in leases:
            pool.release(block)


@lru_cache(maxsize=256)
def _in_message(names: tuple[str, ...]) -> tuple[LaneOutput, ...]:
    """Return outputs that come in the lane's answer."""
    return tuple([LaneOutput(name) for name in names])


def _aligned(tensor: ClientTensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
