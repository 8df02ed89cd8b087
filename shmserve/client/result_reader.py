"""Conversion of server answers to results: arrays in shared memory are used in place, not
copied."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from shmserve.client import tensors
from shmserve.client.memory import device_arrays
from shmserve.client.memory.block_pool import Block, BlockPool
from shmserve.client.result import Result
from shmserve.client.wire.http_transport import Reply
from shmserve.client.wire.inference_error import InferenceError
from shmserve.errors import InvalidArgument, UnreadableMessage
from shmserve.protocol.control.client_messages import LaneOpened
from shmserve.protocol.control.lane_messages import LaneAnswer, LaneReceipt, LaneWindow
from shmserve.protocol.decoding import json_decoder
from shmserve.tensor import bytes_codec

HEADER_LENGTH = "Inference-Header-Content-Length"
_decode = json_decoder()


class TensorPlace(NamedTuple):
    """Place of a tensor: from `offset` in a block of a pool."""

    pool: BlockPool
    block: Block
    offset: int

    def window(self, nbytes: int) -> dict[str, Any]:
        """Return the tensor parameters that name this place in an HTTP request."""
        return {
            "shared_memory_region": self.block.name,
            "shared_memory_offset": self.offset,
            "shared_memory_byte_size": nbytes,
        }

    def on_lane(self, nbytes: int) -> LaneWindow:
        """Return the field that names this place in a lane request."""
        return LaneWindow(self.block.name, self.offset, nbytes)


class ResultReader(Struct, eq=False):
    """Reader of the answers to one request. `_windows`: place and size in bytes of each output that
    has a window. `_device`: ordinal of the GPU for results; None: the host. `_again`: later answers
    overwrite the windows, so results get copies."""

    _windows: Mapping[str, tuple[TensorPlace, int]]
    _device: int | None
    _again: bool = False

    def of_lane(
        self, answer: LaneAnswer, model: str, request_id: str, opened: LaneOpened, receipt: bool
    ) -> Result:
        """Return the result of a lane's answer, with its receipt if `receipt` is set. Raise
        InferenceError if the answer is malformed."""
        arrays = {}
        try:
            for tensor in answer.outputs:
                name, datatype, shape = tensor.name, tensor.datatype, tensor.shape
                data: Any = tensor.at
                if isinstance(data, bytes):
                    data = np.frombuffer(bytearray(data), np.uint8) if data else np.empty(0, "u1")
                else:
                    data = self._elsewhere(name, datatype, shape)
                arrays[name] = self._arrived(tensors.from_bytes(data, datatype, shape, name, model))
        except (ValueError, KeyError) as ex:
            raise InferenceError(0, f"the server's answer is malformed: {ex}") from ex
        about = (model, opened.version, request_id)
        receipt_document = _receipt(answer.receipt, opened.instance) if receipt else None
        return Result(arrays, about, answer.parameters, receipt_document, "lane")

    def of_http(self, reply: Reply, model: str) -> Result:
        """Return an HTTP response's result. Raise InferenceError if the response is malformed."""
        try:
            return self._result(reply, model)
        except (ValueError, KeyError, TypeError, UnreadableMessage) as ex:
            raise InferenceError(0, f"the server's response is malformed: {ex}") from ex

    def _result(self, reply: Reply, model: str) -> Result:
        length = int(reply.headers.get(HEADER_LENGTH.lower(), len(reply.body)))
        document = _decode(reply.body[:length].data)
        arrays = {}
        position = length
        for output in document["outputs"]:
            name, shape = output["name"], tuple(output["shape"])
            size = (output.get("parameters") or {}).get("binary_data_size")
            if size is not None:
                data = reply.body[position : position + size]
                position += size
            elif "data" in output:
                if output["data"]:
                    raise ValueError(f"output '{name}' has data in JSON")
                data = np.empty(0, np.uint8)
            else:
                data = self._elsewhere(name, output["datatype"], shape)
            array = tensors.from_bytes(data, output["datatype"], shape, name, model)
            arrays[name] = self._arrived(array)
        receipt = reply.headers.get("shmserve-receipt")
        return Result.from_document(
            arrays, document, _decode(receipt.encode()) if receipt else None
        )

    def _arrived(self, array: Any) -> Any:
        """Return an array on the requested device; numpy arrays are aligned."""
        if not isinstance(array, np.ndarray):
            return array
        array = array if array.flags.aligned else array.copy()
        if self._device is None or array.dtype.hasobject:
            return array
        return device_arrays.to_device(array, self._device)

    def _elsewhere(self, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
        """Return the bytes of an output outside the message: the window's, or no bytes."""
        place, size = self._windows.get(name, (None, 0))
        if place is None:
            return np.empty(0, np.uint8)
        nbytes = tensors.nbytes_of(datatype, shape)
        if nbytes is None and datatype == tensors.BYTES:
            nbytes = _extent(place.pool.array(place.block, 0, size), math.prod(shape))
        if nbytes is None or nbytes > size:
            raise ValueError(f"output '{name}' is larger than its memory")
        if not nbytes:
            return np.empty(0, np.uint8)
        array = place.pool.array(place.block, 0, nbytes)
        return array.copy() if self._again else array


def _extent(data: Any, count: int) -> int:
    try:
        return bytes_codec.extent(data.data, count)
    except InvalidArgument as ex:
        raise ValueError(ex.message) from None


def _receipt(receipt: LaneReceipt, instance: str) -> dict[str, Any]:
    """Return a lane's receipt as an HTTP receipt, plus the bytes carried in messages."""
    return {
        "copied_bytes": {
            "in": receipt.copied_in,
            "batch": receipt.copied_batch,
            "out": receipt.copied_out,
            "device": receipt.copied_device,
        },
        "inline_bytes": receipt.inline,
        "ns": {"queue": receipt.queue_ns, "compute": receipt.compute_ns},
        "executor": instance,
    }
