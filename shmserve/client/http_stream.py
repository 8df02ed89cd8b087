"""Stream over HTTP: the generate_stream route, one flat JSON object for the request and one for
each answer. Requests or answers that have no such form are refused before anything is sent, if
this can be known."""

import json
import math
from typing import Any

import numpy as np

from shmserve.client import tensors
from shmserve.client.memory import device_arrays
from shmserve.client.output_sizes import DescribedModel
from shmserve.client.result import ClientCall, Result
from shmserve.client.tensors import NO_JSON, ClientTensor
from shmserve.client.wire.http_transport import EventStream
from shmserve.client.wire.inference_error import InferenceError

_OURS = ("model_name", "model_version", "id")
_IN_MIDST = 500  # events carry no status
_ELSE = "over HTTP a decoupled model's tensors are JSON (generate_stream); a lane carries them"


def generate_request(call: ClientCall, model: DescribedModel) -> bytes:
    """Return the request body. Raise InferenceError if a tensor of the request or of the model's
    answers has no JSON form, or an input hides the request's id or parameters."""
    names = {tensor.name for tensor in call.inputs}
    datatypes = [(f"input '{tensor.name}'", tensor.datatype) for tensor in call.inputs]
    datatypes += [(f"output '{name}'", datatype) for name, (datatype, _) in model.outputs.items()]
    for what, datatype in datatypes:
        if datatype in NO_JSON:
            raise InferenceError(0, f"{what} is {datatype}, which has no JSON form: {_ELSE}")
    document: dict[str, Any] = {tensor.name: _json(tensor) for tensor in call.inputs}
    for key, value in (("id", call.request_id), ("parameters", dict(call.parameters or {}))):
        if value and key in names:
            raise InferenceError(0, f"the model's input '{key}' hides the request's '{key}'")
        if value:
            document[key] = value
    return json.dumps(document).encode()


def _json(tensor: ClientTensor) -> Any:
    array = tensor.array if tensor.device is None else device_arrays.to_host(tensor.array)
    if tensor.datatype != tensors.BYTES:
        return array.tolist()
    try:
        texts = [e.decode() if isinstance(e, bytes) else e for e in array.ravel().tolist()]
    except UnicodeDecodeError:
        raise InferenceError(0, f"input '{tensor.name}' is no UTF-8: {_ELSE}") from None
    shaped = np.empty(len(texts), np.object_)
    shaped[:] = texts
    return shaped.reshape(tensor.shape).tolist()


class HttpAnswers:
    """Answers of a stream of server-sent events; implements `result_stream.AnswerSource`."""

    def __init__(self, events: EventStream, call: ClientCall, model: DescribedModel) -> None:
        self._events: EventStream | None = events
        self._call = call
        self._model = model

    def next(self) -> Result | InferenceError | None:
        """Return the next answer, as `result_stream.AnswerSource.next`."""
        event = self._events.next() if self._events is not None else None
        if event is None:
            self._events = None
            return None
        try:
            return self._told(json.loads(event))
        except (ValueError, KeyError, TypeError, AttributeError) as ex:
            raise InferenceError(0, f"the server's response is malformed: {ex}") from ex

    def close(self) -> None:
        """End the request. Idempotent."""
        events, self._events = self._events, None
        if events is not None:
            events.close()

    def _told(self, document: dict[str, Any]) -> Result | InferenceError:
        if "model_name" not in document:
            return InferenceError(_IN_MIDST, str(document["error"]))
        call, described = self._call, self._model.outputs
        requested_outputs = described if call.outputs is None else call.outputs
        arrays: dict[str, Any] = {}
        for name in requested_outputs:
            if name in document:
                array = _array(document[name], name, *described[name])
                if isinstance(array, InferenceError):
                    return array
                if call.device is not None and not array.dtype.hasobject:
                    array = device_arrays.to_device(array, call.device)
                arrays[name] = array
        parameters = {k: v for k, v in document.items() if k not in described and k not in _OURS}
        head = {key: document[key] for key in _OURS if key in document}
        return Result.from_document(arrays, {**head, "parameters": parameters}, None)


def _array(value: Any, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
    """Return flat JSON elements as an array in the output's shape. Return an InferenceError if
    several open dimensions leave the shape unknown."""
    flat = value if isinstance(value, list) else [value]
    fixed_elements = math.prod(size for size in shape if size >= 0)
    if shape.count(-1) > 1:
        if len(flat) != 1:
            text = f"output '{name}' has {len(flat)} elements in an unknown shape: {_ELSE}"
            return InferenceError(_IN_MIDST, text)
        shape = (1,) * len(shape)
    elif -1 in shape:
        open_size = len(flat) // fixed_elements if fixed_elements else 0
        shape = tuple(open_size if size < 0 else size for size in shape)
    if datatype != tensors.BYTES:
        return np.array(flat, tensors.dtype_of(datatype)).reshape(shape)
    array = np.empty(len(flat), np.object_)
    array[:] = [text.encode() for text in flat]
    return array.reshape(shape)
